"""Tests for attention masks: the expected matrices are written out."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers.attention import mask as attention_mask


def _array(rows):
  return jax.device_put(np.int32(rows))


def _mask(
  positions,
  segments,
  kv_positions=None,
  kv_segments=None,
  prefix=None,
  **kwargs,
):
  prefix = (
    None if prefix is None else jax.device_put(np.asarray([prefix], bool))
  )
  q_positions, q_segments = _array([positions]), _array([segments])
  return attention_mask.AttentionMask(
    q_positions=q_positions,
    kv_positions=_array([kv_positions]) if kv_positions else q_positions,
    q_segment_ids=q_segments,
    kv_segment_ids=_array([kv_segments]) if kv_segments else q_segments,
    q_prefix=prefix,
    kv_prefix=prefix,
    rules=attention_mask.MaskRules(**kwargs),
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
  "later positions up to a limit": (
    _mask([0, 1, 2, 3], [1, 1, 1, 1], causal=False, right_window=1),
    ["xx..", "xxx.", "xxxx", "xxxx"],
  ),
  "limits on both sides": (
    _mask([0, 1, 2, 3], [1, 1, 1, 1], causal=False, window=3, right_window=1),
    ["xx..", "xxx.", "xxxx", ".xxx"],
  ),
  "nothing later is causal": (
    _mask([0, 1, 2], [1, 1, 1], causal=False, right_window=0),
    ["x..", "xx.", "xxx"],
  ),
  "limits in packed": (
    _mask([0, 1, 2, 0, 1], [1, 1, 1, 2, 2], causal=False, right_window=1),
    ["xx...", "xxx..", "xxx..", "...xx", "...xx"],
  ),
  "chunks": (
    _mask([0, 1, 2, 3, 4], [1] * 5, chunk=2),
    ["x....", "xx...", "..x..", "..xx.", "....x"],
  ),
  "chunks in both directions": (
    _mask([0, 1, 2, 3, 4], [1] * 5, chunk=2, causal=False),
    ["xx...", "xx...", "..xx.", "..xx.", "....x"],
  ),
  "chunks begin with the document": (
    _mask([0, 1, 2, 0, 1, 2], [1, 1, 1, 2, 2, 2], chunk=2),
    ["x.....", "xx....", "..x...", "...x..", "...xx.", ".....x"],
  ),
  "prefix": (
    _mask([0, 1, 2, 3], [1] * 4, prefix=[1, 1, 0, 0]),
    ["xx..", "xx..", "xxx.", "xxxx"],
  ),
  "prefixes of packed documents": (
    _mask([0, 1, 2, 0, 1, 0], [1, 1, 1, 2, 2, 0], prefix=[1, 1, 0, 1, 1, 1]),
    ["xx....", "xx....", "xxx...", "...xx.", "...xx.", "......"],
  ),
  "prefix in a window": (
    _mask([0, 1, 2, 3], [1] * 4, prefix=[1, 1, 1, 0], window=2),
    ["xx..", "xxx.", ".xx.", "..xx"],
  ),
  "one step on chunks": (
    _mask([3], [1], [0, 1, 2, 3, 0], [1, 1, 1, 1, 0], chunk=2),
    ["..xx."],
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


@functools.cache
def _read():
  """Matrices of all cases, and which queries see a key, by one program.

  Each of a mask as it was made, and as it comes through a step, where its
  arrays are others.
  """

  def read(mask):
    matrix = mask.to_array()
    return matrix, mask.sees_any(matrix)

  masks = {case: mask for case, (mask, _) in CASES.items()}
  run = jax.jit(
    lambda given: {c: (read(masks[c]), read(given[c])) for c in masks}
  )
  return jax.tree.map(np.asarray, run(masks))


@pytest.mark.parametrize("case", CASES)
def test_matrix(case):
  _, rows = CASES[case]
  expected = np.asarray([[c == "x" for c in row] for row in rows])
  for matrix, _ in _read()[case]:
    np.testing.assert_array_equal(matrix[0, 0], expected)


@pytest.mark.parametrize("case", CASES)
def test_knows_which_queries_see_a_key(case):
  _, rows = CASES[case]
  expected = [["x" in row for row in rows]]
  # Through a step its arrays are others, and the matrix is read.
  for _, sees_any in _read()[case]:
    assert sees_any.tolist() == expected


def test_a_query_before_all_keys_sees_none():
  mask = _mask([0, 5], [1, 1], [3, 4], [1, 1])
  assert mask.sees_any(mask.to_array()).tolist() == [[False, True]]


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
  assert (through.rules.causal, through.rules.window) == (False, 3)
  np.testing.assert_array_equal(through.to_array(), mask.to_array())


@pytest.mark.parametrize("case", CASES)
def test_reach_covers_what_is_visible(case):
  mask, rows = CASES[case]
  before, after = mask.reach
  q_positions, kv_positions = (
    np.asarray(p[0]) for p in (mask.q_positions, mask.kv_positions)
  )
  for t, s in np.ndindex(len(rows), len(rows[0])):
    distance = q_positions[t] - kv_positions[s]
    if rows[t][s] == "x":
      assert before is None or distance <= before
      assert after is None or -distance <= after


def test_reach_and_dependence_on_positions():
  assert _mask([0], [1]).reach == (None, 0)
  assert _mask([0], [1], window=3).reach == (2, 0)
  assert _mask([0], [1], window=3, causal=False).reach == (2, 2)
  assert _mask([0], [1], window=3, prefix=[1]).reach == (2, 2)
  assert _mask([0], [1], chunk=4).reach == (3, 0)
  limited = _mask([0], [1], window=3, right_window=5, causal=False)
  assert limited.reach == (2, 5)
  assert limited.by_position
  assert _mask([0], [1]).by_position
  assert not _mask([0], [1], causal=False).by_position


@pytest.mark.parametrize(
  ("rules", "message"),
  [
    ({"window": 0}, r"MaskRules\.window must be positive, got 0"),
    ({"chunk": 0}, r"MaskRules\.chunk must be positive, got 0"),
    ({"right_window": -1, "causal": False}, r"right_window must not be negat"),
    ({"right_window": 2}, r"right_window \(2\) needs causal=False"),
    ({"chunk": 2, "window": 2}, r"chunk \(2\) cannot .* a window \(2, right"),
    (
      {"chunk": 2, "right_window": 1, "causal": False},
      r"chunk \(2\) cannot be combined .* \(None, right_window 1\)",
    ),
    ({"prefix": [1], "causal": False}, r"q_prefix needs causal=True"),
  ],
  ids=str,
)
def test_rejects_contradictory_rules(rules, message):
  with pytest.raises(ValueError, match=message):
    _mask([0], [1], **rules)


def test_rejects_a_prefix_of_queries_alone():
  with pytest.raises(ValueError, match=r"q_prefix and kv_prefix must be given"):
    attention_mask.AttentionMask(
      q_positions=_array([[0]]),
      kv_positions=_array([[0]]),
      q_segment_ids=_array([[1]]),
      kv_segment_ids=_array([[1]]),
      q_prefix=jnp.ones((1, 1), bool),
    )


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
  assert jax.jit(lambda: attention_mask.is_in_order(mask))().tolist() == [
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
  assert jax.jit(lambda: attention_mask.is_in_order(mask))().tolist() == [
    False,
    True,
    False,
  ]
