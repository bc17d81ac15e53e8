"""Tests for Bregman PCA, against float64 numpy from the definition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import testing
from paxon.layers.norms import batch_norm
from paxon.layers.quantizers import bregman

_STATE = batch_norm.COLLECTION
LINKS = {
  "identity": bregman.Identity(),
  "leaky": bregman.LeakyRelu(0.3),
  "softmax": bregman.Softmax(),
}
MASK = np.asarray([[1, 1, 1, 0], [0, 1, 1, 1]], bool)
_ALL = pytest.mark.parametrize("name", LINKS)


def _activate(name, z):
  if name == "softmax":
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)
  return np.where(z < 0, 0.3 * z, z) if name == "leaky" else z


def _invert(name, x):
  if name == "softmax":
    return np.log(x) - np.log(x).mean(-1, keepdims=True)
  return np.where(x < 0, x / 0.3, x) if name == "leaky" else x


def _vectors(name):
  x = np.asarray(testing.normal(2, 4, 5), np.float64)
  return _activate(name, x)


def _solve(layer, name, x, basis, mean):
  """Returns the coefficients of one vector."""
  found, average = np.zeros(len(basis)), np.zeros(len(basis))
  for t in range(layer.coefficient_steps):
    gradient = basis @ (_activate(name, mean + found @ basis) - x)
    gradient *= np.sqrt(len(basis)) / np.linalg.norm(gradient)
    average = 0.9 * average + 0.1 * gradient
    left = 1 - t / layer.coefficient_steps
    found = found - left * layer.coefficient_rate * average
  return found


@_ALL
def test_a_step_of_training_matches_numpy(name):
  layer = bregman.BregmanPca(
    3, end_step=10, link=LINKS[name], coefficient_rate=0.1
  )
  x = _vectors(name)
  dirty = np.where(MASK[..., None], x, np.nan)
  values = testing.initial_values(layer, testing.array(x))
  values = jax.tree.map(np.array, values)
  values[_STATE]["mean"] += 0.1
  values[_STATE]["momentum"] += 0.5
  with jax.enable_x64(True):
    found, after = testing.apply(
      layer,
      jax.tree.map(jnp.asarray, values),
      jnp.asarray(dirty),
      jnp.asarray(MASK),
      deterministic=False,
      mutable=[_STATE],
    )
  state = {k: np.asarray(v, np.float64) for k, v in values[_STATE].items()}
  real, basis = x[MASK], state["components"]
  mean = 0.99 * state["mean"] + 0.01 * _invert(name, real.mean(0))
  solved = np.stack([_solve(layer, name, v, basis, mean) for v in real])
  np.testing.assert_allclose(np.asarray(found)[MASK], solved, rtol=1e-6)
  assert not np.any(np.asarray(found)[~MASK])
  gradient = np.mean(
    [
      np.outer(c, _activate(name, mean + c @ basis) - v)
      for c, v in zip(solved, real, strict=True)
    ],
    axis=0,
  )
  gradient *= np.sqrt(gradient.size) / np.linalg.norm(gradient)
  momentum = 0.9 * state["momentum"] + 0.1 * gradient
  for key, expected in (
    ("mean", mean),
    ("momentum", momentum),
    ("components", basis - 0.01 * momentum),
    ("step", 1),
  ):
    np.testing.assert_allclose(after[_STATE][key], expected, rtol=1e-5)


@_ALL
def test_the_divergence_has_the_gradient_of_the_solver(name):
  link = LINKS[name]
  z, x = testing.normal(7, seed=2), testing.array(_vectors(name)[0, 0])
  z = z[:5]
  gradient = jax.jit(jax.grad(lambda z: link.diverge(z, x)))(z)
  np.testing.assert_allclose(gradient, link.activate(z) - x, atol=1e-5)
  np.testing.assert_allclose(link.activate(link.invert(x)), x, rtol=1e-5)
  assert float(link.diverge(z, x)) > 0
  np.testing.assert_allclose(link.diverge(link.invert(x), x), 0, atol=1e-5)


def test_training_finds_the_principal_components():
  layer = bregman.BregmanPca(
    2,
    end_step=400,
    coefficient_rate=0.3,
    mean_decay=0.9,
    decay_component_rate=True,
  )
  random = np.random.RandomState(0)
  data = random.standard_normal((64, 2)) @ random.standard_normal((2, 6))
  x = testing.array(data[None] + 2)
  values = testing.initial_values(layer, x)

  @jax.jit
  def step(values):
    return layer.apply(values, x, deterministic=False, mutable=[_STATE])

  def error(values):
    solved = layer.apply(values, x)
    y = layer.apply(values, solved, 6, method="reconstruct")
    return float(jnp.mean(jnp.square(y - x)))

  for _ in range(400):
    _, values = step(values)
  assert error(values) < 0.15 * np.var(data, axis=0).mean()
  # From the end on, nothing changes.
  _, later = step(values)
  for key in ("mean", "components"):
    np.testing.assert_array_equal(later[_STATE][key], values[_STATE][key])


def test_errors():
  with pytest.raises(ValueError, match="start_step < end_step, got 3 and 2"):
    bregman.BregmanPca(2, end_step=2, start_step=3)
  with pytest.raises(ValueError, match=r"negative_slope must be in \(0, 1\]"):
    bregman.LeakyRelu(0.0)
