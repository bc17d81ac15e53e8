"""Tests for softmax and sigmoid cross entropy."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from paxon.layers import testing
from paxon.layers.losses import cross_entropy
from paxon.sharding import target

TARGETS = testing.array([[0, 4, 2]], jnp.int32)


@pytest.fixture(params=["cpu", "gpu"], autouse=True)
def _platform(request, monkeypatch):
  """GPUs get one reduction instead of two, which any device can run."""
  is_gpu = request.param == "gpu"
  monkeypatch.setattr(target, "is_gpu", lambda: is_gpu)
  jax.clear_caches()


_terms = jax.jit(cross_entropy.softmax_terms)
_nll = jax.jit(cross_entropy.softmax_cross_entropy)


def _logits(dtype=jnp.float32):
  return 3 * testing.normal(1, 3, 5, dtype=dtype)


def _oracle(logits, targets):
  logits = np.asarray(logits, np.float64)
  logits -= logits.max(axis=-1, keepdims=True)
  nll = np.zeros(targets.shape)
  for b, t in np.ndindex(targets.shape):
    target = logits[b, t, int(targets[b, t])]
    nll[b, t] = np.log(np.exp(logits[b, t]).sum()) - target
  return nll


def test_matches_the_definition():
  nll = _nll(_logits(), TARGETS)
  expected = _oracle(_logits(), TARGETS)
  np.testing.assert_allclose(nll, expected, rtol=1e-5, atol=1e-6)


def test_gradient_matches_finite_differences():
  def loss(x):
    return jnp.sum(cross_entropy.softmax_cross_entropy(x, TARGETS))

  testing.assert_gradients_match(loss, _logits())


def test_gradient_is_probability_minus_target():
  def loss(x):
    return jnp.sum(cross_entropy.softmax_cross_entropy(x, TARGETS))

  expected = jax.nn.softmax(_logits()) - jax.nn.one_hot(TARGETS, 5)
  np.testing.assert_allclose(
    jax.jit(jax.grad(loss))(_logits()), expected, rtol=1e-5, atol=1e-6
  )


def test_is_invariant_to_a_constant_added_to_logits():
  loss = _nll
  np.testing.assert_allclose(
    loss(_logits() + 300.0, TARGETS), loss(_logits(), TARGETS), atol=1e-4
  )


@pytest.mark.parametrize(("scale", "offset"), [(1, 1e4), (1, -1e4), (1e3, 0)])
def test_large_logits_lose_no_digits(scale, offset):
  logits = scale * _logits() + offset
  nll = _nll(logits, TARGETS)
  np.testing.assert_allclose(nll, _oracle(logits, TARGETS), rtol=1e-6)


def test_huge_logits_stay_finite():
  nll = cross_entropy.softmax_cross_entropy(1e30 * _logits(), TARGETS)
  assert np.all(np.isfinite(nll))


def test_bfloat16_logits_are_widened():
  logits = _logits(jnp.bfloat16)
  nll = _nll(logits, TARGETS)
  assert nll.dtype == jnp.float32
  np.testing.assert_allclose(nll, _oracle(logits, TARGETS), rtol=1e-5)


def test_ids_outside_of_the_vocabulary_give_nan():
  targets = testing.array([[5, -1, 4]], jnp.int32)
  nll = cross_entropy.softmax_cross_entropy(_logits(), targets)
  assert np.isnan(nll).tolist() == [[True, True, False]]


def test_terms_match_the_definition():
  terms = cross_entropy.softmax_terms(_logits(), TARGETS)
  logits = np.asarray(_logits(), np.float64)
  log_z = np.log(np.exp(logits).sum(axis=-1))
  np.testing.assert_allclose(terms.log_normalizer, log_z, rtol=1e-5)
  uniform = (log_z[..., None] - logits).mean(axis=-1)
  np.testing.assert_allclose(terms.uniform_nll, uniform, rtol=1e-5)
  best = np.argmax(logits, axis=-1) == np.asarray(TARGETS)
  np.testing.assert_array_equal(terms.hits, best)


def test_gradients_of_terms_match_finite_differences():
  def total(x):
    terms = cross_entropy.softmax_terms(x, TARGETS)
    return jnp.sum(terms.uniform_nll + jnp.square(terms.log_normalizer))

  testing.assert_gradients_match(total, _logits())


def test_the_first_of_equal_logits_is_the_hit():
  terms = _terms(np.zeros((1, 2, 5), np.float32), np.int32([[0, 3]]))
  assert terms.hits.tolist() == [[True, False]]


def test_nan_logits_are_not_hits():
  terms = _terms(np.full((1, 1, 5), np.nan, np.float32), np.int32([[0]]))
  assert not np.any(terms.hits)
  assert np.isnan(terms.nll).all()


def test_soft_targets_match_the_definition():
  wanted = jax.nn.softmax(testing.normal(1, 3, 5, seed=2))
  wanted = wanted.at[0, 1].set(testing.array([0, 1.0, 0, 0, 0]))
  logits = np.asarray(_logits(), np.float64)
  log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
  expected = -(np.asarray(wanted, np.float64) * log_p).sum(-1)
  actual = cross_entropy.soft_target_cross_entropy(_logits(), wanted)
  np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(
    cross_entropy.log_probabilities(_logits()), log_p, rtol=1e-5
  )


def test_one_hot_soft_targets_equal_targets():
  one_hot = jax.nn.one_hot(TARGETS, 5)
  soft = cross_entropy.soft_target_cross_entropy(_logits(), one_hot)
  hard = cross_entropy.softmax_cross_entropy(_logits(), TARGETS)
  np.testing.assert_allclose(soft, hard, rtol=1e-6)


def test_impossible_ids_without_target_probability_cost_nothing():
  logits = _logits().at[:, :, 3].set(-jnp.inf)
  wanted = jax.nn.one_hot(TARGETS, 5)
  loss = cross_entropy.soft_target_cross_entropy(logits, wanted)
  assert np.all(np.isfinite(loss))


def test_gradient_of_soft_targets_matches_finite_differences():
  wanted = jax.nn.softmax(testing.normal(1, 3, 5, seed=2))

  def loss(x):
    return jnp.sum(
      cross_entropy.soft_target_cross_entropy(x, wanted.astype(x.dtype))
    )

  testing.assert_gradients_match(loss, _logits())


LOGITS = 4 * testing.normal(2, 3, 5)
LABELS = jax.nn.sigmoid(testing.normal(2, 3, 5, seed=2)).at[0, 0, 0].set(1.0)
_sigmoid_losses = jax.jit(cross_entropy.sigmoid_cross_entropy)
_sigmoid_loss = jax.jit(cross_entropy.weighted_sigmoid_loss)


def _sigmoid_oracle():
  out = np.zeros(LOGITS.shape)
  for at in np.ndindex(LOGITS.shape):
    p = 1 / (1 + math.exp(-float(LOGITS[at])))
    y = float(LABELS[at])
    out[at] = -y * math.log(p) - (1 - y) * math.log(1 - p)
  return out


def test_sigmoid_matches_the_definition_and_optax():
  actual = _sigmoid_losses(LOGITS, LABELS)
  np.testing.assert_allclose(actual, _sigmoid_oracle(), rtol=1e-5, atol=1e-6)
  other = jax.jit(optax.sigmoid_binary_cross_entropy)(LOGITS, LABELS)
  np.testing.assert_allclose(actual, other, rtol=1e-5, atol=1e-6)


def test_sigmoid_weights_of_classes_and_of_examples():
  losses = _sigmoid_oracle()
  of_classes = np.abs(testing.normal(2, 3, 5, seed=3))
  total, weight = _sigmoid_loss(LOGITS, LABELS, of_classes)
  np.testing.assert_allclose(total, np.sum(losses * of_classes), rtol=1e-5)
  np.testing.assert_allclose(weight, np.sum(of_classes), rtol=1e-5)
  of_examples = of_classes[:, :, :1]
  total, weight = _sigmoid_loss(LOGITS, LABELS, of_examples)
  np.testing.assert_allclose(total, np.sum(losses * of_examples), rtol=1e-5)
  np.testing.assert_allclose(weight, np.sum(of_examples), rtol=1e-5)


def test_sigmoid_gradients_match_finite_differences():
  def loss(at):
    return cross_entropy.weighted_sigmoid_loss(*at)[0]

  testing.assert_gradients_match(loss, (LOGITS, LABELS, jnp.ones((2, 3, 1))))


def test_sigmoid_of_zero_has_both_derivatives():
  """Those of a head that begins with zeros."""
  targets = testing.array([0.0, 0.25, 1.0])

  def loss(x):
    return jnp.sum(cross_entropy.sigmoid_cross_entropy(x, targets))

  x = jnp.zeros(3)
  first, second = jax.jit(
    lambda x: jax.jvp(jax.grad(loss), (x,), (jnp.ones_like(x),))
  )(x)
  np.testing.assert_allclose(first, [0.5, 0.25, -0.5], rtol=1e-6)
  np.testing.assert_allclose(second, [0.25] * 3, rtol=1e-6)


def test_sigmoid_of_large_logits_neither_overflows_nor_loses_its_gradient():
  logits = testing.array([[1e4, -1e4]], jnp.bfloat16)
  wrong = testing.array([[0.0, 1.0]])
  loss = _sigmoid_losses(logits, wrong)
  assert loss.dtype == jnp.float32
  np.testing.assert_allclose(loss, np.abs(np.float32(logits)), rtol=1e-6)
  gradient = jax.jit(jax.grad(lambda x: jnp.sum(_sigmoid_losses(x, wrong))))(
    logits
  )
  assert gradient.tolist() == [[1.0, -1.0]]


def test_sigmoid_loss_rejects_other_weights():
  with pytest.raises(ValueError, match=r"each of the 5 classes, .*\(2, 3, 4\)"):
    cross_entropy.weighted_sigmoid_loss(LOGITS, LABELS, jnp.ones((2, 3, 4)))


@pytest.mark.parametrize("level", [0, 2])
def test_hits_of_soft_capped_logits_match_the_argmax(level):
  # XLA:CPU fuses the cap with the subtraction of the maximum and rounds once.
  def loss(x, targets):
    terms = cross_entropy.softmax_terms(30 * jnp.tanh(x * 1.37 / 30), targets)
    return jnp.sum(terms.nll), terms.hits

  x = 5 * testing.normal(4, 16, 50)
  best = np.argmax(np.tanh(np.asarray(x, np.float64) * 1.37 / 30), axis=-1)
  targets = np.where(np.arange(16) % 4 == 3, (best + 1) % 50, best)
  gradient = jax.jit(
    jax.grad(loss, has_aux=True),
    compiler_options={"xla_backend_optimization_level": level},
  )
  _, hits = gradient(x, jnp.asarray(targets, jnp.int32))
  np.testing.assert_array_equal(hits, targets == best)
