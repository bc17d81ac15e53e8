"""Tests for the steps made from a linen model."""

import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import testing
from paxon.layers.decoding import model_steps
from paxon.layers.models import testing as models_testing


def test_steps_are_the_methods_of_the_model():
  model = models_testing.tiny_decoder(num_layers=1)
  ids = jnp.asarray([[3, 1, 4, 1]], jnp.int32)
  args = ids, testing.counted(1, 4), testing.ones(1, 4)
  values = testing.random_values(model, *args)
  expected = testing.apply(model, values, *args)
  prefill = model_steps.prefill(model, values)
  decode_step = model_steps.decode_step(model, values)
  first, cache = prefill(*(a[:, :3] for a in args), cache_length=4)
  assert set(cache) == {"cache"}
  last, cache = decode_step(cache, *(a[:, 3:] for a in args))
  np.testing.assert_allclose(first, expected[:, :3], rtol=1e-5, atol=1e-5)
  np.testing.assert_allclose(last, expected[:, 3:], rtol=1e-5, atol=1e-5)


def test_a_stale_cache_among_the_variables_is_not_used():
  model = models_testing.tiny_decoder(num_layers=1)
  ids = jnp.asarray([[3, 1]], jnp.int32)
  args = ids, testing.counted(1, 2), testing.ones(1, 2)
  values = testing.random_values(model, *args)
  prefill = model_steps.prefill(model, values)
  _, cache = prefill(*args, cache_length=3)
  again = model_steps.prefill(model, {**values, **cache})
  np.testing.assert_array_equal(
    again(*args, cache_length=3)[0], prefill(*args, cache_length=3)[0]
  )


def test_a_model_without_the_methods_is_an_error():
  layer = models_testing.tiny_decoder().embedding
  step = model_steps.prefill(layer, {})
  ids = jnp.ones((1, 2), jnp.int32)
  with pytest.raises(AttributeError, match="prefill"):
    step(ids, ids, ids, cache_length=3)
