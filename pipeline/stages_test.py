"""Tests for ticks, microbatches, stages and their gradients."""

from flax import linen as nn
from flax.core import scope as core_scope
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import testing as layers_testing
from paxon.pipeline import layer_calls, layer_state, stage_sharding, stages
from paxon.sharding import axes
from paxon.sharding import rules as rules_lib


def _work(table):
  """(repeat, microbatch) by tick and stage; None in a bubble."""
  rows = []
  for tick in range(table.num_ticks):
    row = []
    for stage in range(table.num_stages):
      work = table.work(jnp.int32(tick), jnp.int32(stage))
      pair = (int(work.repeat), int(work.microbatch))
      row.append(pair if bool(work.is_live) else None)
    rows.append(row)
  return rows


def test_a_pipeline_fills_and_drains():
  table = stages.Ticks(num_stages=3, num_microbatches=2)
  a, b, _ = (0, 0), (0, 1), None
  assert _work(table) == [
    [a, _, _],
    [b, a, _],
    [_, b, a],
    [_, _, b],
  ]


def test_a_microbatch_waits_until_all_have_begun():
  table = stages.Ticks(num_stages=2, num_microbatches=3, num_repeats=2)
  assert table.wait == 1
  assert _work(table) == [
    [(0, 0), None],
    [(0, 1), (0, 0)],
    [(0, 2), (0, 1)],
    [(1, 0), (0, 2)],
    [(1, 1), (1, 0)],
    [(1, 2), (1, 1)],
    [None, (1, 2)],
  ]


def test_few_microbatches_wait_for_the_last_stage():
  table = stages.Ticks(num_stages=3, num_microbatches=1, num_repeats=2)
  live = [[w is not None for w in row] for row in _work(table)]
  np.testing.assert_array_equal(live, np.tile(np.eye(3, dtype=bool), (2, 1)))


def test_sequences_of_microbatches():
  rows = jnp.arange(8)
  strided = stages.Microbatches(num_microbatches=4)
  np.testing.assert_array_equal(
    strided.split(rows), [[[0, 4], [1, 5], [2, 6], [3, 7]]]
  )
  by_stage = stages.Microbatches(num_microbatches=4, num_segments=2)
  np.testing.assert_array_equal(
    by_stage.split(rows), [[[0, 2], [1, 3]], [[4, 6], [5, 7]]]
  )
  for order in (strided, by_stage):
    np.testing.assert_array_equal(order.merge(order.split(rows)), rows)
    flat = order.split(rows).reshape(4, 2)
    np.testing.assert_array_equal(order.merge_flat(flat), rows)


@pytest.mark.parametrize(
  ("settings", "expected"),
  [
    ({"num_microbatches": 4, "shrink": False}, 4),
    ({"microbatch_size": 3, "shrink": False}, 4),
    ({"num_microbatches": 8, "shrink": True}, 6),
    ({"microbatch_size": 5, "shrink": True}, 3),
    # As many as give each shard of the mesh the same number of sequences.
    ({"num_microbatches": 4, "shards": 4, "shrink": True}, 3),
    ({"microbatch_size": 2, "shards": 6, "shrink": True}, 2),
    # One sequence is not sharded.
    ({"num_microbatches": 12, "shards": 4, "shrink": True}, 12),
    ({"num_microbatches": 8, "shards": 5, "shrink": True}, 1),
  ],
)
def test_number_of_microbatches(settings, expected):
  given = {"num_microbatches": None, "microbatch_size": None, "shards": 1}
  assert stages.count_microbatches(12, **{**given, **settings}) == expected


def test_a_mesh_without_an_axis_of_stages_is_rejected():
  rules = stage_sharding.with_stages(
    rules_lib.DEFAULT_RULES, num_stages=2, num_groups=2
  )
  own = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
  with (
    jax.set_mesh(own),
    nn.logical_axis_rules(rules),
    pytest.raises(
      ValueError,
      match=r"num_stages \(2\) needs a mesh with stage=2, got the mesh 'da",
    ),
  ):
    stage_sharding.check_mesh(2)


