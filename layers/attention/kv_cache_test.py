"""Tests for the contiguous cache."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import testing
from paxon.layers.attention import grouped_query, kv_cache
from paxon.sharding import variables

BATCH, KV_HEADS, HEAD_DIM = 2, 2, 3


def _tokens(length, seed=0, dtype=jnp.float32):
  """Keys, values, positions, segments; the second row ends in padding."""
  shape = (BATCH, length, KV_HEADS, HEAD_DIM)
  segments = testing.ones(BATCH, length).at[1, -1].set(0)
  return (
    testing.normal(*shape, seed=seed, dtype=dtype),
    testing.normal(*shape, seed=seed + 1, dtype=dtype),
    testing.make_positions(BATCH, length),
    segments,
  )


def _run(cache, state, tokens, **kwargs):
  return testing.apply(cache, state, *tokens, mutable=["cache"], **kwargs)


def test_stores_nothing_unless_asked():
  cache = kv_cache.ContiguousCache()
  seen, state = _run(cache, {}, _tokens(3))
  assert not state
  np.testing.assert_array_equal(seen.key, _tokens(3)[0])
  assert not cache.init(jax.random.key(0), *_tokens(3))


def test_keeps_tokens_in_the_order_of_arrival():
  cache = kv_cache.ContiguousCache()
  first, second, third = _tokens(3), _tokens(1, 5), _tokens(2, 9)
  seen, state = _run(cache, {}, first, cache_length=8)
  assert seen.key.shape[1] == 3
  _, state = _run(cache, state, second)
  seen, state = _run(cache, state, third)
  stored = (seen.key, seen.value, seen.positions, seen.segment_ids)
  for i, got in enumerate(stored):
    given = np.concatenate([first[i], second[i], third[i]], axis=1)
    np.testing.assert_array_equal(got[:, :6], given)
    assert not np.any(got[:, 6:])
  assert variables.unbox(state)["cache"]["index"] == 6


def test_plain_values_serve_as_well_as_boxed_ones():
  cache = kv_cache.ContiguousCache()
  _, state = _run(cache, {}, _tokens(3), cache_length=4)
  boxed, _ = _run(cache, state, _tokens(1, 5))
  plain, _ = _run(cache, variables.unbox(state), _tokens(1, 5))
  np.testing.assert_array_equal(boxed.key, plain.key)


def test_storage_dtype():
  cache = kv_cache.ContiguousCache(kv_cache.Cast(jnp.bfloat16))
  _, state = _run(cache, {}, _tokens(2), cache_length=3)
  stored = variables.unbox(state)["cache"]
  assert stored["key"].dtype == stored["value"].dtype == jnp.bfloat16
  seen, _ = _run(cache, state, _tokens(1, 5))
  assert seen.key.dtype == jnp.float32
  rounded = _tokens(2)[0].astype(jnp.bfloat16).astype(jnp.float32)
  np.testing.assert_array_equal(seen.key[:, :2], rounded)


def test_logical_axes():
  cache = kv_cache.ContiguousCache()
  axes = testing.axes(cache, *_tokens(2), cache_length=3)
  heads = ("batch", "kv_heads", "kv_length", "head_dim")
  assert axes == {
    "cache/key": heads,
    "cache/value": heads,
    "cache/positions": ("batch", "kv_length"),
    "cache/segment_ids": ("batch", "kv_length"),
    "cache/index": (),
  }


def test_a_token_beyond_the_last_slot_gives_nan():
  cache = kv_cache.ContiguousCache()
  _, state = _run(cache, {}, _tokens(2), cache_length=3)
  seen, state = _run(cache, state, _tokens(1, 5))
  assert np.all(np.isfinite(seen.key))
  seen, _ = _run(cache, state, _tokens(1, 7))
  assert np.isnan(seen.key).any()
  assert np.isnan(seen.value).any()


def _with_row_index(state):
  """The same content, with an index for each sequence."""
  values = variables.unbox(state)["cache"]
  return {"cache": {**values, "index": jnp.full((BATCH,), values["index"])}}


def test_a_sequence_with_its_own_index_skips_padding():
  cache = kv_cache.ContiguousCache()
  first, second, third = _tokens(3), _tokens(2, 5), _tokens(1, 9)
  _, state = _run(cache, {}, first, cache_length=8)
  state = _with_row_index(state)
  seen = None
  # The second sequence has one token and padding, then padding alone.
  for tokens in (second, third):
    seen, state = _run(cache, state, tokens)
  assert variables.unbox(state)["cache"]["index"].tolist() == [6, 4]
  for i, name in enumerate(("key", "value", "positions", "segment_ids")):
    got = np.asarray(getattr(seen, name))
    rows = [np.concatenate([x[i][0] for x in (first, second, third)])]
    rows.append(np.concatenate([first[i][1], second[i][1, :1]]))
    for row, expected in zip(got, rows, strict=True):
      np.testing.assert_array_equal(row[: len(expected)], expected)
      assert not np.any(row[len(expected) :])


def test_only_the_sequence_without_a_slot_gets_nan():
  cache = kv_cache.ContiguousCache()
  _, state = _run(cache, {}, _tokens(2), cache_length=3)
  state = _with_row_index(state)
  for seed in (5, 7):
    seen, state = _run(cache, state, _tokens(1, seed))
  # The second sequence had only padding.
  assert np.isnan(seen.key[0]).any()
  assert np.isfinite(seen.key[1]).all()


def test_rejects_too_few_slots():
  cache = kv_cache.ContiguousCache()
  with pytest.raises(ValueError, match=r"cache_length \(2\) must be at least"):
    _run(cache, {}, _tokens(3), cache_length=2)
  _, state = _run(cache, {}, _tokens(2), cache_length=3)
  with pytest.raises(ValueError, match=r"4 tokens do not fit in the 3 slots"):
    _run(cache, state, _tokens(4))


def test_rejects_a_second_cache():
  cache = kv_cache.ContiguousCache()
  _, state = _run(cache, {}, _tokens(2), cache_length=3)
  with pytest.raises(ValueError, match=r"a cache exists already"):
    _run(cache, state, _tokens(2), cache_length=3)


def test_rejects_what_another_layer_or_storage_kept():
  cache = kv_cache.ContiguousCache()
  _, state = _run(cache, {}, _tokens(2), cache_length=3)
  other = kv_cache.ContiguousCache(kv_cache.Cast(jnp.bfloat16))
  message = r"'key': 'bfloat16\[2, 3\]'.* but the cache .*'float32\[2, 3\]'"
  with pytest.raises(ValueError, match=message):
    _run(other, state, _tokens(1))
  rows = jax.tree.map(lambda x: x[:1], _tokens(1))
  with pytest.raises(
    ValueError, match=r"A batch of 1 sequences does not fit a cache of 2"
  ):
    _run(cache, state, rows)


def test_rejects_ranks_and_shapes_that_do_not_go_together():
  key, value, positions, segments = _tokens(2)
  message = (
    r"keys of shape \[batch, length, kv_heads, head_dim\], got \(2, 2, 2"
  )
  with pytest.raises(ValueError, match=message):
    kv_cache.tokens(key[..., 0], value, positions, segments)
  message = r"`value` with leading dimensions \(2, 2, 2\)"
  with pytest.raises(ValueError, match=message):
    kv_cache.tokens(key, value[:, :, :1], positions, segments)
  with pytest.raises(
    ValueError, match=r"`positions` .*\(2, 2\).* got \(2, 1\)"
  ):
    kv_cache.tokens(key, value, positions[:, :1], segments)
  with pytest.raises(ValueError, match=r"`segment_ids` .* got \(2, 2, 1\)"):
    kv_cache.tokens(key, None, positions, segments[:, :, None])


def test_a_step_turns_no_keys_and_values():
  """Its products read them as they are kept."""
  slots, heads, width = 64, 2, 8
  layer = grouped_query.GroupedQueryAttention(
    2 * heads, num_kv_heads=heads, head_dim=width
  )
  x, *places = (
    testing.normal(BATCH, 1, 4),
    testing.make_positions(BATCH, 1),
    testing.ones(BATCH, 1),
  )

  def init(*a):
    return layer.init(
      jax.random.key(0), *testing.in_context(*a, cache_length=slots)
    )

  state = jax.eval_shape(init, x, *places)
  step = jax.jit(
    lambda v, cache, *a: layer.apply(
      {**v, **cache}, *testing.in_context(*a), mutable=["cache"]
    ),
    # Or the cache would be copied before a token is written.
    donate_argnums=1,
  )
  cache = {"cache": state.pop("cache")}
  text = step.lower(state, cache, x, *places).compile().as_text()
  moved = re.findall(r"= f32\[([\d,]+)\]\S* (?:transpose|copy)\(", text)
  sizes = [math.prod(int(n) for n in dims.split(",")) for dims in moved]
  assert max(sizes) < BATCH * slots * heads * width
