"""Tests for rows and slots of caches."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import testing
from paxon.layers.attention import sliding_cache
from paxon.layers.attention import testing as attention_testing
from paxon.layers.decoding import cache_rows
from paxon.layers.positions import rotary_embedding
from paxon.layers.stacks import stack
from paxon.sharding import axes, variables

BATCH, PROMPT, EMBED = 3, 4, 8
LENGTHS = testing.array([2, 4, 3], np.int32)


@functools.cache
def _prefilled():
  """A model with two kinds of cache, its step, and a full cache."""
  make = functools.partial(
    attention_testing.grouped_query_attention,
    2,
    num_kv_heads=2,
    head_dim=4,
    rotary=rotary_embedding.Rotary(),
  )
  local = make(window=2, cache=sliding_cache.SlidingCache(2))
  model = stack.Stack((local, make()), num_layers=2)
  x, positions = (
    testing.normal(BATCH, PROMPT, EMBED),
    testing.make_positions(3, 4),
  )
  segments = (positions < LENGTHS[:, None]).astype(jnp.int32)
  args = testing.in_context(x, positions, segments, cache_length=PROMPT + 1)
  values = testing.random_values(model, *testing.in_context(x))
  _, cache = testing.apply(model, values, *args, mutable=["cache"])

  @jax.jit
  def step(cache, x, positions):
    ones = jnp.ones(x.shape[:2], jnp.int32)
    return model.apply(
      {**values, **cache},
      *testing.in_context(x, positions, ones),
      mutable=["cache"],
    )

  return step, cache


def _next(rows):
  """The next token of each of some rows, and its position."""
  x = np.asarray(testing.normal(BATCH, 1, EMBED, seed=5))
  return x[rows], np.asarray(LENGTHS)[rows][:, None]


@pytest.mark.parametrize("rows", [[2, 0, 0], [1, 1, 2, 2, 0, 0]], ids=str)
def test_taken_rows_go_on_as_those_they_were(rows):
  step, cache = _prefilled()
  rows = testing.array(rows, np.int32)
  expected = np.asarray(step(cache, *_next(np.arange(BATCH)))[0])
  y, _ = step(jax.jit(cache_rows.take)(cache, rows), *_next(rows))
  np.testing.assert_allclose(y, expected[rows], rtol=1e-5, atol=1e-6)


def test_repeated_rows_are_neighbours():
  _, cache = _prefilled()
  repeated = cache_rows.repeat(cache, 2)
  taken = cache_rows.take(cache, testing.array([0, 0, 1, 1, 2, 2], np.int32))
  jax.tree.map(np.testing.assert_array_equal, repeated, taken)


def test_slots_can_be_added():
  step, cache = _prefilled()
  tokens = _next(np.arange(BATCH))

  def padded(x, axis):
    return jnp.pad(x, [(0, 3 if i == axis else 0) for i in range(x.ndim)])

  longer = cache_rows.map_axis(cache, axes.KV_LENGTH, padded)
  shapes = {x.shape for x in jax.tree.leaves(variables.unbox(longer))}
  # Of the ring there are two, as before.
  assert (1, BATCH, 2, 2, 4) in shapes
  assert (1, BATCH, 2, PROMPT + 1 + 3, 4) in shapes
  (first, cache), (same, longer) = step(cache, *tokens), step(longer, *tokens)
  np.testing.assert_allclose(first, same, rtol=1e-5, atol=1e-6)
  (full, _), (more, _) = step(cache, *tokens), step(longer, *tokens)
  assert np.isnan(full).all()
  assert np.isfinite(more).all()


def test_an_index_for_each_sequence_changes_no_output():
  """Stacked layers, whose positions and index the stack writes, and a ring."""
  step, cache = _prefilled()
  rows = cache_rows.with_row_index(cache)
  shapes = {x.shape for x in jax.tree.leaves(rows) if x.dtype == jnp.int32}
  assert (1, BATCH) in shapes
  jax.tree.map(
    np.testing.assert_array_equal,
    cache_rows.with_row_index(rows),
    rows,
  )
  tokens = _next(np.arange(BATCH))
  (expected, cache), (got, rows) = step(cache, *tokens), step(rows, *tokens)
  np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
  shared = cache_rows.with_row_index(cache)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
    rows,
    shared,
  )


def test_sequences_with_their_own_index_advance_alone():
  """One prompt of another length is put among the others."""
  step, cache = _prefilled()
  cache = cache_rows.with_row_index(cache)
  tokens = _next(np.arange(BATCH))
  expected, _ = step(cache, *tokens)
  one = cache_rows.take(cache, testing.array([1], np.int32))
  y, one = step(one, *(x[1:2] for x in tokens))
  np.testing.assert_allclose(y[0], expected[1], rtol=1e-5, atol=1e-6)
  put = jax.jit(cache_rows.put)
  mixed = put(cache, one, jnp.int32(0))
  y, mixed = step(mixed, *tokens)
  np.testing.assert_allclose(y[1:], expected[1:], rtol=1e-5, atol=1e-6)
  # The first sequence has no slot left; the others do.
  assert np.isnan(y[0]).all()
  # Put back, it is as it was.
  back = put(
    mixed, cache_rows.take(cache, testing.array([0], np.int32)), jnp.int32(0)
  )
  y, _ = step(back, *tokens)
  np.testing.assert_allclose(y[0], expected[0], rtol=1e-5, atol=1e-6)


def test_rejects_variables_without_axes():
  _, cache = _prefilled()
  with pytest.raises(ValueError, match=r"\['index'\].* does not name its axes"):
    cache_rows.take(variables.unbox(cache), testing.array([0], np.int32))
