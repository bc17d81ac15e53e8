"""Tests for the cache with split slots, on eight devices."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import testing
from paxon.layers.attention import grouped_query, sequence_cache
from paxon.layers.positions import rotary_embedding
from paxon.layers.stacks import stack
from paxon.sharding import layout, mesh, variables

BATCH, LENGTH, PROMPT, SLOTS, EMBED = 2, 10, 8, 61, 8
X = testing.normal(BATCH, LENGTH, EMBED)
POSITIONS = testing.make_positions(BATCH, LENGTH)
# The prompt of the second row is shorter.
SEGMENTS = testing.ones(BATCH, LENGTH).at[1, 6:8].set(0)


def _model():
  layer = grouped_query.GroupedQueryAttention(
    4,
    num_kv_heads=2,
    head_dim=4,
    rotary=rotary_embedding.Rotary(),
    cache=sequence_cache.SequenceCache(),
  )
  return stack.Stack((layer,), num_layers=2, scan=True)


def _cut(first, last):
  at = slice(first, last)
  return tuple(np.asarray(a)[:, at] for a in (X, POSITIONS, SEGMENTS))


def _steps(text):
  """The compiled prefill and step of a layout, and the step's text."""
  model = _model()
  laid = layout.Layout(mesh.make_mesh(mesh.MeshSpec.parse(text)))

  def prefill(v, *a):
    return model.apply(
      v, *testing.in_context(*a, cache_length=SLOTS), mutable=["cache"]
    )

  def step(v, *a):
    return model.apply(v, *testing.in_context(*a), mutable=["cache"])

  return laid.jit(prefill), laid.jit(step)


def _sent(text):
  """Returns the operations of a compiled text that send, with their sizes."""
  found = []
  for line in text.splitlines():
    match = re.search(
      r"= (\S.*) (all-gather|all-to-all|reduce-scatter|collective-permute|"
      r"all-reduce|ragged-all-to-all)(-start)?\(",
      line,
    )
    if match:
      for dims in re.findall(r"\w\d*\[([\d,]*)\]", match[1]):
        size = math.prod(int(n) for n in dims.split(",") if n)
        found.append((match[2], size))
  return found


def _shards(state, name):
  """Returns the first layer's [S,B,...] by device, in order of slots."""
  array = variables.unbox(state)["cache"]["layers"]["blocks_0"]["cache"][name]
  axis = 3 if name in ("key", "value") else 2
  by_slot = {s.index[axis].start or 0: s.data for s in array.addressable_shards}
  return [
    np.moveaxis(np.asarray(by_slot[at])[0], axis - 1, 0)
    for at in sorted(by_slot)
  ]


@pytest.mark.parametrize("text", ["data=2,sequence=4", "sequence=4,tensor=2"])
def test_split_slots_give_the_same_numbers_and_stay_where_they_are(text):
  model = _model()
  values = testing.random_values(
    model, *testing.in_context(X, POSITIONS, SEGMENTS)
  )
  expected = np.asarray(
    testing.apply(model, values, *testing.in_context(X, POSITIONS, SEGMENTS))
  )
  prefill, step = _steps(text)
  y, state = prefill(values, *_cut(0, PROMPT))
  np.testing.assert_allclose(y, expected[:, :PROMPT], rtol=1e-5, atol=1e-5)

  everything = {**values, **state}
  tokens = _cut(PROMPT, PROMPT + 1)
  sent = _sent(step.lower(everything, *tokens).compile().as_text())
  # Maxima, sums and weighted values are added up; no key is sent, nor gathered.
  assert {operation for operation, _ in sent} == {"all-reduce"}
  assert max(size for _, size in sent) <= BATCH * 4 * 4
  y, after = step(everything, *tokens)
  np.testing.assert_allclose(
    y, expected[:, PROMPT : PROMPT + 1], rtol=1e-5, atol=1e-5
  )
  for name in ("key", "value", "positions", "segment_ids"):
    old, new = _shards(state, name), _shards(after, name)
    # 61 slots become 64; the ninth token is the first device's, of 16 slots.
    assert [len(x) for x in new] == [16] * 4
    changed = [bool((a != b).any()) for a, b in zip(old, new, strict=True)]
    assert changed == [True, False, False, False]


@pytest.mark.parametrize("length", [1, 4])
def test_new_tokens_go_to_the_devices_of_their_slots(length):
  cache = sequence_cache.SequenceCache()
  spec = mesh.MeshSpec.parse("data=2,sequence=4")
  laid = layout.Layout(mesh.make_mesh(spec))

  def tokens(length, seed):
    shape = (2, length, 1, 2)
    key, value = (testing.normal(*shape, seed=seed + i) for i in (0, 1))
    return (
      key,
      value,
      testing.make_positions(2, length),
      testing.ones(2, length),
    )

  # Compiled as one, so that XLA sees what the slots were made of.
  @laid.jit
  def run(first, second):
    _, state = cache.apply({}, *first, cache_length=16, mutable=["cache"])
    seen, _ = cache.apply(state, *second, mutable=["cache"])
    return seen

  first, second = tokens(4, 0), tokens(length, 5)
  seen = run(first, second)
  for i, got in enumerate((seen.key, seen.value, seen.positions)):
    expected = np.concatenate([first[i], second[i]], axis=1)
    got = np.asarray(got)
    np.testing.assert_array_equal(got[:, : 4 + length], expected)
    assert not np.any(got[:, 4 + length :])
  assert seen.segment_ids.sum(axis=1).tolist() == [4 + length] * 2


def test_outside_of_a_layout_it_is_a_contiguous_cache():
  cache = sequence_cache.SequenceCache()
  shape = (BATCH, 2, 2, 3)
  tokens = (
    testing.normal(*shape),
    testing.normal(*shape, seed=2),
    testing.make_positions(BATCH, 2),
    testing.ones(BATCH, 2),
  )

  def run(v, **kwargs):
    return testing.apply(cache, v, *tokens, mutable=["cache"], **kwargs)

  _, state = run({}, cache_length=5)
  seen, state = run(state)
  np.testing.assert_array_equal(seen.key[:, 2:4], tokens[0])
  seen, state = run(state)
  # The sixth token has no slot.
  assert np.isnan(seen.key).any(axis=(1, 2, 3)).all()
  with pytest.raises(ValueError, match=r"a cache exists already"):
    run(state, cache_length=5)
  with pytest.raises(ValueError, match=r"cache_length \(1\) must be at least"):
    run({}, cache_length=1)
  small = {
    "cache": jax.tree.map(
      lambda x: x[:, :1] if x.ndim else x, variables.unbox(state)["cache"]
    )
  }
  with pytest.raises(ValueError, match=r"2 tokens do not fit in the 1 slots"):
    run(small)


def test_logical_axes():
  shape = (BATCH, 2, 2, 3)
  x = jnp.ones(shape)
  found = testing.axes(
    sequence_cache.SequenceCache(),
    x,
    None,
    testing.make_positions(BATCH, 2),
    testing.ones(BATCH, 2),
    cache_length=3,
  )
  assert found == {
    "cache/key": ("batch", "kv_heads", "length", "head_dim"),
    "cache/positions": ("batch", "length"),
    "cache/segment_ids": ("batch", "length"),
    "cache/index": (),
  }


def test_rejects_an_index_for_each_sequence():
  place = sequence_cache.SequenceCache.place
  with pytest.raises(ValueError, match=r"one index .*got one of shape \(2,\)"):
    place(SEGMENTS, jnp.zeros((BATCH,), jnp.int32), SLOTS)
