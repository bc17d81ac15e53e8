"""Tests for attention masks: the expected matrices are written out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers.attention import mask as attention_mask


def _array(rows):
  return jnp.asarray(rows, jnp.int32)


def _mask(positions, segments, kv_positions=None, kv_segments=None, **kwargs):
  q_positions, q_segments = _array([positions]), _array([segments])
  return attention_mask.AttentionMask(
    q_positions=q_positions,
    kv_positions=_array([kv_positions]) if kv_positions else q_positions,
    q_segment_ids=q_segments,
    kv_segment_ids=_array([kv_segments]) if kv_segments else q_segments,
    **kwargs,
  )


CASES = {
  "causal": (
    _mask([0, 1, 2, 3], [1, 1, 1, 1]),
    ["x...", "xx..", "xxx.", "xxxx"],
  ),
  "bidirectional": (
    _mask([0, 1, 2], [1, 1, 1], causal=False),
    ["xxx", "xxx", "xxx"],
  ),
  "packed": (
    _mask([0, 1, 0, 1, 2], [1, 1, 2, 2, 2]),
    ["x....", "xx...", "..x..", "..xx.", "..xxx"],
  ),
  "packed with padding": (
    _mask([0, 1, 0, 0, 0], [1, 1, 2, 0, 0]),
    ["x....", "xx...", "..x..", ".....", "....."],
  ),
  "window": (
    _mask([0, 1, 2, 3], [1, 1, 1, 1], window=2),
    ["x...", "xx..", ".xx.", "..xx"],
  ),
  "window of one": (
    _mask([0, 1, 2], [1, 1, 1], window=1),
    ["x..", ".x.", "..x"],
  ),
  "window on both sides": (
    _mask([0, 1, 2, 3], [1, 1, 1, 1], causal=False, window=2),
    ["xx..", "xxx.", ".xxx", "..xx"],
  ),
  "window in packed": (
    _mask([0, 1, 2, 0, 1], [3, 3, 3, 4, 4], window=2),
    ["x....", "xx...", ".xx..", "...x.", "...xx"],
  ),
  "one step on a cache with padding and an empty slot": (
    _mask([2], [1], [0, 1, 0, 2, 0], [1, 1, 0, 1, 0]),
    ["xx.x."],
  ),
  "two steps on a cache with a window": (
    _mask([2, 3], [1, 1], [0, 1, 2, 3], [1, 1, 1, 1], window=2),
    [".xx.", "..xx"],
  ),
}


@pytest.mark.parametrize("case", CASES)
def test_matrix(case):
  mask, rows = CASES[case]
  expected = np.asarray([[c == "x" for c in row] for row in rows])
  np.testing.assert_array_equal(mask.to_array()[0, 0], expected)


def test_rows_of_a_batch_have_their_own_segments():
  mask = attention_mask.AttentionMask(
    q_positions=_array([[0, 1], [0, 0]]),
    kv_positions=_array([[0, 1], [0, 0]]),
    q_segment_ids=_array([[1, 1], [1, 2]]),
    kv_segment_ids=_array([[1, 1], [1, 2]]),
  )
  array = mask.to_array()
  assert array.shape == (2, 1, 2, 2)
  assert array.dtype == jnp.bool_
  assert array[:, 0].tolist() == [
    [[True, False], [True, True]],
    [[True, False], [False, True]],
  ]


def test_is_a_pytree_with_static_settings():
  mask = _mask([0, 1], [1, 1], causal=False, window=3)
  assert len(jax.tree.leaves(mask)) == 4
  through = jax.jit(lambda m: m)(mask)
  assert (through.causal, through.window) == (False, 3)
  np.testing.assert_array_equal(through.to_array(), mask.to_array())


def test_rejects_an_empty_window():
  with pytest.raises(ValueError, match=r"window must be positive, got 0"):
    _mask([0], [1], window=0)
