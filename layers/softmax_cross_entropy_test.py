"""Tests for the cross entropy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import softmax_cross_entropy, testing

TARGETS = testing.array([[0, 4, 2]], jnp.int32)


_terms = jax.jit(softmax_cross_entropy.softmax_terms)
_nll = jax.jit(softmax_cross_entropy.softmax_cross_entropy)


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
    return jnp.sum(softmax_cross_entropy.softmax_cross_entropy(x, TARGETS))

  testing.assert_gradients_match(loss, _logits())


def test_gradient_is_probability_minus_target():
  def loss(x):
    return jnp.sum(softmax_cross_entropy.softmax_cross_entropy(x, TARGETS))

  expected = jax.nn.softmax(_logits()) - jax.nn.one_hot(TARGETS, 5)
  np.testing.assert_allclose(
    jax.jit(jax.grad(loss))(_logits()), expected, rtol=1e-5, atol=1e-6
  )


def test_a_constant_added_to_logits_changes_nothing():
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
  nll = softmax_cross_entropy.softmax_cross_entropy(1e30 * _logits(), TARGETS)
  assert np.all(np.isfinite(nll))


def test_bfloat16_logits_are_widened():
  logits = _logits(jnp.bfloat16)
  nll = _nll(logits, TARGETS)
  assert nll.dtype == jnp.float32
  np.testing.assert_allclose(nll, _oracle(logits, TARGETS), rtol=1e-5)


def test_ids_outside_of_the_vocabulary_give_nan():
  targets = testing.array([[5, -1, 4]], jnp.int32)
  nll = softmax_cross_entropy.softmax_cross_entropy(_logits(), targets)
  assert np.isnan(nll).tolist() == [[True, True, False]]


def test_terms_match_the_definition():
  terms = softmax_cross_entropy.softmax_terms(_logits(), TARGETS)
  logits = np.asarray(_logits(), np.float64)
  log_z = np.log(np.exp(logits).sum(axis=-1))
  np.testing.assert_allclose(terms.log_normalizer, log_z, rtol=1e-5)
  uniform = (log_z[..., None] - logits).mean(axis=-1)
  np.testing.assert_allclose(terms.uniform_nll, uniform, rtol=1e-5)
  best = np.argmax(logits, axis=-1) == np.asarray(TARGETS)
  np.testing.assert_array_equal(terms.hits, best)


def test_gradients_of_terms_match_finite_differences():
  def total(x):
    terms = softmax_cross_entropy.softmax_terms(x, TARGETS)
    return jnp.sum(terms.uniform_nll + jnp.square(terms.log_normalizer))

  testing.assert_gradients_match(total, _logits())


def test_of_equal_logits_the_first_counts():
  terms = _terms(np.zeros((1, 2, 5), np.float32), np.int32([[0, 3]]))
  assert terms.hits.tolist() == [[True, False]]


def test_logits_that_are_nan_are_no_hits():
  terms = _terms(np.full((1, 1, 5), np.nan, np.float32), np.int32([[0]]))
  assert not np.any(terms.hits)
  assert np.isnan(terms.nll).all()


def test_target_distributions_match_the_definition():
  wanted = jax.nn.softmax(testing.normal(1, 3, 5, seed=2))
  wanted = wanted.at[0, 1].set(testing.array([0, 1.0, 0, 0, 0]))
  logits = np.asarray(_logits(), np.float64)
  log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
  expected = -(np.asarray(wanted, np.float64) * log_p).sum(-1)
  actual = softmax_cross_entropy.of_probabilities(_logits(), wanted)
  np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(
    softmax_cross_entropy.log_probabilities(_logits()), log_p, rtol=1e-5
  )


def test_one_hot_distributions_are_targets():
  one_hot = jax.nn.one_hot(TARGETS, 5)
  of_distribution = softmax_cross_entropy.of_probabilities(_logits(), one_hot)
  of_target = softmax_cross_entropy.softmax_cross_entropy(_logits(), TARGETS)
  np.testing.assert_allclose(of_distribution, of_target, rtol=1e-6)


def test_a_forbidden_id_that_nobody_wants_costs_nothing():
  logits = _logits().at[:, :, 3].set(-jnp.inf)
  wanted = jax.nn.one_hot(TARGETS, 5)
  loss = softmax_cross_entropy.of_probabilities(logits, wanted)
  assert np.all(np.isfinite(loss))


def test_gradient_of_distributions_matches_finite_differences():
  wanted = jax.nn.softmax(testing.normal(1, 3, 5, seed=2))

  def loss(x):
    return jnp.sum(
      softmax_cross_entropy.of_probabilities(x, wanted.astype(x.dtype))
    )

  testing.assert_gradients_match(loss, _logits())
