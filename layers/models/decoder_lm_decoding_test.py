"""Prefill and steps of the decoder language model equal its forward pass."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import testing
from paxon.layers.attention import kernels
from paxon.layers.models import testing as models_testing
from paxon.layers.positions import position_embedding
from paxon.layers.quantizers import ngrammer
from paxon.sharding import variables

LENGTH = 7


def _ids(batch=2, seed=3):
  rng = np.random.default_rng(seed)
  shape = (batch, LENGTH)
  return testing.array(rng.integers(1, models_testing.VOCAB, shape), jnp.int32)


def _args(ids):
  return ids, testing.make_positions(*ids.shape), testing.ones(*ids.shape)


@functools.cache
def _step(model):
  return jax.jit(
    lambda v, *a: model.apply(v, *a, method="decode_step", mutable=["cache"])
  )


@functools.cache
def _prefill(model):
  """Compiled once a shape and number of slots."""
  return jax.jit(
    functools.partial(model.apply, method="prefill", mutable=["cache"]),
    static_argnames="cache_length",
  )


@functools.cache
def _tiny():
  """A model, its values, ids, and logits of its forward pass."""
  model, args = models_testing.tiny_decoder(), _args(_ids(batch=3))
  values = testing.random_values(model, *args)
  return model, values, args, testing.apply(model, values, *args)


def _decode(model, values, args, prompt, slots, sizes):
  """Logits of the prompt and of each following chunk of tokens."""
  logits, state = _prefill(model)(
    values, *(np.asarray(a)[:, :prompt] for a in args), cache_length=slots
  )
  outputs, step, start = [logits], _step(model), prompt
  for size in sizes:
    chunk = (np.asarray(a)[:, start : start + size] for a in args)
    logits, state = step({**values, **state}, *chunk)
    outputs.append(logits)
    start += size
  return np.concatenate(outputs, axis=1)


@pytest.mark.nightly(keep=2)
@pytest.mark.parametrize(
  ("prompt", "slots", "sizes"),
  [
    pytest.param(1, 7, (1,) * 6, id="one token and steps"),
    pytest.param(4, 7, (1,) * 3, id="half and steps"),
    pytest.param(6, 12, (1,), id="spare slots"),
    pytest.param(2, 12, (3, 1, 1), id="chunked prompt"),
  ],
)
def test_steps_give_the_forward_pass(prompt, slots, sizes):
  model, values, args, expected = _tiny()
  actual = _decode(model, values, args, prompt, slots, sizes)
  np.testing.assert_allclose(
    actual, expected[:, : actual.shape[1]], rtol=1e-5, atol=1e-5
  )


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize(
  "settings",
  [
    pytest.param({"scan": False}, id="unrolled"),
    pytest.param({"kernel": kernels.fused}, id="fused"),
    pytest.param({"tied": False}, id="own head"),
  ],
)
def test_variants_decode_alike(settings):
  model, args = models_testing.tiny_decoder(**settings), _args(_ids())
  values = testing.random_values(model, *args)
  np.testing.assert_allclose(
    _decode(model, values, args, 5, LENGTH, (1, 1)),
    testing.apply(model, values, *args),
    rtol=1e-5,
    atol=1e-5,
  )


@pytest.mark.parametrize(
  "positions", [None, position_embedding.SinusoidalPositions()], ids=str
)
def test_absolute_positions_go_on_while_decoding(positions):
  model = models_testing.tiny_gpt2(positions=positions)
  args = _args(_ids())
  values = testing.random_values(model, *args)
  np.testing.assert_allclose(
    _decode(model, values, args, 3, 9, (2, 1, 1)),
    testing.apply(model, values, *args),
    rtol=1e-5,
    atol=1e-5,
  )


def test_pairs_of_tokens_go_on_while_decoding():
  """And do not reach into the document before."""
  tiny = models_testing.tiny_decoder()
  added = ngrammer.Ngrammer(
    num_heads=2, num_ids=models_testing.VOCAB, ngram_vocab_size=31, ngram_dim=2
  )
  model, args = tiny.clone(ngrammer=added), _args(_ids())
  values = testing.random_values(model, *args)
  whole = testing.apply(model, values, *args)
  np.testing.assert_allclose(
    _decode(model, values, args, 4, LENGTH, (1, 1, 1)),
    whole,
    rtol=1e-5,
    atol=1e-5,
  )
  without = {**values["params"]}
  del without["ngrammer"]
  plain = testing.apply(tiny, {**values, "params": without}, *args)
  assert np.abs(whole - plain).max() > 1e-2
  ids = args[0]
  packed = testing.apply(
    model,
    values,
    ids.reshape(1, -1),
    jnp.concatenate([args[1][:1]] * 2, axis=1),
    testing.array([[1] * LENGTH + [2] * LENGTH], jnp.int32),
  )
  np.testing.assert_allclose(
    packed.reshape(whole.shape), whole, rtol=1e-5, atol=1e-5
  )


def test_decoding_beyond_a_learned_table_gives_nan():
  model = models_testing.tiny_gpt2(
    positions=position_embedding.LearnedPositions(5)
  )
  args = _args(_ids())
  values = testing.random_values(model, *(np.asarray(a)[:, :5] for a in args))
  logits = _decode(model, values, args, 4, LENGTH, (1, 1))
  assert np.all(np.isfinite(logits[:, :5]))
  assert np.all(np.isnan(logits[:, 5]))


def test_ragged_prompts_decode_as_each_alone():
  """Right-padded prompts of 2, 5 and 3 ids, then two steps each."""
  lengths, width = (2, 5, 3), 5
  model, values, (ids, *_), expected = _tiny()
  positions = testing.make_positions(3, width)
  inside = positions < testing.array(lengths, jnp.int32)[:, None]
  _, state = _prefill(model)(
    values,
    jnp.where(inside, ids[:, :width], 0),
    positions,
    inside.astype(jnp.int32),
    cache_length=LENGTH,
  )
  step = _step(model)
  for i in range(2):
    at = testing.array(lengths, jnp.int32)[:, None] + i
    next_ids = jnp.take_along_axis(ids, at, axis=1)
    logits, state = step({**values, **state}, next_ids, at, testing.ones(3, 1))
    for row, length in enumerate(lengths):
      # Later tokens of the row have no influence there.
      np.testing.assert_allclose(
        logits[row, 0], expected[row, length + i], rtol=1e-5, atol=1e-5
      )


def test_cache_is_stacked_and_named_like_parameters():
  model, args = models_testing.tiny_decoder(), _args(_ids())
  specs = testing.specs(model, *args, cache_length=9)["cache"]["stack"]
  key = specs["layers"]["blocks_1"]["attention"]["cache"]["key"]
  assert key.shape == (1, 2, 2, 9, 4)
  assert key.axes == (
    "layers",
    "batch",
    "kv_heads",
    "kv_length",
    "head_dim",
  )
  assert key.update is variables.UpdateRule.REPLACE
  single = specs["layers_2"]["attention"]["cache"]["key"]
  assert single.shape == (2, 2, 9, 4)


def test_training_makes_no_cache():
  model, args = models_testing.tiny_decoder(), _args(_ids())
  assert set(testing.specs(model, *args)) == {"params"}


def test_a_full_cache_gives_nan():
  model, values, args, _ = _tiny()
  logits = _decode(model, values, args, 5, 6, (1, 1))
  assert np.all(np.isfinite(logits[:, :6]))
  assert np.all(np.isnan(logits[:, 6]))
