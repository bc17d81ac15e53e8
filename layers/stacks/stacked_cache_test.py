"""Tests of caches that a stack carries from layer to layer."""

import dataclasses

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import remat, testing
from paxon.layers.attention import grouped_query, sequence_cache, sliding_cache
from paxon.layers.attention import mask as attention_mask
from paxon.layers.stacks import shared, stack

EMBED, SLOTS = 8, 4096


class Counter(nn.Module):
  """A user's part that knows nothing of stacks: adds up what it has seen."""

  makes_more: bool = False

  @nn.compact
  def __call__(self, x):
    total = self.variable("cache", "total", jnp.zeros_like, x)
    constant = self.variable("cache", "constant", jnp.ones_like, x)
    if self.makes_more and not self.is_initializing():
      self.variable("cache", "late", jnp.zeros_like, x)
    total.value += x
    return x + constant.value * total.value


class Doubled(nn.Module):
  """A user's block that gives its attention positions of its own."""

  attention: nn.Module

  def __call__(self, x, context):
    context = dataclasses.replace(context, positions=context.positions * 2)
    return x + self.attention(x, context)


class Plain(nn.Module):
  """A block that hands on what it is given."""

  attention: nn.Module

  def __call__(self, x, context):
    return x + self.attention(x, context)


def _stacked_attention(**fields):
  attention = grouped_query.GroupedQueryAttention(2, num_kv_heads=1, head_dim=4)
  return stack.Stack((attention,), num_layers=3, **fields)


def _token(at):
  x = testing.normal(1, 1, EMBED, seed=at)
  return x, jnp.full((1, 1), at, jnp.int32), testing.ones(1, 1)


def _prefilled(layers):
  values = testing.random_values(layers, *testing.in_context(*_token(0)))
  _, cache = testing.apply(
    layers,
    values,
    *testing.in_context(*_token(0), cache_length=SLOTS),
    mutable=["cache"],
  )
  return values, cache


def test_a_step_changes_no_more_memory_than_its_token():
  """Stacked by the scan, every layer's cache would be copied."""
  layers = _stacked_attention()
  values, cache = _prefilled(layers)

  def step(cache, *token):
    return layers.apply(
      {**values, **cache}, *testing.in_context(*token), mutable=["cache"]
    )

  compiled = jax.jit(step, donate_argnums=0).lower(cache, *_token(1)).compile()
  memory = compiled.memory_analysis()
  whole = sum(x.nbytes for x in jax.tree.leaves(cache))
  assert memory.alias_size_in_bytes > 0.99 * whole
  # One layer's keys and values, twice, and some more of a token.
  assert memory.temp_size_in_bytes < whole


@pytest.mark.parametrize(
  "fields",
  [
    pytest.param({"scan": False}, id="unrolled"),
    pytest.param({"remat_policy": remat.save_nothing}, id="remat"),
  ],
)
def test_all_forms_of_a_stack_decode_alike(fields):
  outcomes = []
  for layers in (_stacked_attention(), _stacked_attention(**fields)):
    values, cache = _prefilled(layers)
    x, cache = testing.apply(
      layers,
      {**values, **cache},
      *testing.in_context(*_token(1)),
      mutable=["cache"],
    )
    assert jax.tree.leaves(cache["cache"])[0].shape[0] == 3
    outcomes.append((x, cache))
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
    *outcomes,
  )


def test_stacks_of_stacks_decode_as_one_stack():
  inner = _stacked_attention()
  nested = stack.Stack((inner,), num_layers=2)
  values, cache = _prefilled(nested)
  assert cache["cache"]["layers"]["blocks_0"]["layers"]["blocks_0"]["cache"][
    "index"
  ].value.shape == (2, 3)
  first, second = (_token(at) for at in (0, 1))
  steps = jnp.concatenate([first[0], second[0]], axis=1)
  expected = testing.apply(
    nested,
    values,
    *testing.in_context(
      steps, testing.make_positions(1, 2), testing.ones(1, 2)
    ),
  )
  x, after = testing.apply(
    nested, {**values, **cache}, *testing.in_context(*second), mutable=["cache"]
  )
  np.testing.assert_allclose(x, expected[:, 1:], rtol=1e-5, atol=1e-6)
  assert jax.tree.structure(after) == jax.tree.structure(cache)


