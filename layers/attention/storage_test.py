"""Tests for what caches hold, and for the seam that lets others in."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import testing
from paxon.layers.attention import kv_cache, sequence_cache, sliding_cache
from paxon.layers.attention import testing as attention_testing
from paxon.layers.positions import rotary_embedding
from paxon.sharding import target, variables

BATCH, LENGTH, PROMPT, EMBED = 2, 7, 4, 8


@dataclasses.dataclass(frozen=True)
class _Int8Rows:
  """The tests' own: 8 bits a feature, and a scale for each row."""

  def encode(self, x):
    scale = jnp.max(jnp.abs(x), axis=-1).astype(jnp.float32) / 127
    rows = x / jnp.where(scale == 0, 1, scale)[..., None].astype(x.dtype)
    return {"": jnp.round(rows).astype(jnp.int8), "scale": scale}

  def decode(self, parts, dtype):
    rows = parts[""].astype(jnp.float32) * parts["scale"][..., None]
    return rows.astype(dtype)


CACHES = {
  "contiguous": lambda kept: kv_cache.ContiguousCache(kept),
  "sliding": lambda kept: sliding_cache.SlidingCache(3, kept),
  "sequence": lambda kept: sequence_cache.SequenceCache(kept),
}


def _layer(cache):
  return attention_testing.grouped_query_attention(
    4,
    num_kv_heads=2,
    head_dim=16,
    window=3,
    rotary=rotary_embedding.Rotary(),
    cache=cache,
  )


@pytest.mark.parametrize("name", CACHES)
def test_a_storage_of_ones_own_serves_in_every_cache(name):
  layer = _layer(CACHES[name](_Int8Rows()))
  x = testing.normal(BATCH, LENGTH, EMBED)
  args = (x, testing.make_positions(BATCH, LENGTH), testing.ones(BATCH, LENGTH))
  values = testing.random_values(layer, *testing.in_context(*args))
  expected = np.asarray(
    testing.apply(layer, values, *testing.in_context(*args))
  )
  cut = lambda a, b: [np.asarray(y)[:, a:b] for y in args]  # noqa: E731
  _, state = testing.apply(
    layer,
    values,
    *testing.in_context(*cut(0, PROMPT), cache_length=LENGTH),
    mutable=["cache"],
  )
  kept = variables.unbox(state)["cache"]["cache"]
  slots = kept["positions"].shape[1]
  assert kept["key"].dtype == jnp.int8
  assert kept["key"].shape == (BATCH, 2, slots, 16)
  assert kept["value_scale"].dtype == jnp.float32
  assert kept["value_scale"].shape == (BATCH, 2, slots)
  step = jax.jit(
    lambda v, *a: layer.apply(v, *testing.in_context(*a), mutable=["cache"])
  )
  largest = 0.0
  for t in range(PROMPT, LENGTH):
    y, state = step({**values, **state}, *cut(t, t + 1))
    largest = max(largest, float(np.abs(y - expected[:, t : t + 1]).max()))
  # Close by the rounding of 8 bits, which is there.
  assert 1e-5 < largest < 3e-2 * np.abs(expected).max()


def test_a_full_cache_is_nan_in_a_storage_of_ones_own():
  cache = kv_cache.ContiguousCache(_Int8Rows())
  x = testing.normal(BATCH, 2, 2, 4)
  tokens = (x, x, testing.make_positions(BATCH, 2), testing.ones(BATCH, 2))
  _, state = testing.apply(
    cache, {}, *tokens, cache_length=3, mutable=["cache"]
  )
  seen, _ = testing.apply(cache, state, *tokens, mutable=["cache"])
  assert np.isnan(seen.key[:, 1:]).all()
  assert np.isfinite(seen.key[:, :1]).all()


def test_as_is_keeps_the_dtype_and_casts_what_it_returns():
  x = testing.normal(2, 3, 1, 4)
  kept = kv_cache.AsIs().encode(x)
  assert kept[""].dtype == jnp.float32
  decoded = kv_cache.AsIs().decode(kept, jnp.float16)
  np.testing.assert_array_equal(decoded, x.astype(jnp.float16))


def test_as_is_stores_and_reads_bfloat16_in_float32_on_cpus():
  x = testing.normal(2, 3, 1, 4, dtype=jnp.bfloat16)
  kept = kv_cache.AsIs().encode(x)
  assert kept[""].dtype == jnp.float32
  decoded = kv_cache.AsIs().decode(kept, jnp.bfloat16)
  assert decoded.dtype == jnp.float32
  np.testing.assert_array_equal(decoded, x)
  # Programs for other platforms, such as those of plans, keep the dtype.
  with target.any_platform():
    kept = kv_cache.AsIs().encode(x)
    assert kept[""].dtype == jnp.bfloat16
    assert kv_cache.AsIs().decode(kept, jnp.bfloat16).dtype == jnp.bfloat16


@pytest.mark.parametrize("name", CACHES)
def test_steps_in_bfloat16_equal_those_of_a_bfloat16_cache(name):
  results = []
  for storage in (kv_cache.AsIs(), kv_cache.Cast(jnp.bfloat16)):
    layer = _layer(CACHES[name](storage)).clone(dtype=jnp.bfloat16)
    x = testing.normal(BATCH, LENGTH, EMBED, dtype=jnp.bfloat16)
    args = (
      x,
      testing.make_positions(BATCH, LENGTH),
      testing.ones(BATCH, LENGTH),
    )
    values = testing.random_values(layer, *testing.in_context(*args))
    cut = lambda a, b, args=args: [y[:, a:b] for y in args]  # noqa: E731
    y, state = testing.apply(
      layer,
      values,
      *testing.in_context(*cut(0, PROMPT), cache_length=LENGTH),
      mutable=["cache"],
    )
    outputs = [y]
    for t in range(PROMPT, LENGTH):
      y, state = testing.apply(
        layer,
        {**values, **state},
        *testing.in_context(*cut(t, t + 1)),
        mutable=["cache"],
      )
      outputs.append(y)
    results.append(outputs)
  for found, expected in zip(*results, strict=True):
    np.testing.assert_array_equal(found, expected)


def test_cast_rounds_once():
  x = testing.normal(2, 3, 1, 4)
  kept = kv_cache.Cast(jnp.bfloat16).encode(x)
  assert kept[""].dtype == jnp.bfloat16
  decoded = kv_cache.Cast(jnp.bfloat16).decode(kept, jnp.float32)
  assert decoded.dtype == jnp.float32
  expected = np.asarray(x.astype(jnp.bfloat16).astype(jnp.float32))
  np.testing.assert_array_equal(decoded, expected)


def test_logical_axes_follow_the_parts():
  cache = kv_cache.ContiguousCache(_Int8Rows())
  x = jnp.ones((BATCH, 2, 2, 4))
  tokens = (x, x, testing.make_positions(BATCH, 2), testing.ones(BATCH, 2))
  found = testing.axes(cache, *tokens, cache_length=3)
  assert found["cache/key_scale"] == ("batch", "kv_heads", "kv_length")
  assert found["cache/key"] == ("batch", "kv_heads", "kv_length", "head_dim")


def test_rejects_integers_without_a_scale():
  with pytest.raises(ValueError, match=r"Cast.dtype must be .* got int8"):
    kv_cache.Cast(jnp.int8)
