"""Tests for keys and values kept in few bits."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from paxon.layers import testing
from paxon.layers.attention import (
  grouped_query,
  kv_cache,
  quantized_rows,
  sequence_cache,
  sliding_cache,
)
from paxon.layers.positions import rotary_embedding
from paxon.layers.stacks import stack
from paxon.sharding import layout, mesh, variables

LARGEST = {"int8": 127, "fp8": 448, "int4": 7}
BITS = {"int8": 8, "fp8": 8, "int4": 4}

# Magnitudes from the smallest that has a scale to the largest of float32.
ROWS = np.random.default_rng(3).standard_normal((2, 9, 2, 8)).astype("f4")
ROWS *= (10.0 ** np.linspace(-34, 37, 18)).reshape(2, 9, 1, 1).astype("f4")


@functools.cache
def _stored(name):
  """What a format keeps of ROWS, and what it gives back."""
  storage = quantized_rows.QuantizedRows(name)
  parts = jax.jit(storage.encode)(jax.device_put(ROWS))
  decode = jax.jit(functools.partial(storage.decode, dtype=jnp.float32))
  return {k: np.asarray(v) for k, v in parts.items()}, np.asarray(decode(parts))


@pytest.mark.parametrize("name", LARGEST)
def test_scales_are_the_largest_of_each_row(name):
  parts, _ = _stored(name)
  top = np.abs(ROWS).max(-1)
  expected = (top / np.float32(LARGEST[name])).astype(ml_dtypes.bfloat16)
  np.testing.assert_array_equal(parts["scale"], expected)


@pytest.mark.parametrize("name", LARGEST)
def test_each_feature_is_off_by_half_a_step_at_most(name):
  parts, decoded = _stored(name)
  scale = parts["scale"].astype("f8")[..., None]
  error = np.abs(decoded.astype("f8") - ROWS)
  # Steps of integers are even; those of e4m3 grow from 2**-9 with the value.
  half = scale / 2
  if name == "fp8":
    half = np.maximum(2.0**-4 * np.abs(ROWS.astype("f8")), 2.0**-10 * scale)
  # Float32 rounds the quotient and the product, 2**-23 together, and what was
  # beyond the largest value before its scale was rounded lost less than this.
  assert (error <= half * (1 + 2**-8) + 2.0**-22 * np.abs(ROWS)).all()
  # It is used: a rule that is twice as fine would not pass.
  assert (error > half / 2).any()


@pytest.mark.parametrize("name", LARGEST)
def test_a_row_that_is_not_finite_is_nan_and_its_neighbours_are_not(name):
  storage = quantized_rows.QuantizedRows(name)
  x = np.ones((1, 5, 2, 4), "f4")
  x[0, 1, 0] = np.nan
  x[0, 2, 1, 3] = np.nan
  x[0, 3, 0, 2] = np.inf
  x[0, 4] = 0
  back = jax.jit(lambda x: storage.decode(storage.encode(x), jnp.bfloat16))
  rows = np.asarray(back(x)).astype("f4")
  lost = np.zeros((1, 5, 2), bool)
  lost[0, 1, 0] = lost[0, 2, 1] = lost[0, 3, 0] = True
  assert np.isnan(rows[lost]).all()
  np.testing.assert_allclose(rows[~lost], x[~lost], rtol=2**-8)


def test_two_numbers_of_four_bits_are_one_byte():
  storage = quantized_rows.QuantizedRows("int4")
  x = np.array([-7, 7, 3, -1, 0, 5], "f4").reshape(1, 1, 1, 6)
  parts = jax.jit(storage.encode)(x)
  # Of neighbours the first is in the low bits; two's complement.
  kept = np.asarray(parts[""]).view(np.uint8).ravel().tolist()
  assert kept == [0x79, 0xF3, 0x50]
  back = jax.jit(lambda parts: storage.decode(parts, jnp.float32))
  np.testing.assert_array_equal(back(parts), x)


@pytest.mark.parametrize("name", LARGEST)
def test_a_cache_takes_the_bytes_that_its_bits_say(name):
  batch, slots, heads, dim = 2, 16, 4, 128
  cache = kv_cache.ContiguousCache(quantized_rows.QuantizedRows(name))
  x = jax.ShapeDtypeStruct((batch, slots, heads, dim), jnp.float32)
  at = jax.ShapeDtypeStruct((batch, slots), jnp.int32)

  def filled(*tokens):
    return cache.apply({}, *tokens, cache_length=slots, mutable=["cache"])[1]

  kept = variables.unbox(jax.eval_shape(filled, x, x, at, at))["cache"]
  count = sum(a.size * a.dtype.itemsize for a in kept.values())
  rows = 2 * batch * slots * heads
  places = 2 * 4 * batch * slots + 4
  assert count == rows * (dim * BITS[name] // 8 + 2) + places
  if BITS[name] == 8:
    assert count == pytest.approx(rows * dim * BITS[name] / 8, rel=0.03)


CACHES = {
  "contiguous": kv_cache.ContiguousCache,
  "sliding": functools.partial(sliding_cache.SlidingCache, window=6),
  "sequence": sequence_cache.SequenceCache,
}


def _attention(query, key, value):
  """The definition in float64, [B,1,K,H] attending to [B,S,K,H]."""
  key, value = key.astype("f8"), value.astype("f8")
  logits = np.einsum("bkh,bskh->bsk", query[:, 0].astype("f8"), key)
  weights = np.exp(logits - logits.max(1, keepdims=True))
  weights /= weights.sum(1, keepdims=True)
  return np.einsum("bsk,bskh->bkh", weights, value)


@pytest.mark.parametrize("name", LARGEST)
@pytest.mark.parametrize("cache", CACHES)
def test_attention_is_off_by_what_the_bits_allow(cache, name):
  rng = np.random.default_rng(5)
  query, key, value = rng.standard_normal((3, 2, 6, 2, 16)).astype("f4")
  query = query[:, -1:] * 0.25
  positions, ones = testing.make_positions(2, 6), testing.ones(2, 6)
  layer = CACHES[cache](storage=quantized_rows.QuantizedRows(name))

  def cut(first, last):
    tokens = (key, value, positions, ones)
    return [np.asarray(x)[:, first:last] for x in tokens]

  _, state = testing.apply(
    layer,
    {},
    *cut(0, 5),
    cache_length=6,
    mutable=["cache"],
  )
  seen, _ = testing.apply(layer, state, *cut(5, 6), mutable=["cache"])
  order = np.argsort(seen.positions, axis=1)[..., None, None]
  rows = [
    np.take_along_axis(np.asarray(x), order, 1) for x in (seen.key, seen.value)
  ]
  error = np.abs(_attention(query, *rows) - _attention(query, key, value)).max(
    (0, 2)
  )
  # Half a step of the largest feature, for all.
  step = {"int8": 1 / 254, "fp8": 2.0**-4, "int4": 1 / 14}[name] * (1 + 2**-8)
  of_key = step * np.abs(key).max((0, 1, 3))
  of_value = step * np.abs(value).max((0, 1, 3))
  # A logit is off by e, so a weight by a factor of exp(+-2e); then the values.
  e = np.abs(query).sum(-1).max((0, 1)) * of_key
  bound = (np.exp(2 * e) - 1) * np.abs(value).max((0, 1, 3)) + of_value
  assert (error <= bound).all()
  assert (error > 1e-3 * bound).all()


@pytest.mark.parametrize("cache", CACHES)
def test_a_token_without_a_slot_is_nan(cache):
  made = {"window": 9} if cache == "sliding" else {}
  layer = CACHES[cache](storage=quantized_rows.QuantizedRows(), **made)
  x = testing.normal(1, 2, 2, 4)
  tokens = (x, x, testing.make_positions(1, 2), testing.ones(1, 2))
  _, state = testing.apply(
    layer, {}, *tokens, cache_length=3, mutable=["cache"]
  )
  seen, _ = testing.apply(layer, state, *tokens, mutable=["cache"])
  assert np.isnan(seen.key).any()


def test_slots_split_over_devices_give_the_same():
  layer = grouped_query.GroupedQueryAttention(
    4,
    num_kv_heads=2,
    head_dim=4,
    rotary=rotary_embedding.Rotary(),
    cache=sequence_cache.SequenceCache(quantized_rows.QuantizedRows()),
  )
  model = stack.Stack((layer,), num_layers=2, scan=True)
  args = (
    testing.normal(2, 5, 8),
    testing.make_positions(2, 5),
    testing.ones(2, 5),
  )
  values = testing.random_values(model, *testing.in_context(*args))

  def both(v, *a):
    begin, end = ([x[:, s] for x in a] for s in (slice(4), slice(4, 5)))
    y, state = model.apply(
      v, *testing.in_context(*begin, cache_length=8), mutable=["cache"]
    )
    z, state = model.apply(
      {**v, **state}, *testing.in_context(*end), mutable=["cache"]
    )
    return jnp.concatenate([y, z], axis=1), state["cache"]

  found = []
  for text in ("data=1", "sequence=4,tensor=2"):
    spec = mesh.MeshSpec.parse(text)
    count = 1 if text == "data=1" else 8
    laid = layout.Layout(mesh.make_mesh(spec, devices=jax.devices()[:count]))
    options = {"xla_backend_optimization_level": 0}
    found.append(laid.jit(both, compiler_options=options)(values, *args))
  (one, _), (split, state) = found
  np.testing.assert_allclose(split, one, rtol=1e-5, atol=1e-5)
  kept = variables.unbox(state)["layers"]["blocks_0"]["cache"]
  assert kept["key"].dtype == jnp.int8
  for name in ("key", "key_scale"):
    # Layers, rows, heads, slots.
    shard = kept[name].addressable_shards[0].data.shape
    assert shard[:4] == (2, 2, 1, 2)


def test_rejects_an_odd_number_of_features_in_four_bits():
  with pytest.raises(ValueError, match=r"must be even"):
    quantized_rows.QuantizedRows("int4").encode(jnp.ones((1, 1, 1, 3)))


def test_rejects_other_formats():
  with pytest.raises(
    ValueError, match=r"format must be int8, fp8 or int4, got"
  ):
    quantized_rows.QuantizedRows("int2")
