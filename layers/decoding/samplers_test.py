"""Tests for samplers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import testing
from paxon.layers.decoding import samplers

VOCAB = 6
# Distinct logits; ties everywhere; ties at the cut; one id far ahead.
LOGITS = np.asarray(
  [
    [0.3, -1.0, 2.0, 0.1, 1.5, -0.5],
    [1.0, 1.0, 1.0, 1.0, 1.0, 1.0],
    [0.0, 2.0, 1.0, 1.0, 1.0, -3.0],
    [0.0, 0.0, 0.0, 20.0, 0.0, 0.0],
  ],
  np.float32,
)


def _kept(logits, temperature, top_k, top_p):
  """The ids of one row that may be drawn, and their probabilities."""
  logits = np.asarray(logits, np.float64) / temperature
  order = sorted(range(VOCAB), key=lambda i: (-logits[i], i))
  order = order[: top_k or VOCAB]
  weights = np.exp(logits[order] - logits.max())
  weights /= weights.sum()
  if top_p is not None:
    count, mass = 0, 0.0
    while count < len(order) and mass < top_p - 1e-9:
      mass += weights[count]
      count += 1
    order, weights = order[:count], weights[:count] / mass
  full = np.zeros(VOCAB)
  full[order] = weights
  return full


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("top_k", [None, 1, 3, VOCAB, VOCAB + 5])
@pytest.mark.parametrize("top_p", [None, 0.1, 0.55, 0.95, 1.0])
def test_distribution_matches_the_definition(temperature, top_k, top_p):
  sampler = samplers.Temperature(
    temperature=temperature, top_k=top_k, top_p=top_p
  )
  # Not compiled as one: the single operations serve all cases.
  log_weights = sampler.log_weights(jax.device_put(LOGITS))
  actual = np.asarray(jax.nn.softmax(log_weights, axis=-1))
  for row, logits in enumerate(LOGITS):
    expected = _kept(logits, temperature, top_k, top_p)
    np.testing.assert_allclose(actual[row], expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("top_p", [0.2, 0.6, 0.9])
def test_top_p_may_count_the_probability_of_the_whole_vocabulary(top_p):
  sampler = samplers.Temperature(top_k=3, top_p=top_p, global_normalize=True)
  kept = np.isfinite(sampler.log_weights(jax.device_put(LOGITS)))
  for row, logits in enumerate(LOGITS):
    # The ids that top-p alone keeps, of which there are at most three.
    alone = np.flatnonzero(_kept(logits, 1.0, None, top_p)).tolist()
    best = sorted(range(VOCAB), key=lambda i, x=logits: (-x[i], i))[:3]
    assert np.flatnonzero(kept[row]).tolist() == sorted({*alone} & {*best})


def test_an_approximate_top_k_finds_most_of_the_best():
  logits = testing.normal(8, 1000)
  sampler = samplers.Temperature(top_k=50, top_p=0.8, top_k_recall=0.9)
  found = np.asarray(sampler.log_weights(logits))
  exact = samplers.Temperature(top_k=50, top_p=0.8)
  expected = np.isfinite(exact.log_weights(logits))
  kept = np.isfinite(found)
  np.testing.assert_array_equal(found[kept], np.asarray(logits)[kept])
  assert (kept & expected).sum() >= 0.8 * expected.sum()
  assert (kept.sum(axis=-1) <= 50).all()
  assert "TopK" in jax.jit(sampler.log_weights).lower(logits).as_text()


def test_draws_follow_the_distribution():
  sampler = samplers.Temperature(temperature=0.7, top_k=4, top_p=0.9)
  draws = 20_000
  logits = jax.device_put(np.repeat(LOGITS[:1], draws, axis=0))
  ids = jax.jit(sampler)(logits, jax.random.key(0))
  assert ids.dtype == jnp.int32
  frequency = np.bincount(np.asarray(ids), minlength=VOCAB) / draws
  expected = _kept(LOGITS[0], 0.7, 4, 0.9)
  # Four standard deviations of a frequency.
  np.testing.assert_allclose(frequency, expected, atol=4 * 0.5 / draws**0.5)
  assert not np.any(frequency[expected == 0])


def test_keys_decide():
  sampler = samplers.Temperature()
  logits = jnp.zeros((50, VOCAB))
  first, again, other = (
    sampler(logits, jax.random.key(k)).tolist() for k in (0, 0, 1)
  )
  assert first == again
  assert first != other


def test_greedy_takes_the_first_of_the_best():
  ids = samplers.Greedy()(jax.device_put(LOGITS), jax.random.key(0))
  assert ids.dtype == jnp.int32
  assert ids.tolist() == [2, 0, 1, 3]


def test_top_k_of_one_is_greedy():
  logits = testing.normal(8, VOCAB)
  sampler = samplers.Temperature(top_k=1)
  np.testing.assert_array_equal(
    jax.jit(sampler)(logits, jax.random.key(3)),
    jax.jit(samplers.Greedy())(logits, jax.random.key(0)),
  )


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"temperature": 0.0}, r"temperature must be positive, got 0.0; use Gree"),
    (
      {"global_normalize": True},
      r"global_normalize requires top_k, which is N",
    ),
    ({"top_k_recall": 0.9}, r"Temperature.top_k_recall requires top_k"),
    ({"top_k_recall": 0.0, "top_k": 3}, r"top_k_recall must be in \(0, 1\]"),
    ({"top_k": 0}, r"Temperature.top_k must be positive, got 0"),
    ({"top_p": 0.0}, r"Temperature.top_p must be in \(0, 1\], got 0.0"),
    ({"top_p": 1.5}, r"Temperature.top_p must be in \(0, 1\], got 1.5"),
  ],
)
def test_rejects_bad_settings(fields, message):
  with pytest.raises(ValueError, match=message):
    samplers.Temperature(**fields)
