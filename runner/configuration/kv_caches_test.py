"""Tests for caches of a configuration that keep few bits."""

import fiddle as fdl
import pytest

from paxon.layers import block
from paxon.layers.attention import (
  grouped_query,
  kv_cache,
  quantized_rows,
  sliding_cache,
)
from paxon.runner import knobs
from paxon.runner import toy_experiment as toy
from paxon.runner.configuration import effects, kv_caches


def _attention(**fields):
  return fdl.Config(
    grouped_query.GroupedQueryAttention,
    4,
    num_kv_heads=2,
    head_dim=4,
    **fields,
  )


def test_every_cache_that_says_nothing_else_is_set():
  ring = fdl.Config(sliding_cache.SlidingCache, window=3)
  cast = fdl.Config(kv_cache.ContiguousCache, storage=fdl.Config(kv_cache.AsIs))
  config = fdl.Config(
    dict,
    default=_attention(),
    ring=_attention(window=3, cache=ring),
    cast=_attention(cache=cast),
    none=_attention(cache=fdl.Config(kv_cache.NoCache)),
  )
  assert kv_caches.set_where_unset(config, "int8") == [
    "default.cache.storage",
    "ring.cache.storage",
  ]
  built = fdl.build(config)
  assert built["default"].cache.storage == quantized_rows.QuantizedRows("int8")
  assert isinstance(built["default"].cache, kv_cache.ContiguousCache)
  assert built["ring"].cache.storage == quantized_rows.QuantizedRows("int8")
  assert built["ring"].cache.window == 3
  assert built["cast"].cache.storage == kv_cache.AsIs()
  assert isinstance(built["none"].cache, kv_cache.NoCache)


def test_a_part_without_a_cache_is_left_alone():
  config = fdl.Config(block.TransformerBlock)
  assert kv_caches.set_where_unset(config, "int8") == []


def test_refuses_other_formats():
  with pytest.raises(
    ValueError, match=r"must be int8, fp8 or int4, got 'int2'"
  ):
    kv_caches.set_where_unset(fdl.Config(dict), "int2")


def test_a_knob_that_no_cache_takes_is_refused():
  made = toy.Toy(kv_cache="int8")
  with pytest.raises(
    knobs.KnobError, match=r"Toy.kv_cache has no effect: .* field 'storage'"
  ):
    made.job()


@pytest.mark.parametrize("path", ["a.cache", "a.cache.storage.format"])
def test_a_run_may_go_on_with_other_caches(path):
  values = {"a": "paxon.layers.attention.grouped_query.GroupedQueryAttention"}
  assert effects.rule_of(path, values).may_change
