"""Tests for the ring of a window."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import testing
from paxon.layers.attention import kv_cache, sliding_cache
from paxon.layers.attention import testing as attention_testing
from paxon.layers.positions import rotary_embedding
from paxon.layers.stacks import stack
from paxon.sharding import variables

BATCH, EMBED, WINDOW = 2, 8, 3
LENGTHS = (2, 7)


def _tokens(length, first=0, seed=0):
  """Keys, values, positions, segments, of consecutive tokens."""
  shape = (BATCH, length, 2, 3)
  return (
    testing.normal(*shape, seed=seed),
    testing.normal(*shape, seed=seed + 1),
    testing.array(
      np.asarray(testing.make_positions(BATCH, length)) + first, np.int32
    ),
    testing.ones(BATCH, length),
  )


def _run(cache, state, tokens, **kwargs):
  return testing.apply(cache, state, *tokens, mutable=["cache"], **kwargs)


def _kept(state):
  return variables.unbox(state)["cache"]


def test_memory_is_that_of_the_window():
  cache = sliding_cache.SlidingCache(WINDOW)
  _, state = _run(cache, {}, _tokens(9), cache_length=100)
  assert _kept(state)["key"].shape == (BATCH, 2, WINDOW, 3)
  seen, state = _run(cache, state, _tokens(1, 9, seed=5))
  assert _kept(state)["key"].shape == (BATCH, 2, WINDOW, 3)
  assert seen.positions.tolist() == [[9, 7, 8]] * 2
  assert _kept(state)["index"].tolist() == [10, 10]


def test_padding_takes_no_slot():
  cache = sliding_cache.SlidingCache(WINDOW)
  key, value, positions, _ = _tokens(7)
  segments = testing.array([[1, 1, 0, 0, 0, 0, 0], [1] * 7], jnp.int32)
  _, state = _run(cache, {}, (key, value, positions, segments), cache_length=9)
  kept = jax.device_get(_kept(state))
  assert kept["index"].tolist() == list(LENGTHS)
  assert kept["positions"].tolist() == [[0, 1, 0], [6, 4, 5]]
  assert kept["segment_ids"].tolist() == [[1, 1, 0], [1, 1, 1]]
  rows = {name: np.swapaxes(kept[name], 1, 2) for name in ("key", "value")}
  key, value = np.asarray(key), np.asarray(value)
  np.testing.assert_array_equal(rows["key"][0, :2], key[0, :2])
  np.testing.assert_array_equal(rows["value"][1], value[1, [6, 4, 5]])


def test_several_new_tokens_see_what_they_push_out():
  cache = sliding_cache.SlidingCache(WINDOW)
  _, state = _run(cache, {}, _tokens(4), cache_length=9)
  seen, state = _run(cache, state, _tokens(5, 4, seed=5))
  assert seen.positions[0].tolist() == [3, 1, 2, 4, 5, 6, 7, 8]
  assert _kept(state)["positions"][0].tolist() == [6, 7, 8]


def test_a_cache_shorter_than_the_window_fills():
  cache = sliding_cache.SlidingCache(8)
  _, state = _run(cache, {}, _tokens(2), cache_length=3)
  assert _kept(state)["key"].shape[2] == 3
  seen, state = _run(cache, state, _tokens(1, 2, seed=5))
  assert np.all(np.isfinite(seen.key))
  seen, state = _run(cache, state, _tokens(1, 3, seed=7))
  assert np.isnan(seen.key).any(axis=(1, 2, 3)).all()
  with pytest.raises(ValueError, match=r"4 tokens do not fit in the 3 slots"):
    _run(cache, state, _tokens(4))


def _layer(window, cache):
  return attention_testing.grouped_query_attention(
    4,
    num_kv_heads=2,
    head_dim=4,
    window=window,
    rotary=rotary_embedding.Rotary(),
    cache=cache,
  )


def test_local_and_global_layers_of_one_scan_decode_as_they_train():
  local = _layer(WINDOW, sliding_cache.SlidingCache(WINDOW))
  blocks = (local, _layer(None, kv_cache.ContiguousCache()))
  model = stack.Stack(blocks, num_layers=4, scan=True)
  new, width = 6, max(LENGTHS)
  total = width + new
  x = testing.normal(BATCH, total, EMBED)
  positions, ones = (
    testing.make_positions(BATCH, total),
    testing.ones(BATCH, total),
  )
  values = testing.random_values(model, *testing.in_context(x, positions, ones))
  expected = testing.apply(
    model, values, *testing.in_context(x, positions, ones)
  )

  inside = positions[:, :width] < testing.array(LENGTHS, np.int32)[:, None]
  y, state = testing.apply(
    model,
    values,
    *testing.in_context(
      x[:, :width],
      positions[:, :width],
      inside.astype(jnp.int32),
      cache_length=total,
    ),
    mutable=["cache"],
  )
  rows = jnp.arange(BATCH)
  for b, n in enumerate(LENGTHS):
    np.testing.assert_allclose(y[b, :n], expected[b, :n], rtol=1e-5, atol=1e-5)
  step = jax.jit(
    lambda v, *a: model.apply(v, *testing.in_context(*a), mutable=["cache"])
  )
  for i in range(new):
    at = testing.array(LENGTHS, np.int32) + i
    y, state = step(
      {**values, **state},
      x[rows, at][:, None],
      at[:, None],
      testing.ones(BATCH, 1),
    )
    np.testing.assert_allclose(
      y[:, 0], expected[rows, at], rtol=1e-5, atol=1e-5
    )
  shapes = jax.tree.map(jnp.shape, _kept(state)["layers"])
  assert shapes["blocks_0"]["cache"]["key"] == (2, BATCH, 2, WINDOW, 4)
  assert shapes["blocks_1"]["cache"]["key"] == (2, BATCH, 2, total, 4)


def test_the_layer_must_not_see_more_than_the_cache_keeps():
  x, positions, ones = (
    testing.normal(1, 2, EMBED),
    testing.make_positions(1, 2),
    testing.ones(1, 2),
  )
  cache = sliding_cache.SlidingCache(WINDOW)
  args = testing.in_context(x, positions, ones)
  message = r"attends to the last 4 positions, but its cache keeps .* last 3"
  with pytest.raises(ValueError, match=message):
    testing.specs(_layer(4, cache), *args)
  message = r"Attention attends to all positions, but"
  with pytest.raises(ValueError, match=message):
    testing.specs(_layer(None, cache), *args)


def test_logical_axes():
  cache = sliding_cache.SlidingCache(WINDOW)
  heads = ("batch", "kv_heads", None, "head_dim")
  assert testing.axes(cache, *_tokens(2), cache_length=3) == {
    "cache/key": heads,
    "cache/value": heads,
    "cache/positions": ("batch", None),
    "cache/segment_ids": ("batch", None),
    "cache/index": ("batch",),
  }


def test_rejects_what_does_not_fit():
  with pytest.raises(ValueError, match=r"SlidingCache.window must be positive"):
    sliding_cache.SlidingCache(0)
  cache = sliding_cache.SlidingCache(WINDOW)
  with pytest.raises(ValueError, match=r"cache_length \(2\) must be at least"):
    _run(cache, {}, _tokens(3), cache_length=2)
  _, state = _run(cache, {}, _tokens(3), cache_length=4)
  with pytest.raises(ValueError, match=r"a cache exists already"):
    _run(cache, state, _tokens(3), cache_length=4)
  one_row = jax.tree.map(lambda x: x[:1], _tokens(1))
  with pytest.raises(
    ValueError, match=r"A batch of 1 sequences does not fit a cache of 2"
  ):
    _run(cache, state, one_row)
