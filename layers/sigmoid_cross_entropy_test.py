"""Tests for sigmoid cross entropy."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from paxon.layers import sigmoid_cross_entropy, testing

LOGITS = 4 * testing.normal(2, 3, 5)
TARGETS = jax.nn.sigmoid(testing.normal(2, 3, 5, seed=2)).at[0, 0, 0].set(1.0)
_losses = jax.jit(sigmoid_cross_entropy.sigmoid_cross_entropy)
_weighted_loss = jax.jit(sigmoid_cross_entropy.weighted_loss)


def _oracle():
  out = np.zeros(LOGITS.shape)
  for at in np.ndindex(LOGITS.shape):
    p = 1 / (1 + math.exp(-float(LOGITS[at])))
    y = float(TARGETS[at])
    out[at] = -y * math.log(p) - (1 - y) * math.log(1 - p)
  return out


def test_matches_the_definition_and_optax():
  actual = _losses(LOGITS, TARGETS)
  np.testing.assert_allclose(actual, _oracle(), rtol=1e-5, atol=1e-6)
  other = jax.jit(optax.sigmoid_binary_cross_entropy)(LOGITS, TARGETS)
  np.testing.assert_allclose(actual, other, rtol=1e-5, atol=1e-6)


def test_weights_of_classes_and_of_examples():
  losses = _oracle()
  of_classes = np.abs(testing.normal(2, 3, 5, seed=3))
  total, weight = _weighted_loss(LOGITS, TARGETS, of_classes)
  np.testing.assert_allclose(total, np.sum(losses * of_classes), rtol=1e-5)
  np.testing.assert_allclose(weight, np.sum(of_classes), rtol=1e-5)
  of_examples = of_classes[:, :, :1]
  total, weight = _weighted_loss(LOGITS, TARGETS, of_examples)
  np.testing.assert_allclose(total, np.sum(losses * of_examples), rtol=1e-5)
  np.testing.assert_allclose(weight, np.sum(of_examples), rtol=1e-5)


def test_gradients_match_finite_differences():
  def loss(at):
    return sigmoid_cross_entropy.weighted_loss(*at)[0]

  testing.assert_gradients_match(loss, (LOGITS, TARGETS, jnp.ones((2, 3, 1))))


def test_logits_of_zero_have_both_derivatives():
  """Those of a head that begins with zeros."""
  targets = testing.array([0.0, 0.25, 1.0])

  def loss(x):
    return jnp.sum(sigmoid_cross_entropy.sigmoid_cross_entropy(x, targets))

  x = jnp.zeros(3)
  first, second = jax.jit(
    lambda x: jax.jvp(jax.grad(loss), (x,), (jnp.ones_like(x),))
  )(x)
  np.testing.assert_allclose(first, [0.5, 0.25, -0.5], rtol=1e-6)
  np.testing.assert_allclose(second, [0.25] * 3, rtol=1e-6)


def test_large_logits_neither_overflow_nor_lose_their_gradient():
  logits = testing.array([[1e4, -1e4]], jnp.bfloat16)
  wrong = testing.array([[0.0, 1.0]])
  loss = _losses(logits, wrong)
  assert loss.dtype == jnp.float32
  np.testing.assert_allclose(loss, np.abs(np.float32(logits)), rtol=1e-6)
  gradient = jax.jit(jax.grad(lambda x: jnp.sum(_losses(x, wrong))))(logits)
  assert gradient.tolist() == [[1.0, -1.0]]


def test_rejects_other_weights():
  with pytest.raises(ValueError, match=r"each of the 5 classes, .*\(2, 3, 4\)"):
    sigmoid_cross_entropy.weighted_loss(LOGITS, TARGETS, jnp.ones((2, 3, 4)))
