"""Tests for rows whose places are, and are not, positions."""

import jax
import numpy as np
import pytest

from paxon.layers.attention import mask as attention_mask
from paxon.layers.attention import row_order


@pytest.mark.parametrize(
  ("segments", "positions", "expected"),
  [
    pytest.param([1, 1, 1, 1], [0, 1, 2, 3], True, id="one document"),
    pytest.param([1, 1, 1, 1], [7, 8, 9, 10], True, id="from another position"),
    pytest.param([1, 1, 4, 4], [0, 1, 0, 1], True, id="two documents"),
    pytest.param([0, 1, 1, 0], [9, 0, 1, 5], True, id="padding around"),
    pytest.param([1, 0, 2, 2], [0, 9, 0, 1], True, id="padding between"),
    pytest.param([0, 0, 0, 0], [3, 3, 1, 0], True, id="padding only"),
    pytest.param([1, 1, 1, 1], [0, 1, 1, 2], False, id="a position twice"),
    pytest.param([1, 1, 1, 1], [3, 2, 1, 0], False, id="backwards"),
    pytest.param([1, 2, 1, 2], [0, 0, 1, 1], False, id="interleaved"),
    pytest.param([1, 2, 2, 1], [0, 0, 1, 3], False, id="in two pieces"),
    pytest.param([1, 1, 0, 1], [0, 1, 2, 3], False, id="padding inside"),
    pytest.param([2, 2, 1, 1], [0, 1, 0, 1], False, id="ids that fall"),
  ],
)
def test_each_row_is_judged_alone(segments, positions, expected):
  ids = jax.device_put(np.int32([segments, [1, 1, 1, 1]]))
  places = jax.device_put(np.int32([positions, [0, 1, 2, 3]]))
  mask = attention_mask.AttentionMask(
    q_positions=places,
    kv_positions=places,
    q_segment_ids=ids,
    kv_segment_ids=ids,
  )
  assert jax.jit(lambda: row_order.is_in_order(mask))().tolist() == [
    expected,
    True,
  ]


def test_queries_and_keys_must_be_the_same_tokens():
  ids = jax.device_put(np.int32([[1, 1], [1, 0], [1, 1]]))
  positions = jax.device_put(np.int32([[0, 1], [0, 1], [0, 1]]))
  mask = attention_mask.AttentionMask(
    q_positions=positions,
    kv_positions=jax.device_put(np.int32([[1, 2], [0, 7], [0, 1]])),
    q_segment_ids=ids,
    kv_segment_ids=jax.device_put(np.int32([[1, 1], [1, 0], [2, 2]])),
  )
  assert jax.jit(lambda: row_order.is_in_order(mask))().tolist() == [
    False,
    True,
    False,
  ]
