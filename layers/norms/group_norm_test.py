"""Tests for group norm."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import testing
from paxon.layers.norms import group_norm

MASK = testing.array([[1, 1, 1, 0], [1, 1, 0, 0]], bool)
SHAPES = {3: (2, 4, 6), 4: (2, 4, 3, 6), 5: (2, 4, 2, 3, 6)}


def _layer(**kwargs):
  return group_norm.GroupNorm(**{"num_groups": 3, **kwargs})


def _oracle(params, x, mask, *, groups, cumulative, epsilon=1e-3):
  """One example, group and time at a time."""
  x = np.asarray(x, np.float64)
  y = np.zeros_like(x)
  size = x.shape[-1] // groups
  for b, g in np.ndindex(x.shape[0], groups):
    inside = slice(g * size, (g + 1) * size)
    part = x[b, ..., inside]
    real = [t for t in range(x.shape[1]) if mask[b, t]]
    squares = []
    for t in real:
      known = [s for s in real if s <= t] if cumulative else real
      mean = part[known].mean()
      squares.append(((part[t] - mean) ** 2).mean())
      variance = np.mean(squares) if cumulative else part[real].var()
      y[b, t, ..., inside] = (part[t] - mean) / np.sqrt(variance + epsilon)
  y = y * np.asarray(params["scale"]) + np.asarray(params["bias"])
  return y * np.asarray(mask).reshape(*mask.shape, *[1] * (x.ndim - 2))


@pytest.mark.parametrize("rank", SHAPES)
@pytest.mark.parametrize("cumulative", [False, True])
def test_matches_numpy(rank, cumulative):
  layer = _layer(cumulative=cumulative)
  x = 2 * testing.normal(*SHAPES[rank]) + 1
  values = testing.random_values(layer, x, MASK)
  expected = _oracle(values["params"], x, MASK, groups=3, cumulative=cumulative)
  np.testing.assert_allclose(
    testing.apply(layer, values, x, MASK), expected, rtol=1e-5, atol=1e-5
  )


@pytest.mark.parametrize("cumulative", [False, True])
def test_without_mask_everything_counts(cumulative):
  layer = _layer(cumulative=cumulative)
  x = testing.normal(*SHAPES[3])
  values = testing.random_values(layer, x)
  np.testing.assert_allclose(
    testing.apply(layer, values, x),
    testing.apply(layer, values, x, jnp.ones_like(MASK)),
    rtol=1e-6,
  )


def test_cumulative_statistics_are_causal():
  layer = _layer(cumulative=True)
  x = testing.normal(*SHAPES[3])
  values = testing.random_values(layer, x)
  before = np.asarray(testing.apply(layer, values, x))
  after = np.asarray(testing.apply(layer, values, x.at[:, 2].add(1.0)))
  np.testing.assert_array_equal(after[:, :2], before[:, :2])
  assert np.all(after[:, 2:] != before[:, 2:])


@pytest.mark.parametrize("cumulative", [False, True])
def test_gradients_match_finite_differences(cumulative):
  layer = _layer(cumulative=cumulative)
  x = testing.normal(*SHAPES[3])

  def loss(at):
    return jnp.sum(jnp.sin(layer.apply(*at, MASK)))

  testing.assert_gradients_match(loss, (testing.random_values(layer, x), x))


@pytest.mark.parametrize("cumulative", [False, True])
def test_padding_may_hold_anything(cumulative):
  layer = _layer(cumulative=cumulative)
  x = testing.normal(*SHAPES[3])
  values = testing.random_values(layer, x)

  @jax.jit
  def gradients(values, x):
    def loss(at):
      return jnp.sum(jnp.sin(layer.apply(*at, MASK)))

    return jax.value_and_grad(loss)((values, x))

  bad = jnp.where(MASK[:, :, None], x, jnp.nan)
  jax.tree.map(
    np.testing.assert_array_equal, gradients(values, bad), gradients(values, x)
  )


@pytest.mark.parametrize(
  ("groups", "least", "expected"),
  [(32, 1, 6), (32, 2, 3), (2, 3, 2), (6, 3, 2)],
)
def test_groups_are_not_smaller_than_asked(groups, least, expected):
  layer = _layer(num_groups=groups, min_group_size=least, use_bias=False)
  x = testing.normal(*SHAPES[3])
  values = testing.random_values(layer, x)
  exact = _layer(num_groups=expected, use_bias=False)
  np.testing.assert_array_equal(
    testing.apply(layer, values, x), testing.apply(exact, values, x)
  )


def test_axes_dtypes_and_offset():
  x = testing.normal(*SHAPES[3], dtype=jnp.bfloat16)
  layer = _layer(scale_offset=1.0, dtype=jnp.bfloat16)
  assert testing.axes(layer, x) == {
    "params/scale": ("embed",),
    "params/bias": ("embed",),
  }
  values = testing.initial_values(layer, x)
  assert not np.any(values["params"]["scale"])
  y = testing.apply(layer, values, x)
  assert y.dtype == jnp.bfloat16
  np.testing.assert_allclose(np.std(np.float32(y)), 1.0, atol=0.05)


def test_rejects_bad_fields_and_inputs():
  x = testing.normal(2, 4, 6)
  with pytest.raises(
    ValueError, match=r"6 features must divide .*groups \(4\)"
  ):
    _layer(num_groups=4).init(jax.random.key(0), x)
  with pytest.raises(ValueError, match=r"rank 3, 4 or 5, got shape \(2, 6\)"):
    _layer().init(jax.random.key(0), x[:, 0])
  with pytest.raises(
    ValueError, match=r"GroupNorm.num_groups must be positive"
  ):
    _layer(num_groups=0)
  with pytest.raises(
    ValueError, match=r"GroupNorm.epsilon must be in \(0, 1\)"
  ):
    _layer(epsilon=0.0)
