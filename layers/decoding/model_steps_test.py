"""Tests for the steps made from a linen model."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import testing
from paxon.layers.decoding import model_steps
from paxon.layers.models import testing as models_testing


def _compiled(prefill):
  return jax.jit(prefill, static_argnames="cache_length")


def test_steps_are_the_methods_of_the_model():
  model = models_testing.tiny_decoder(num_layers=1)
  ids = testing.array([[3, 1, 4, 1]], jnp.int32)
  args = ids, testing.make_positions(1, 4), testing.ones(1, 4)
  values = testing.random_values(model, *args)
  expected = testing.apply(model, values, *args)
  prefill = _compiled(model_steps.make_prefill(model, values))
  decode_step = jax.jit(model_steps.make_decode_step(model, values))
  first, cache = prefill(*(a[:, :3] for a in args), cache_length=4)
  assert set(cache) == {"cache"}
  last, cache = decode_step(cache, *(a[:, 3:] for a in args))
  np.testing.assert_allclose(first, expected[:, :3], rtol=1e-5, atol=1e-5)
  np.testing.assert_allclose(last, expected[:, 3:], rtol=1e-5, atol=1e-5)


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("kind", ["decoder", "prefix", "encoder-decoder"])
def test_prefill_gives_the_logits_of_one_place_in_each_row(kind):
  models = {
    "decoder": lambda: models_testing.tiny_decoder(num_layers=1),
    "prefix": models_testing.tiny_prefix_lm,
    "encoder-decoder": models_testing.tiny_t5,
  }
  model = models[kind]()
  ids = testing.array([[3, 1, 4], [1, 5, 0]], jnp.int32)
  args = (
    ids,
    testing.make_positions(2, 3),
    testing.array([[1, 1, 1], [1, 1, 0]], np.int32),
  )
  source, inputs = {}, args
  if kind == "encoder-decoder":
    names = ("encoder_inputs", "encoder_positions", "encoder_segment_ids")
    source, inputs = dict(zip(names, args, strict=True)), args * 2
  values = testing.random_values(model, *inputs)
  prefill = _compiled(model_steps.make_prefill(model, values, **source))
  whole, cache = prefill(*args, cache_length=4)
  at = testing.array([2, 1], np.int32)
  found, same = prefill(*args, cache_length=4, at=at)
  assert found.shape == (2, 1, whole.shape[2])
  np.testing.assert_allclose(
    found[:, 0], whole[jnp.arange(2), at], rtol=1e-5, atol=1e-5
  )
  chex.assert_trees_all_close(same, cache, rtol=1e-5, atol=1e-6)


def test_a_stale_cache_among_the_variables_is_not_used():
  model = models_testing.tiny_decoder(num_layers=1)
  ids = testing.array([[3, 1]], jnp.int32)
  args = ids, testing.make_positions(1, 2), testing.ones(1, 2)
  values = testing.random_values(model, *args)
  prefill = _compiled(model_steps.make_prefill(model, values))
  logits, cache = prefill(*args, cache_length=3)
  again = _compiled(model_steps.make_prefill(model, {**values, **cache}))
  np.testing.assert_array_equal(again(*args, cache_length=3)[0], logits)


def test_a_model_without_the_methods_is_an_error():
  layer = models_testing.tiny_decoder().embedding
  step = model_steps.make_prefill(layer, {})
  ids = jnp.ones((1, 2), jnp.int32)
  with pytest.raises(AttributeError, match="prefill"):
    step(ids, ids, ids, cache_length=3)
