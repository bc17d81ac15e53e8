"""Tests for stacking of frames over time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import testing
from paxon.layers.speech import stacked_frames

REPEAT = stacked_frames.Edge.REPEAT


def _frames(**kwargs):
  return stacked_frames.StackedFrames(**kwargs)


def _stacked(x, mask, **kwargs):
  return jax.jit(lambda *args: _frames(**kwargs)(*args))(x, mask)


def _oracle(x, *, left, right, stride, before=None, after=None):
  """One frame at a time; `before` and `after` stand beyond the edges."""
  rows = []
  for row in np.asarray(x):
    out = []
    for middle in range(0, len(row), stride):
      parts = []
      for t in range(middle - left, middle + right + 1):
        if t < 0:
          parts.append(row[0] if before is None else before)
        elif t >= len(row):
          parts.append(row[-1] if after is None else after)
        else:
          parts.append(row[t])
      out.append(np.concatenate(parts))
    rows.append(out)
  return np.asarray(rows)


def test_the_example_of_the_documentation():
  x = testing.array([[4, 1, 9, 3, 5, 2, 8]])[:, :, None]
  y, mask = _stacked(x, np.ones((1, 7), bool), left=1, right=1, stride=3)
  assert y[0].tolist() == [[0, 4, 1], [9, 3, 5], [2, 8, 0]]
  assert mask.tolist() == [[True] * 3]


@pytest.mark.parametrize("stride", [1, 2, 3, 5])
@pytest.mark.parametrize(("left", "right"), [(0, 0), (2, 0), (1, 2), (0, 3)])
def test_matches_numpy(left, right, stride):
  x, ones = testing.normal(2, 7, 3), np.ones((2, 7), bool)
  kwargs = {"left": left, "right": right, "stride": stride}
  zero = np.zeros(3, np.float32)
  np.testing.assert_array_equal(
    _stacked(x, ones, **kwargs)[0],
    _oracle(x, **kwargs, before=zero, after=zero),
  )
  repeated = _stacked(x, ones, **kwargs, left_edge=REPEAT, right_edge=REPEAT)
  np.testing.assert_array_equal(repeated[0], _oracle(x, **kwargs))


def test_a_stacked_frame_is_real_where_any_or_all_of_its_frames_are():
  x = testing.normal(2, 6, 1)
  mask = testing.array([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]], bool)
  kwargs = {"left": 1, "right": 1, "stride": 2}
  some = _stacked(x, mask, **kwargs)[1]
  assert some.tolist() == [[True, True, True], [True, True, False]]
  every = _stacked(x, mask, **kwargs, reduce=jnp.all)[1]
  # Zeros before the first frame are not real.
  assert every.tolist() == [[False, True, True], [False, False, False]]
  edges = _stacked(x, mask, **kwargs, reduce=jnp.all, left_edge=REPEAT)[1]
  assert edges.tolist() == [[True, True, True], [True, False, False]]


@pytest.mark.parametrize(
  ("left", "right", "stride"), [(1, 1, 3), (2, 1, 4), (0, 2, 3), (3, 0, 2)]
)
def test_unstack_is_the_inverse(left, right, stride):
  x = testing.normal(2, 8, 3)
  frames = _frames(left=left, right=right, stride=stride)

  @jax.jit
  def run(x):
    stacked, _ = frames(x, jnp.ones((2, 8), bool))
    return stacked, frames.unstack(stacked)

  stacked, again = map(np.asarray, run(x))
  assert again.shape[1] == (stacked.shape[1] - 1) * stride + 1 + right
  assert again.shape[1] >= 8 - max(stride - 1 - right, 0)
  both = min(8, again.shape[1])
  np.testing.assert_array_equal(again[:, :both], np.asarray(x)[:, :both])
  assert not np.any(again[:, both:])


def test_rejects_bad_fields_and_lost_frames():
  with pytest.raises(ValueError, match=r"stride must be positive, got 0"):
    _frames(stride=0)
  with pytest.raises(ValueError, match=r"left must not be negative, got -1"):
    _frames(left=-1)
  with pytest.raises(ValueError, match=r"stride \(3\) must be at most its win"):
    _frames(left=1, stride=3).unstack(testing.normal(1, 2, 4))
  with pytest.raises(ValueError, match=r"multiple of 2, got 3"):
    _frames(left=1).unstack(testing.normal(1, 2, 3))
