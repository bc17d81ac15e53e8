"""Tests for quantization without codebooks, against float64 numpy."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import testing
from paxon.layers.quantizers import scalar

MASK = testing.array([[1] * 7, [1] * 4 + [0] * 3], bool)


def _padded(x):
  return jnp.where(MASK[..., None], x, jnp.nan)


def _bound(z, levels):
  levels = np.asarray(levels)
  half = (levels - 1) * (1 - 1e-3) / 2
  offset = np.where(levels % 2 == 1, 0.0, 0.5)
  return np.tanh(z + np.tan(offset / half)) * half - offset


@pytest.mark.parametrize("levels", [(8, 5, 5), (3, 2, 4), (2,)])
def test_levels_are_those_of_the_paper(levels):
  layer = scalar.FiniteScalarQuantizer(levels)
  x = 2 * testing.normal(2, 7, len(levels))
  found = testing.apply(layer, {}, _padded(x), MASK)
  kept = np.asarray(MASK)
  bounded = _bound(np.asarray(x, np.float64), levels)
  rounded, half = np.round(bounded), np.asarray(levels) // 2
  expected = np.where(kept[..., None], rounded / half, 0)
  np.testing.assert_allclose(found.values, expected, atol=1e-6)
  basis = np.cumprod([1, *levels[:-1]])
  ids = ((rounded + half) * basis).sum(axis=-1)
  np.testing.assert_array_equal(found.ids[..., 0], np.where(kept, ids, 0))
  assert found.loss == 0
  # All codes are reached, and each has an id.
  every = [np.linspace(-5, 5, 41)] * len(levels)
  many = np.stack(np.meshgrid(*every), axis=-1).reshape(-1, len(levels))
  ids = testing.apply(layer, {}, jnp.asarray(many[None], jnp.float32)).ids
  assert sorted(np.unique(ids).tolist()) == list(range(layer.num_codes))


def test_the_gradient_is_that_of_the_bounded_vector():
  levels = (8, 5)
  layer = scalar.FiniteScalarQuantizer(levels)
  x = testing.normal(2, 7, 2)
  w = testing.normal(2, 7, 2, seed=3)
  found = jax.jit(
    jax.grad(lambda x: jnp.sum(layer.apply({}, x, MASK).values * w))
  )(x)
  z, step = np.asarray(x, np.float64), 1e-5
  slope = (_bound(z + step, levels) - _bound(z - step, levels)) / (2 * step)
  expected = slope / (np.asarray(levels) // 2) * np.asarray(w)
  kept = np.asarray(MASK)[..., None]
  np.testing.assert_allclose(found, np.where(kept, expected, 0), atol=1e-5)


def test_signs_and_entropies_are_those_of_the_definition():
  """The distribution over all codes, one code at a time."""
  bits, temperature = 3, 1.7
  layer = scalar.LookupFreeQuantizer(
    bits, beta=0.3, entropy_weight=0.7, temperature=temperature
  )
  x = testing.normal(2, 7, bits)
  found = jax.jit(lambda x: layer.apply({}, x, MASK))(_padded(x))
  kept, z = np.asarray(MASK), np.asarray(x, np.float64)
  signs = np.where(z > 0, 1.0, -1.0)
  np.testing.assert_array_equal(
    found.values, np.where(kept[..., None], signs, 0)
  )
  ids = ((z > 0) * 2 ** np.arange(bits)).sum(axis=-1)
  np.testing.assert_array_equal(found.ids[..., 0], np.where(kept, ids, 0))
  every = np.asarray([*itertools.product([-1.0, 1.0], repeat=bits)])
  real = z[kept]
  scores = -((real[:, None] - every[None]) ** 2).sum(axis=-1) / temperature
  probs = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
  own = -(probs * np.log(probs)).sum(axis=1).mean()
  mean = probs.mean(axis=0)
  together = -(mean * np.log(mean)).sum()
  commitment = ((real - signs[kept]) ** 2).sum(axis=-1).mean()
  expected = 0.3 * commitment + 0.7 * (own - together)
  np.testing.assert_allclose(found.loss, expected, rtol=1e-5)
  plain = scalar.LookupFreeQuantizer(bits, beta=0.3, entropy_weight=0.0)
  loss = testing.apply(plain, {}, _padded(x), MASK).loss
  np.testing.assert_allclose(loss, 0.3 * commitment, rtol=1e-5)


def test_gradients_of_the_losses_match_finite_differences():
  layer = scalar.LookupFreeQuantizer(3)
  testing.assert_gradients_match(
    lambda x: layer.apply({}, x, MASK).loss, testing.normal(2, 7, 3)
  )


@pytest.mark.parametrize(
  ("make", "message"),
  [
    (lambda: scalar.FiniteScalarQuantizer(()), r"levels must be numbers of at"),
    (lambda: scalar.FiniteScalarQuantizer((3, 1)), r"at least 2, got \(3, 1\)"),
    (lambda: scalar.FiniteScalarQuantizer((9,) * 10), r"more codes than int32"),
    (lambda: scalar.LookupFreeQuantizer(13), r"at most 12 with an entropy_wei"),
    (
      lambda: scalar.LookupFreeQuantizer(32, entropy_weight=0.0),
      r"at most 31, got 32",
    ),
    (
      lambda: scalar.LookupFreeQuantizer(3, temperature=0.0),
      r"temperature mus",
    ),
  ],
)
def test_rejects_wrong_fields(make, message):
  with pytest.raises(ValueError, match=message):
    make()


def test_rejects_other_numbers_of_features():
  x = testing.normal(2, 7, 4)
  with pytest.raises(ValueError, match=r"levels is for 3 features, got 4"):
    scalar.FiniteScalarQuantizer((3, 3, 3)).apply({}, x)
  with pytest.raises(ValueError, match=r"num_bits is for 3 features, got 4"):
    scalar.LookupFreeQuantizer(3).apply({}, x)
