"""Tests for initializers, by the moments and bounds of many values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import initializers as init
from paxon.layers import linear, testing
from paxon.layers.stacks import stack

KEY = jax.random.key(0)
# In 300, out 40 * 5 = 200; as a convolution: in 300 * 40, out 300 * 5.
SHAPE = (300, 40, 5)
HEADS = {"in_axes": (0,), "out_axes": (1, 2)}
# Standard deviation of a normal cut off at two, from its integral.
CUT = 0.8796256610342398


def _values(initializer, shape=SHAPE):
  made = jax.jit(lambda key: initializer(key, shape, jnp.float32))(KEY)
  return np.asarray(made, np.float64)


@pytest.mark.parametrize(
  ("initializer", "deviation", "bound"),
  [
    (init.Normal(0.3), 0.3, np.inf),
    (init.TruncatedNormal(0.3), 0.3 * CUT, 0.6),
    (init.Uniform(0.3), 0.3 / 3**0.5, 0.3),
    (init.xavier(2.0, **HEADS), 2 * 500**-0.5 * 2**0.5, 2 * (6 / 500) ** 0.5),
    (init.xavier(), (2 / 13500) ** 0.5, (6 / 13500) ** 0.5),
    (init.fixup(16, 2), 0.5 * (2 / 13500) ** 0.5, 0.5 * (6 / 13500) ** 0.5),
    (init.FanScaled(2.0, **HEADS), 2 * 300**-0.5, np.inf),
    (init.FanScaled(2.0), 2 * 12000**-0.5, np.inf),
    (init.FanScaled(1.0, init.Fan.OUT, **HEADS), 200**-0.5, np.inf),
    (init.FanScaled(1.0, init.Fan.AVERAGE, **HEADS), 250**-0.5, np.inf),
    (init.FanScaled(1.0, init.Fan.FIRST), 300**-0.5, np.inf),
    (
      init.FanScaled(1.0, init.Fan.OUT, init.Distribution.TRUNCATED_NORMAL),
      CUT * 1500**-0.5,
      2 * 1500**-0.5,
    ),
    (
      init.FanScaled(3**-0.5, init.Fan.FIRST, init.Distribution.UNIFORM),
      900**-0.5,
      300**-0.5,
    ),
    (
      init.FanScaled(1.0, init.Fan.IN, init.Distribution.UNIFORM),
      12000**-0.5,
      (3 / 12000) ** 0.5,
    ),
    (init.lecun(**HEADS), 300**-0.5, 2 / CUT * 300**-0.5),
  ],
)
def test_deviation_and_bound(initializer, deviation, bound):
  values = _values(initializer)
  assert abs(values.mean()) < 0.02 * deviation
  np.testing.assert_allclose(values.std(), deviation, rtol=0.01)
  assert np.abs(values).max() <= bound * (1 + 1e-6)
  if bound < np.inf:
    assert np.abs(values).max() > 0.99 * bound


def test_fans_of_the_way_back_and_of_experts():
  assert init.fans((4, 8, 32), (0, 1), (2,)) == (32, 32)
  # Eight experts of [32, 64]: the first axis counts for nothing.
  assert init.fans((8, 32, 64), (1,), (2,)) == (32, 64)
  assert init.fans((3, 3, 16, 32)) == (144, 288)
  assert init.fans((7,)) == (7, 7)
  assert init.fans(()) == (1, 1)


def test_constant():
  assert _values(init.Constant(2.5)).tolist() == np.full(SHAPE, 2.5).tolist()
  assert init.Constant(3)(KEY, (2,), jnp.int32).tolist() == [3, 3]
  with pytest.raises(ValueError, match=r"integer for int32, got 0.5"):
    init.Constant(0.5)(KEY, (2,), jnp.int32)


@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (3, 5, 4, 6)])
def test_orthogonal_keeps_lengths(shape):
  values = _values(init.Orthogonal(), shape)
  matrix = values[1, 2] if len(shape) == 4 else values
  rest = np.sum(values**2) - np.sum(matrix**2)
  assert rest == 0
  scale = max(shape[-2] / shape[-1], 1.0)
  small = matrix @ matrix.T if shape[-2] < shape[-1] else matrix.T @ matrix
  np.testing.assert_allclose(small, scale * np.eye(len(small)), atol=1e-5)


def test_a_vector_has_no_directions_to_keep():
  assert _values(init.Orthogonal(), (8,)).shape == (8,)


def test_equal_settings_are_equal_also_through_a_scan():
  assert init.xavier(2.0) == init.xavier(2.0)
  assert hash(init.Normal(0.1)) == hash(init.Normal(0.1))
  assert init.Normal(0.1) != init.TruncatedNormal(0.1)
  x = testing.normal(1, 2, 4)
  layers = stack.Stack(
    (linear.Linear(4, kernel_init=init.xavier(), kernel_axes=("embed", None)),),
    num_layers=3,
  )
  values = testing.initial_values(layers, x)["params"]["layers"]["blocks_0"]
  assert len(np.unique(values["kernel"])) == 3 * 4 * 4


def test_one_kind_of_axes_is_an_error():
  message = r"in_axes and FanScaled.out_axes must be given together, got \(0,\)"
  with pytest.raises(ValueError, match=message):
    init.FanScaled(in_axes=(0,))


@pytest.mark.parametrize(
  ("initializer", "expected"),
  [
    (init.Normal(0.02), 0.02),
    (init.TruncatedNormal(0.5), 0.5),
    (init.Uniform(0.3), 0.3 / np.sqrt(3)),
    (init.FanScaled(2.0), 2 / np.sqrt(600)),
    # The bound sqrt(6 / (in + out)) of a uniform distribution.
    (init.xavier(), np.sqrt(6 / (600 + 500)) / np.sqrt(3)),
    (init.FanScaled(1.0, init.Fan.OUT), 1 / np.sqrt(500)),
    (init.FanScaled(1.0, init.Fan.FIRST), 1 / np.sqrt(600)),
  ],
)
def test_deviations_are_those_of_the_values(initializer, expected):
  found = initializer.deviation((600, 500))
  assert found == pytest.approx(expected, rel=1e-12)
  values = np.asarray(initializer(jax.random.key(0), (600, 500), jnp.float32))
  is_truncated = isinstance(initializer, init.TruncatedNormal)
  factor = CUT if is_truncated else 1.0
  assert values.std() == pytest.approx(factor * found, rel=0.01)
