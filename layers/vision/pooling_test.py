"""Tests for pooling, against float64 numpy from the definition."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import testing
from paxon.layers.vision import pooling

MASK = testing.array([[1] * 7, [1] * 4 + [0] * 3], bool)


def _oracle(x, mask, layer):
  """Reduces one window and example at a time."""
  x = np.asarray(x, np.float64)
  strides = layer.strides or layer.window
  outs, before = [], []
  for size, window, stride in zip(
    x.shape[1:-1], layer.window, strides, strict=True
  ):
    if layer.same:
      outs.append(-(-size // stride))
      before.append(max((outs[-1] - 1) * stride + window - size, 0) // 2)
    else:
      outs.append((size - window) // stride + 1)
      before.append(0)
  y = np.zeros((x.shape[0], *outs, x.shape[-1]))
  for place in itertools.product(range(x.shape[0]), *map(range, outs)):
    found = []
    for tap in np.ndindex(layer.window):
      at = [
        p * s + i - b
        for p, s, i, b in zip(place[1:], strides, tap, before, strict=True)
      ]
      inside = all(0 <= i < n for i, n in zip(at, x.shape[1:-1], strict=True))
      if inside and (mask is None or mask[place[0], at[0]]):
        found.append(x[(place[0], *at)])
    is_real = bool(found) and (
      mask is None
      or not layer.same
      or bool(mask[place[0], place[1] * strides[0]])
    )
    if is_real:
      is_max = layer.reduction is pooling.Reduction.MAX
      y[place] = np.max(found, 0) if is_max else np.mean(found, 0)
  return y


@pytest.mark.parametrize("reduction", pooling.Reduction)
@pytest.mark.parametrize("same", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
  ("size", "window", "strides"),
  [((7,), (3,), (1,)), ((7, 6), (3, 2), (2, 1)), ((7, 4, 4), (2, 2, 3), None)],
)
def test_matches_numpy(reduction, same, masked, size, window, strides):
  layer = pooling.Pooling(
    window=window, strides=strides, reduction=reduction, same=same
  )
  x = testing.normal(2, *size, 3)
  mask = MASK if masked else None
  expected = _oracle(x, mask, layer)
  if masked:
    x = jnp.where(MASK.reshape(2, 7, *[1] * len(size)), x, jnp.nan)
  found = layer(x, mask)
  assert found.shape == expected.shape
  np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("reduction", pooling.Reduction)
def test_gradients_match_finite_differences(reduction):
  layer = pooling.Pooling(window=(3, 2), strides=(2, 2), reduction=reduction)

  def loss(at):
    whole = pooling.pool_all(
      at, MASK[:, :, None, None], axes=(1, 2), reduction=reduction
    )
    return jnp.sum(jnp.sin(layer(at, MASK))) + jnp.sum(jnp.cos(whole))

  testing.assert_gradients_match(loss, testing.normal(2, 7, 6, 3))


@pytest.mark.parametrize("reduction", pooling.Reduction)
def test_pool_all_matches_numpy(reduction):
  x = testing.normal(2, 7, 3, 4)
  wide = np.asarray(x, np.float64)
  take = np.max if reduction is pooling.Reduction.MAX else np.mean
  found = pooling.pool_all(x, axes=(1, 2), reduction=reduction)
  np.testing.assert_allclose(found, take(wide, (1, 2)), rtol=1e-5, atol=1e-6)
  bad = jnp.where(MASK[:, :, None, None], x, jnp.nan)
  found = pooling.pool_all(
    bad, MASK[:, :, None, None], axes=(1, 2), reduction=reduction
  )
  expected = [take(wide[0], (0, 1)), take(wide[1, :4], (0, 1))]
  np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
  nothing = pooling.pool_all(
    bad, jnp.zeros_like(bad, bool), axes=(1, 2), reduction=reduction
  )
  assert not np.any(nothing)


def test_errors():
  with pytest.raises(ValueError, match=r"Pooling.window must have positive"):
    pooling.Pooling(window=())
  with pytest.raises(ValueError, match=r"Pooling.strides must have positive"):
    pooling.Pooling(window=(2, 2), strides=(1,))
  with pytest.raises(ValueError, match=r"needs an input of rank 4, got"):
    pooling.Pooling(window=(2, 2))(jnp.ones((2, 4, 3)))


def _check_max_behind_a_norm(reduce, level):
  """Compares jitted float32 gradients with float64 ones, for 20 seeds."""
  gain, shift = np.asarray(testing.normal(2, 1, 1, 32))

  def loss(x):
    centered = x - jnp.mean(x, axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(centered), axis=-1, keepdims=True)
    y = centered * jax.lax.rsqrt(variance + 1e-6) * gain.astype(x.dtype)
    y = reduce(y + shift.astype(x.dtype))
    factors = jnp.sin(jnp.arange(y.size, dtype=y.dtype).reshape(y.shape))
    return jnp.sum(y * factors)

  inputs = [
    np.random.default_rng(seed).normal(size=(4, 16, 32)) for seed in range(20)
  ]
  options = {"xla_backend_optimization_level": level}
  gradient = jax.jit(jax.grad(loss), compiler_options=options)
  with jax.enable_x64(True):
    expected = [np.asarray(gradient(x)) for x in inputs]
  for x, wide in zip(inputs, expected, strict=True):
    found = gradient(x.astype(np.float32))
    np.testing.assert_allclose(found, wide, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("level", [0, 2])
def test_the_gradient_of_a_maximum_behind_a_norm_is_complete(level):
  # Without optimization XLA:CPU rounds differently in the reduction and in a
  # comparison with its result; `jnp.max` has a NaN for each of these seeds.
  layer = pooling.Pooling(window=(4,))

  def reduce(y):
    over = [
      pooling.pool_all(y, axes=axes, reduction=pooling.Reduction.MAX)
      for axes in ((1,), (2, 0))
    ]
    return jnp.concatenate([x.reshape(-1) for x in (layer(y), *over)])

  _check_max_behind_a_norm(reduce, level)


def test_the_gradient_of_a_maximum_goes_to_the_first_of_equal_values():
  x = np.round(np.asarray(testing.normal(2, 6, 4, 3)))
  layer = pooling.Pooling(window=(6, 4))
  factors = testing.normal(2, 3)
  grads = [
    jax.grad(lambda x, fn=fn: jnp.sum(fn(x) * factors))(x)
    for fn in (
      lambda x: layer(x)[:, 0, 0],
      lambda x: pooling.pool_all(
        x, axes=(2, 1), reduction=pooling.Reduction.MAX
      ),
    )
  ]
  # PyTorch's `max_pool2d` has the same gradient.
  flat = x.reshape(2, -1, 3)
  first = np.argmax(flat, axis=1)[:, None]
  is_first = np.arange(flat.shape[1])[None, :, None] == first
  assert np.any(np.sum(flat == flat.max(1, keepdims=True), axis=1) > 1)
  expected = np.where(is_first, np.asarray(factors)[:, None], 0)
  expected = expected.reshape(x.shape)
  for found in grads:
    np.testing.assert_array_equal(found, expected)
