"""Tests for batch norm."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import testing
from paxon.layers.norms import batch_norm
from paxon.sharding import layout, mesh, variables

X = 2 * testing.normal(8, 3, 4) + 1
MASK = jax.device_put(np.arange(24).reshape(8, 3) % 5 != 0)
STATS = batch_norm.COLLECTION


def _layer(**kwargs):
  return batch_norm.BatchNorm(**{"decay": 0.9, **kwargs})


def _train(layer, values, x, mask=None):
  return testing.apply(
    layer, values, x, mask, deterministic=False, mutable=[STATS]
  )


def _oracle(params, x, mask):
  """The definition, one feature at a time, over what the mask keeps."""
  x, mask = np.asarray(x, np.float64), np.asarray(mask)
  y, means, variances = np.zeros_like(x), [], []
  for d in range(x.shape[-1]):
    real = x[..., d][mask]
    means.append(real.mean())
    variances.append(real.var())
    normed = (x[..., d] - means[-1]) / np.sqrt(variances[-1] + 1e-3)
    scale, bias = (float(params[k][d]) for k in ("scale", "bias"))
    y[..., d] = np.where(mask, normed * scale + bias, 0)
  return y, means, variances


@pytest.mark.parametrize("mask", [None, MASK], ids=["all", "padded"])
def test_training_normalizes_by_the_batch_and_moves_the_averages(mask):
  layer = _layer()
  values = testing.random_values(layer, X)
  y, state = _train(layer, values, X, mask)
  kept = np.ones((8, 3), bool) if mask is None else mask
  expected, means, variances = _oracle(values["params"], X, kept)
  np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)
  for name, moment in (("mean", means), ("variance", variances)):
    old = np.asarray(values[STATS][name], np.float64)
    np.testing.assert_allclose(
      state[STATS][name], 0.9 * old + 0.1 * np.asarray(moment), rtol=1e-5
    )


@pytest.mark.parametrize("frozen", [False, True])
def test_evaluation_normalizes_by_the_averages(frozen):
  layer = _layer(frozen=frozen)
  values = testing.random_values(layer, X)
  wide = {k: np.asarray(v, np.float64) for k, v in values[STATS].items()}
  params = {k: np.asarray(v, np.float64) for k, v in values["params"].items()}
  normed = (np.asarray(X) - wide["mean"]) / np.sqrt(wide["variance"] + 1e-3)
  expected = normed * params["scale"] + params["bias"]
  if frozen:
    y, state = _train(layer, values, X)
    for name, value in values[STATS].items():
      np.testing.assert_array_equal(state[STATS][name], value)
  else:
    y = testing.apply(layer, values, X)
  np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)


def test_gradients_match_finite_differences():
  layer = _layer()
  values = testing.random_values(layer, X)

  def loss(at):
    params, x = at
    with_stats = {"params": params, STATS: values[STATS]}
    y = layer.apply(with_stats, x, MASK, deterministic=False)
    return jnp.sum(jnp.sin(y))

  testing.assert_gradients_match(loss, (values["params"], X))


@pytest.mark.parametrize("deterministic", [False, True])
def test_padding_may_hold_anything(deterministic):
  layer = _layer()
  values = testing.random_values(layer, X)

  @jax.jit
  def gradients(params, x):
    def loss(at):
      params, x = at
      with_stats = {"params": params, STATS: values[STATS]}
      y = layer.apply(with_stats, x, MASK, deterministic=deterministic)
      return jnp.sum(jnp.sin(y))

    return jax.value_and_grad(loss)((params, x))

  bad = jnp.where(MASK[:, :, None], X, jnp.nan)
  jax.tree.map(
    np.testing.assert_array_equal,
    gradients(values["params"], bad),
    gradients(values["params"], X),
  )


def test_first_values_axes_and_rules():
  layer = _layer(scale_offset=1.0)
  specs = testing.specs(layer, X)
  assert {s.name: s.axes for s in jax.tree.leaves(specs)} == {
    f"{STATS}/mean": ("embed",),
    f"{STATS}/variance": ("embed",),
    "params/scale": ("embed",),
    "params/bias": ("embed",),
  }
  for spec in specs[STATS].values():
    assert spec.update is variables.UpdateRule.REPLACE
    assert spec.combine is variables.CombineRule.MEAN
    assert not spec.trainable
  values = testing.initial_values(layer, X)
  assert not np.any(values[STATS]["mean"])
  assert np.all(values[STATS]["variance"] == 1)
  # Then evaluation hardly changes its input.
  y = testing.apply(layer, values, X)
  np.testing.assert_allclose(y, X, rtol=1e-3, atol=1e-3)


def test_a_sharded_batch_has_the_moments_of_the_whole():
  layer = _layer()
  values = testing.random_values(layer, X)
  where = layout.Layout(mesh.make_mesh(mesh.MeshSpec.parse("data=2,fsdp=4")))

  def step(values, x, mask):
    return layer.apply(values, x, mask, deterministic=False, mutable=[STATS])

  split = where.batch_sharding(3), where.batch_sharding(2)
  compiled = where.jit(step, in_shardings=(where.replicated, *split))
  actual = compiled(values, *testing.place((X, MASK), split))
  jax.tree.map(
    lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-5),
    actual,
    _train(layer, values, X, MASK),
  )


def test_bfloat16_keeps_float32_averages():
  layer = _layer(dtype=jnp.bfloat16)
  values = testing.random_values(layer, X.astype(jnp.bfloat16))
  y, state = _train(layer, values, X.astype(jnp.bfloat16))
  assert y.dtype == jnp.bfloat16
  assert {v.dtype for v in jax.tree.leaves(state)} == {jnp.dtype("float32")}


def test_float64_stays_in_evaluation():
  values = testing.random_values(_layer(), X)
  with jax.enable_x64(True):
    x = np.random.default_rng(0).standard_normal(X.shape)
    layer = _layer(dtype=jnp.float64)
    y = layer.apply(values, jax.device_put(x))
  known = {k: np.float64(v) for c in values.values() for k, v in c.items()}
  expected = (x - known["mean"]) / np.sqrt(known["variance"] + 1e-3)
  expected = expected * known["scale"] + known["bias"]
  np.testing.assert_allclose(y, expected, rtol=1e-12)


def test_rejects_bad_fields():
  with pytest.raises(ValueError, match=r"BatchNorm.decay must be in \[0, 1\]"):
    _layer(decay=1.5)
  with pytest.raises(
    ValueError, match=r"BatchNorm.epsilon must be in \(0, 1\)"
  ):
    _layer(epsilon=0.0)
