"""Tests for bits per byte."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.learners import bits_per_byte


def _batch(weights, target_bytes):
  return {
    "weights": jax.device_put(np.float32(weights)),
    "target_bytes": jax.device_put(np.int32(target_bytes)),
  }


def test_uniform_bytes_cost_eight_bits():
  batch = _batch(np.ones((2, 5)), np.ones((2, 5)))
  outputs = {"token_nll": jnp.full((2, 5), np.log(256), jnp.float32)}
  bits, source = bits_per_byte.bits_per_byte(batch, outputs)["bits_per_byte"]
  assert float(source) == 10
  assert float(bits) == pytest.approx(80.0, rel=1e-6)


def test_matches_numpy_with_padding_and_long_tokens():
  random = np.random.default_rng(0)
  nll = random.gamma(2.0, size=(3, 7)).astype(np.float32)
  weights = (random.random((3, 7)) < 0.7).astype(np.float32)
  lengths = random.integers(0, 6, size=(3, 7))
  pair = bits_per_byte.bits_per_byte(
    _batch(weights, lengths), {"token_nll": jax.device_put(nll)}
  )["bits_per_byte"]
  bits = np.sum(np.log2(np.exp(nll.astype(np.float64))) * weights)
  np.testing.assert_allclose(pair, (bits, np.sum(lengths * weights)), rtol=1e-6)


def test_end_of_document_costs_bits_but_is_no_byte():
  batch = _batch([[1, 1]], [[1, 0]])
  outputs = {"token_nll": jnp.full((1, 2), np.log(2), jnp.float32)}
  bits, source = bits_per_byte.bits_per_byte(batch, outputs)["bits_per_byte"]
  assert float(bits) == pytest.approx(2.0, rel=1e-6)
  assert float(source) == 1.0