def test_linens_scopes_are_as_layer_calls_expects():
  """Names of Flax's own; where they change, `layer_calls` must."""
  for mutable, has_cache in ((["params", "cache"], True), (False, False)):
    left = core_scope.subtract_filters(mutable, ("params",))
    assert core_scope.in_filter(left, "cache") is has_cache
    assert not core_scope.in_filter(left, "params")
  key = jax.random.key(3)
  module = nn.Dropout(0.5).bind({}, rngs={"dropout": key})
  lazy = module.scope.rngs["dropout"]
  assert isinstance(lazy, core_scope.LazyRng)
  assert lazy.rng == key


def test_groups_of_stages():
  """Group (r * P + s) * K + k is entry [s, r, k]."""
  view = stages.StageLayers(num_groups=7, num_stages=2, num_repeats=2)
  groups = jnp.arange(7) * 10
  # The last entry is no group.
  expected = [[[0, 10], [40, 50]], [[20, 30], [60, 60]]]
  np.testing.assert_array_equal(view.split(groups), expected)
  np.testing.assert_array_equal(view.merge(view.split(groups)), groups)
  np.testing.assert_array_equal(
    view.group_numbers(), [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
  )


def test_outputs_of_ticks_by_microbatch():
  table = stages.Ticks(num_stages=2, num_microbatches=3, num_repeats=2)
  ticks = np.full((table.num_ticks, 2), -1)
  for tick, row in enumerate(_work(table)):
    for stage, pair in enumerate(row):
      if pair is not None:
        ticks[tick, stage] = 100 * stage + 10 * pair[0] + pair[1]
  made = table.gather_microbatches(jax.device_put(ticks))
  np.testing.assert_array_equal(
    made, [[[0, 1, 2], [10, 11, 12]], [[100, 101, 102], [110, 111, 112]]]
  )


def test_gradients_of_bubbles_are_zero_whatever_they_are():
  def fn(x, live):
    tree = {"x": x, "count": jnp.int32(3)}
    return jnp.sqrt(layer_calls.mask_gradient(live, tree)["x"])

  gradient = jax.grad(fn)
  assert gradient(4.0, jnp.bool_(True)) == 0.25
  assert np.isinf(gradient(0.0, jnp.bool_(True)))
  assert gradient(0.0, jnp.bool_(False)) == 0.0


def test_caches_are_read_and_written_by_microbatch():
  rows = stages.Microbatches(num_microbatches=2)
  cache = {
    "key": layers_testing.normal(1, 2, 3, 4, 5),
    "index": jnp.arange(6).reshape(1, 2, 3),
  }
  with_rows, counts = layer_state.split_caches(cache, rows, batch=4)
  jax.tree.map(
    np.testing.assert_array_equal,
    layer_state.merge_caches(with_rows, counts),
    cache,
  )
  own = {name: x[0] for name, x in with_rows.items()}
  counts = {name: x[0] for name, x in counts.items()}
  work = stages.Work(jnp.int32(1), jnp.int32(1), jnp.bool_(True))
  found = layer_state.read_caches(own, counts, work, rows)
  np.testing.assert_array_equal(found["key"], cache["key"][0, 1, :, 1::2])
  np.testing.assert_array_equal(found["index"], [3, 4, 5])
  new = layer_state.write_caches(own, {"key": -found["key"]}, work, rows)
  merged = layer_state.merge_caches({k: x[None] for k, x in new.items()}, {})
  expected = np.array(cache["key"])
  expected[0, 1, :, 1::2] *= -1
  np.testing.assert_array_equal(merged["key"], expected)
  with pytest.raises(ValueError, match=r"cache/index of shape \(7,\) does not"):
    layer_state.split_caches({"index": jnp.ones((1, 2, 3, 7))}, rows, batch=4)


def test_rules_of_stages():
  def rules(**fields):
    made = stage_sharding.with_stages(
      rules_lib.DEFAULT_RULES, num_stages=2, **fields
    )
    return {
      name: entry
      for name, entry in made
      if entry != dict(rules_lib.DEFAULT_RULES)[name]
    }

  assert rules(num_groups=4) == {axes.LAYERS: axes.STAGE}
  moved = {axes.EMBED: (axes.FSDP, axes.STAGE)}
  assert rules(num_groups=5) == moved
  assert rules(num_groups=4, circular_repeats=2) == moved
  batch = (axes.STAGE, axes.DATA, axes.FSDP, axes.EXPERT)
  assert rules(num_groups=4, streaming=True) == {
    axes.LAYERS: axes.STAGE,
    axes.BATCH: batch,
  }
