"""Tests for contrastive losses, in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import testing
from paxon.layers.losses import contrastive_losses

_RANDOM = np.random.default_rng(0)
_LOGITS = _RANDOM.normal(0, 2, (5, 5))
_WEIGHTS = np.asarray([1.0, 0.0, 2.0, 1.0, 0.5])


@pytest.fixture(autouse=True)
def _x64():
  with jax.enable_x64(True):
    yield


def _softmax(logits, real, i):
  """The mean of both directions, for one pair, from the definition."""
  exps = {j: np.exp(logits[i, j]) for j in real}
  of_image = exps[i] / sum(exps.values())
  exps = {j: np.exp(logits[j, i]) for j in real}
  of_text = exps[i] / sum(exps.values())
  return -(np.log(of_image) + np.log(of_text)) / 2


def _sigmoid(logits, real, i):
  """The sum over texts, for one image, from the definition."""
  total = 0.0
  for j in real:
    sign = 1 if i == j else -1
    total -= np.log(1 / (1 + np.exp(-sign * logits[i, j])))
  return total


@pytest.mark.parametrize("name", ["softmax", "sigmoid"])
def test_matches_the_definition_without_padding_as_negatives(name):
  fn = getattr(contrastive_losses, name)
  define = {"softmax": _softmax, "sigmoid": _sigmoid}[name]
  found = fn(jnp.asarray(_LOGITS), jnp.asarray(_WEIGHTS))
  real = np.flatnonzero(_WEIGHTS)
  expected = [define(_LOGITS, real, i) for i in real]
  np.testing.assert_allclose(found[real], expected, rtol=1e-12)
  assert np.isfinite(found).all()

  def loss(logits):
    return jnp.sum(fn(logits, jnp.asarray(_WEIGHTS)) * jnp.asarray(_WEIGHTS))

  testing.assert_gradients_match(loss, _LOGITS)
  gradient = jax.jit(jax.grad(loss))(jnp.asarray(_LOGITS))
  assert not gradient[1].any()
  assert not gradient[:, 1].any()


@pytest.mark.parametrize("name", ["softmax", "sigmoid"])
def test_large_logits_are_finite_and_low_precision_is_widened(name):
  fn, weights = getattr(contrastive_losses, name), jnp.ones((3,))
  logits = 1e4 * (1 - 2 * jnp.eye(3))
  loss, gradient = jax.jit(jax.value_and_grad(lambda x: fn(x, weights).sum()))(
    logits
  )
  assert np.isfinite(loss)
  assert np.isfinite(gradient).all()
  assert fn(logits.astype(jnp.bfloat16), weights).dtype == jnp.float32
