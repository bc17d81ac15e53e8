"""Tests for the bi-tempered loss, against float64 numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import bi_tempered_loss, cross_entropy, testing

TARGETS = np.asarray([[0, 1, 0, 0], [0.1, 0.2, 0.7, 0], [0.25] * 4])
_TEMPERATURES = [(0.0, 1.0), (0.2, 4.0), (0.8, 1.2), (1.0, 1.5)]


def _exp(x, t):
  if t == 1:
    return np.exp(x)
  return np.maximum(1 + (1 - t) * x, 0) ** (1 / (1 - t))


def _log(x, t):
  return np.log(x) if t == 1 else (x ** (1 - t) - 1) / (1 - t)


def _probabilities(logits, t):
  """Finds the normalizer by bisection."""
  low, high = logits.max(), logits.max() + 1e4
  for _ in range(200):
    middle = (low + high) / 2
    if _exp(logits - middle, t).sum() > 1:
      low = middle
    else:
      high = middle
  return _exp(logits - middle, t)


def _oracle(logits, targets, first, second):
  total = 0.0
  for y, p in zip(targets, _probabilities(logits, second), strict=True):
    if y:
      total += y * (_log(y, first) - _log(p, first))
    total -= (y ** (2 - first) - p ** (2 - first)) / (2 - first)
  return total


@pytest.mark.parametrize(("first", "second"), _TEMPERATURES)
def test_matches_numpy_and_finite_differences(first, second):
  layer = bi_tempered_loss.BiTemperedLoss(
    first=first, second=second, iterations=100
  )
  logits = 3 * np.asarray(testing.normal(3, 4), np.float64)
  with jax.enable_x64(True):
    targets = jnp.asarray(TARGETS)
    found, gradient = jax.jit(
      lambda x: (
        layer(x, targets),
        jax.grad(lambda x: jnp.sum(layer(x, targets)))(x),
      )
    )(jnp.asarray(logits))
  expected = [
    _oracle(*each, first, second) for each in zip(logits, TARGETS, strict=True)
  ]
  np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-8)
  for b, c in np.ndindex(3, 4):
    values = []
    for step in (1e-5, -1e-5):
      moved = logits.copy()
      moved[b, c] += step
      values.append(_oracle(moved[b], TARGETS[b], first, second))
    slope = (values[0] - values[1]) / 2e-5
    np.testing.assert_allclose(gradient[b, c], slope, rtol=1e-4, atol=1e-6)


def test_temperatures_of_one_are_the_cross_entropy():
  logits = testing.normal(3, 4)
  labels = jnp.asarray([0, 3, 1])
  loss = bi_tempered_loss.BiTemperedLoss(first=1.0, second=1.0)
  terms = cross_entropy.softmax_terms(logits[:, None], labels[:, None])
  found = loss(logits, jax.nn.one_hot(labels, 4))
  np.testing.assert_allclose(found, terms.nll[:, 0], rtol=1e-5)


def test_the_loss_of_an_outlier_is_bounded():
  loss = bi_tempered_loss.BiTemperedLoss(first=0.5, second=1.0)
  logits = jnp.asarray([[100.0, 0.0]])
  # 1 / (1 - t1), whatever the logits.
  np.testing.assert_allclose(loss(logits, jnp.asarray([[0.0, 1.0]])), 2.0)


def test_errors():
  with pytest.raises(ValueError, match=r"first must be in \[0, 1\]"):
    bi_tempered_loss.BiTemperedLoss(first=1.2, second=1.0)
  with pytest.raises(ValueError, match=r"second must be at least 1, got 0\.9"):
    bi_tempered_loss.BiTemperedLoss(first=0.5, second=0.9)