def _layers_of(block, num_layers):
  """Two blocks in turn: a ring, and shared parameters with another cache."""
  attention = grouped_query.GroupedQueryAttention
  sizes = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 4}
  sees_two = {
    "mask": attention_mask.MaskRules(window=2),
    "cache": sliding_cache.SlidingCache(2),
  }
  all_seen = attention(**sizes, cache=sequence_cache.SequenceCache())
  return stack.Stack(
    (
      block(attention(**sizes, **sees_two)),
      block(shared.shared("s", all_seen)),
    ),
    num_layers=num_layers,
  )


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize(
  ("block", "scale"), [(Plain, 1), (Doubled, 2)], ids=["stack's", "own"]
)
def test_every_layer_knows_where_tokens_stand(block, scale):
  """Whether the stack keeps it for all layers, or each layer for itself."""
  layers = _layers_of(block, num_layers=5)
  args = (
    testing.normal(2, 6, EMBED),
    testing.make_positions(2, 6),
    testing.ones(2, 6),
  )
  values = testing.random_values(layers, *testing.in_context(*args))
  expected = testing.apply(layers, values, *testing.in_context(*args))
  step = jax.jit(
    lambda v, *a: layers.apply(v, *testing.in_context(*a), mutable=["cache"])
  )
  y, cache = testing.apply(
    layers,
    values,
    *testing.in_context(*(np.asarray(a)[:, :2] for a in args), cache_length=6),
    mutable=["cache"],
  )
  outputs, at = [y], 2
  for size in (1, 2, 1):
    tokens = (np.asarray(a)[:, at : at + size] for a in args)
    y, cache = step({**values, **cache}, *tokens)
    outputs.append(y)
    at += size
  np.testing.assert_allclose(
    np.concatenate(outputs, axis=1), expected, rtol=1e-5, atol=1e-5
  )
  stacked = nn.unbox(cache)["cache"]["layers"]
  split = stacked["blocks_1"]["attention"]["part"]["cache"]
  ring = stacked["blocks_0"]["attention"]["cache"]
  for kept, last, index in (
    (split, [0, 1, 2, 3, 4, 5], 6),
    (ring, [4, 5], [6, 6]),
  ):
    wanted = np.broadcast_to(np.multiply(last, scale), (2, 2, len(last)))
    np.testing.assert_array_equal(kept["positions"], wanted)
    np.testing.assert_array_equal(kept["segment_ids"], np.ones_like(wanted))
    np.testing.assert_array_equal(
      kept["index"], np.broadcast_to(index, (2, *np.shape(index)))
    )


def test_the_boxes_of_a_cache_stay():
  layers = _stacked_attention()
  values, cache = _prefilled(layers)
  _, after = layers.apply(
    {**values, **cache}, *testing.in_context(*_token(1)), mutable=["cache"]
  )
  assert jax.tree.structure(after) == jax.tree.structure(cache)


@pytest.mark.parametrize("scan", [True, False])
def test_parts_that_know_nothing_of_stacks_get_their_layers_slices(scan):
  layers = stack.Stack((Counter(),), num_layers=3, scan=scan)
  x = testing.normal(1, 2)
  _, state = layers.init_with_output(jax.random.key(0), x)
  expected = [np.asarray(part) for part in _counted(x, 3)]
  for _ in range(2):
    y, state = layers.apply(state, x, mutable=["cache"])
  np.testing.assert_allclose(y, expected[-1], rtol=1e-6)
  assert state["cache"]["layers"]["blocks_0"]["total"].shape == (3, 1, 2)


def _counted(x, steps):
  """What three layers give in each of some steps."""
  totals = np.zeros((3, *x.shape))
  for _ in range(steps):
    y = np.asarray(x, np.float64)
    for layer in range(3):
      totals[layer] += y
      y = y + totals[layer]
    yield y


def test_a_variable_made_too_late_is_an_error():
  layers = stack.Stack((Counter(makes_more=True),), num_layers=2)
  state = layers.init(jax.random.key(0), jnp.ones((1, 2)))
  with pytest.raises(
    ValueError, match=r"created the variable cache/late in a decoding step"
  ):
    layers.apply(state, jnp.ones((1, 2)), mutable=["cache"])
