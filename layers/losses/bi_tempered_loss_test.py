"""Tests for the bi-tempered loss, against float64 numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import testing
from paxon.layers.losses import bi_tempered_loss, cross_entropy, softmax_loss
from paxon.layers.norms import batch_norm

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


@pytest.mark.nightly(keep=2)
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


def test_an_outlier_beyond_float32_has_a_gradient():
  loss = bi_tempered_loss.BiTemperedLoss(first=0.5, second=1.0)
  gradient = jax.jit(
    jax.grad(lambda x: jnp.sum(loss(x, jnp.asarray([[0.0, 1.0]]))))
  )(jnp.asarray([[300.0, 0.0]]))
  np.testing.assert_array_equal(gradient, np.zeros((1, 2)))


def test_temperatures_move_linearly_with_the_step():
  last = bi_tempered_loss.BiTemperedLoss(first=0.6, second=1.8, iterations=100)
  ramp = bi_tempered_loss.RampedBiTemperedLoss(last, end_step=5, start_step=1)
  logits = 3 * testing.normal(3, 4)

  def call(x, state):
    losses, changed = ramp.apply(
      state,
      x,
      testing.array(TARGETS),
      deterministic=False,
      mutable=[batch_norm.COLLECTION],
    )
    return jnp.sum(losses), (losses, changed)

  step = jax.jit(jax.value_and_grad(call, has_aux=True))
  state, found, slopes = {}, [], []
  for _ in range(7):
    (_, (losses, state)), slope = step(logits, state)
    found.append(losses)
    slopes.append(slope)
  wide = np.asarray(logits, np.float64)
  for step, (losses, slope) in enumerate(zip(found, slopes, strict=True)):
    progress = min(max((step - 1) / 4, 0), 1)
    first, second = 1 - 0.4 * progress, 1 + 0.8 * progress

    def oracle(x, first=first, second=second):
      return [
        _oracle(*each, first, second) for each in zip(x, TARGETS, strict=True)
      ]

    np.testing.assert_allclose(losses, oracle(wide), rtol=1e-4, atol=1e-5)
    moved = np.zeros_like(wide)
    moved[:, 1] = 1e-5
    expected = np.subtract(oracle(wide + moved), oracle(wide - moved)) / 2e-5
    np.testing.assert_allclose(slope[:, 1], expected, rtol=1e-3, atol=1e-5)
  # Evaluation has the last temperatures, and counts no step.
  evaluated = testing.apply(ramp, state, logits, testing.array(TARGETS))
  for losses in (evaluated, last(logits, testing.array(TARGETS))):
    # Terms near 1 cancel to losses below 0.01: seven digits of the former.
    np.testing.assert_allclose(losses, oracle(wide), rtol=1e-6, atol=1e-6)
  assert int(jax.tree.leaves(state)[0]) == 7


def test_the_softmax_loss_of_tokens_can_be_tempered():
  tempered = bi_tempered_loss.BiTemperedLoss(
    first=0.7, second=1.3, iterations=100
  )
  loss = softmax_loss.SoftmaxLoss(
    tempered=tempered, label_smoothing=0.2, chunk_length=2
  )
  x, kernel = testing.normal(2, 3, 5), testing.normal(5, 4, seed=2)
  targets = testing.array([[0, 3, 1], [2, 2, 0]], np.int32)
  weights = testing.array([[1, 0, 2], [0.5, 1, 0]])

  def total(x, kernel):
    return loss(
      lambda variables, x: x @ variables["params"]["kernel"],
      {"params": {"kernel": kernel}},
      x,
      targets=targets,
      weights=weights,
    )

  def oracle(x, kernel):
    each = [
      float(weights[at])
      * _oracle(
        x[at] @ kernel, 0.8 * np.eye(4)[int(targets[at])] + 0.05, 0.7, 1.3
      )
      for at in np.ndindex(2, 3)
    ]
    return float(np.sum(each))

  value, slopes = jax.jit(
    jax.value_and_grad(lambda *a: total(*a).loss, (0, 1))
  )(x, kernel)
  wide = [np.asarray(a, np.float64) for a in (x, kernel)]
  np.testing.assert_allclose(value, oracle(*wide), rtol=1e-4)
  for i, slope in enumerate(slopes):
    moved = [np.zeros_like(a) for a in wide]
    moved[i] = 1e-5 * np.random.default_rng(i).standard_normal(wide[i].shape)
    up, down = (
      oracle(*(a + sign * m for a, m in zip(wide, moved, strict=True)))
      for sign in (1, -1)
    )
    np.testing.assert_allclose(
      np.sum(slope * moved[i]), (up - down) / 2, rtol=1e-3
    )
  outside = loss(
    lambda variables, x: x @ variables["params"]["kernel"],
    {"params": {"kernel": kernel}},
    x,
    targets=targets.at[0, 0].set(4),
    weights=weights,
  )
  assert np.isnan(outside.loss)


def test_errors():
  last = bi_tempered_loss.BiTemperedLoss(first=0.5, second=1.5)
  with pytest.raises(ValueError, match="start_step < end_step, got 3 and 3"):
    bi_tempered_loss.RampedBiTemperedLoss(last, end_step=3, start_step=3)
  with pytest.raises(ValueError, match=r"first must be in \[0, 1\]"):
    bi_tempered_loss.BiTemperedLoss(first=1.2, second=1.0)
  with pytest.raises(ValueError, match=r"second must be at least 1, got 0\.9"):
    bi_tempered_loss.BiTemperedLoss(first=0.5, second=0.9)
