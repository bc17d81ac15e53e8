"""Tests for the output head."""

import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import testing, unembedding

VOCAB, EMBED = 7, 5


def _x(dtype=jnp.float32):
  return testing.normal(2, 3, EMBED, dtype=dtype)


def test_matches_numpy():
  layer = unembedding.Unembedding(VOCAB)
  values = testing.random_values(layer, _x())
  kernel = np.asarray(values["params"]["kernel"], np.float64)
  x = np.asarray(_x(), np.float64)
  expected = np.zeros((2, 3, VOCAB))
  for b, t, v in np.ndindex(expected.shape):
    expected[b, t, v] = sum(x[b, t, d] * kernel[d, v] for d in range(EMBED))
  np.testing.assert_allclose(
    testing.apply(layer, values, _x()), expected, rtol=1e-5, atol=1e-6
  )


def test_gradients_match_finite_differences():
  layer = unembedding.Unembedding(VOCAB)
  at = (testing.random_values(layer, _x()), _x())

  def loss(at):
    return jnp.sum(jnp.sin(layer.apply(*at)))

  testing.assert_gradients_match(loss, at)


def test_starts_with_the_variance_of_its_fan_in():
  layer = unembedding.Unembedding(400)
  values = testing.initial_values(layer, testing.normal(1, 1, 100))
  deviation = np.std(np.asarray(values["params"]["kernel"]))
  np.testing.assert_allclose(deviation, 0.1, rtol=0.02)


def test_bfloat16_operands_give_float32_logits():
  layer = unembedding.Unembedding(VOCAB, dtype=jnp.bfloat16)
  values = testing.random_values(layer, _x(jnp.bfloat16))
  assert values["params"]["kernel"].dtype == jnp.float32
  logits = testing.apply(layer, values, _x(jnp.bfloat16))
  assert logits.dtype == jnp.float32
  kernel = values["params"]["kernel"].astype(jnp.bfloat16)
  exact = np.asarray(_x(jnp.bfloat16), np.float64) @ np.asarray(
    kernel, np.float64
  )
  # No rounding after that of the operands: the sum itself is in float32.
  np.testing.assert_allclose(logits, exact, rtol=1e-5, atol=1e-6)


def test_logical_axes():
  layer = unembedding.Unembedding(VOCAB)
  assert testing.axes(layer, _x()) == {"params/kernel": ("embed", "vocab")}


def test_rejects_nonpositive_vocab_size():
  message = r"Unembedding.vocab_size must be positive, got -1"
  with pytest.raises(ValueError, match=message):
    unembedding.Unembedding(-1)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_bias_and_scaled_input(dtype):
  layer = unembedding.Unembedding(
    VOCAB, use_bias=True, input_scale=0.25, dtype=dtype
  )
  values = testing.random_values(layer, _x(dtype))
  logits = testing.apply(layer, values, _x(dtype))
  assert logits.dtype == jnp.float32
  kernel = values["params"]["kernel"].astype(dtype)
  # A quarter is exact in any dtype, and the bias is added in float32.
  exact = 0.25 * np.asarray(_x(dtype), np.float64)
  exact = exact @ np.asarray(kernel, np.float64)
  exact += np.asarray(values["params"]["bias"], np.float64)
  np.testing.assert_allclose(logits, exact, rtol=1e-5, atol=1e-6)
  assert testing.axes(layer, _x()) == {
    "params/kernel": ("embed", "vocab"),
    "params/bias": ("vocab",),
  }
