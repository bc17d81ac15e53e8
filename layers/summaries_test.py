"""Tests for figures that layers tell."""

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import summaries


class _Layer(nn.Module):
  @nn.compact
  def __call__(self, x):
    summaries.summarize(self, "mean", jnp.mean(x))
    summaries.summarize(self, "half", jnp.mean(x).astype(jnp.bfloat16))
    return nn.Dense(2)(x)


class _Wrong(nn.Module):
  @nn.compact
  def __call__(self, x):
    summaries.summarize(self, "x", x)
    return x


X = jnp.arange(6.0).reshape(2, 3)


def test_values_are_float32_scalars_in_their_collection():
  variables = _Layer().init(jax.random.key(0), X)
  _, new = _Layer().apply(variables, X, mutable=[summaries.COLLECTION])
  told = new[summaries.COLLECTION]
  assert {k: float(v[0]) for k, v in told.items()} == {"mean": 2.5, "half": 2.5}
  assert {v[0].dtype.name for v in told.values()} == {"float32"}


def test_initial_values_have_none():
  assert set(_Layer().init(jax.random.key(0), X)) == {"params"}


def test_nothing_is_computed_where_nobody_listens():
  variables = _Layer().init(jax.random.key(0), X)

  def count(**options):
    fn = jax.jit(lambda x: _Layer().apply(variables, x, **options))
    return fn.lower(X).compile().as_text().count("reduce")

  assert count() == 0
  assert count(mutable=[summaries.COLLECTION]) > 0


def test_no_gradient_passes():
  variables = _Layer().init(jax.random.key(0), X)

  def told(x):
    _, new = _Layer().apply(variables, x, mutable=[summaries.COLLECTION])
    return new[summaries.COLLECTION]["mean"][0]

  np.testing.assert_array_equal(jax.jit(jax.grad(told))(X), jnp.zeros_like(X))


def test_only_scalars():
  with pytest.raises(
    ValueError, match=r"summary 'x' of _Wrong must be a scalar.*shape \(2, 3\)"
  ):
    _Wrong().apply({}, X)


class _Leveled(nn.Module):
  level: int

  @nn.compact
  def __call__(self, x):
    summaries.summarize(self, "mean", jnp.mean(x), level=self.level)
    return x


@pytest.mark.parametrize("level", [0, 1, 2])
def test_each_level_has_its_collection(level):
  _, new = _Leveled(level).apply({}, X, mutable=list(summaries.COLLECTIONS))
  assert set(new) == {summaries.COLLECTIONS[level]}
  assert float(new[summaries.COLLECTIONS[level]]["mean"][0]) == 2.5


@pytest.mark.parametrize("level", [-1, 3])
def test_other_levels_are_rejected(level):
  with pytest.raises(
    ValueError, match=rf"'mean' .* from 0 to 2, got {level}\."
  ):
    _Leveled(level).apply({}, X, mutable=[summaries.COLLECTION])


def _record(fn):
  class Layer(nn.Module):
    @nn.compact
    def __call__(self, x):
      fn(self, x)
      return x

  _, new = Layer().apply({}, X, mutable=[summaries.COLLECTIONS[1]])
  return new[summaries.COLLECTIONS[1]]


def test_a_histogram_counts_each_finite_value_in_its_bin():
  special = [0.0, -0.0, 2.0**-16, 1.0, 3e38, np.inf, -np.inf, np.nan, -5.0]
  normal = np.random.default_rng(0).normal(size=(7, 11, 13)).astype(np.float32)
  values = np.concatenate([normal.ravel(), np.float32(special)])
  found = _record(
    lambda layer, x: summaries.record_histogram(layer, "h", jnp.asarray(values))
  )
  (counted,) = found["h:histogram"]
  *counts, total, squares = np.asarray(counted).tolist()
  edges = [-np.inf, *summaries.LIMITS, np.inf]
  kept = values[~np.isnan(values)]
  # Values that equal a limit are below it, and numpy's above.
  inside = np.searchsorted(summaries.LIMITS, kept.astype(np.float64))
  wanted = np.bincount(inside, minlength=len(edges) - 1)
  np.testing.assert_array_equal(counts, wanted)
  assert sum(counts) == values.size - 1
  finite = values[np.isfinite(values)].astype(np.float64)
  assert total == pytest.approx(finite.sum(), rel=1e-5)
  assert squares in (pytest.approx((finite**2).sum(), rel=1e-5), np.inf)


@pytest.mark.parametrize("shape", [(2, 3), (2, 3, 1), (2, 3, 3)])
def test_an_image_has_channels(shape):
  image = jnp.ones(shape, jnp.bfloat16)
  found = _record(lambda layer, x: summaries.record_image(layer, "i", image))
  (kept,) = found["i:image"]
  assert kept.shape == (2, 3, shape[2] if len(shape) == 3 else 1)
  assert kept.dtype == jnp.float32


@pytest.mark.parametrize("shape", [(2, 3, 2), (1025, 1)])
def test_another_shape_is_no_image(shape):
  with pytest.raises(ValueError, match="The image 'i' of Layer must be"):
    _record(
      lambda layer, x: summaries.record_image(layer, "i", jnp.ones(shape))
    )


def test_levels_of_arrays_are_checked():
  with pytest.raises(ValueError, match="from 0 to 2, got 3"):
    _record(lambda layer, x: summaries.record_histogram(layer, "h", x, level=3))
