"""Tests for writing tokens into slots."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import testing
from paxon.layers.attention import cache_variables

BATCH, HEADS, SLOTS = 2, 3, 4

# What there is once, and what there is of each head: a number and a row.
SHAPES = {"once": (), "numbers": (HEADS,), "rows": (HEADS, 5)}
every_shape = pytest.mark.parametrize("name", SHAPES)
# Arrays of one layer are written without the axis of layers.
one_or_more_layers = pytest.mark.parametrize("num_layers", [1, 2])


def _arrays(name, num_layers, length):
  """Returns slots of all layers and new tokens."""
  heads, features = SHAPES[name][:1], SHAPES[name][1:]
  whole = testing.normal(num_layers, BATCH, *heads, SLOTS, *features)
  return whole, testing.normal(BATCH, *heads, length, *features, seed=5)


def _check(got, whole, new, layer, slots):
  """Compares with the definition: one token at a time, if it has a slot."""
  expected = np.array(whole)
  axis = 1 if whole.ndim == 3 else 2
  for b, t in np.ndindex(*slots.shape):
    if 0 <= slots[b, t] < SLOTS:
      row = np.moveaxis(expected[layer, b], axis - 1, 0)
      row[slots[b, t]] = np.moveaxis(np.asarray(new)[b], axis - 1, 0)[t]
  np.testing.assert_array_equal(got, expected)


@every_shape
@one_or_more_layers
@pytest.mark.parametrize(
  "slots", [[[1], [3]], [[4], [0]], [[-1], [2]], [[1, 3, 4], [4, 4, 0]]]
)
def test_each_token_goes_to_its_slot_or_nowhere(slots, num_layers, name):
  slots = np.asarray(slots, np.int32)
  whole, new = _arrays(name, num_layers, slots.shape[1])
  layer = num_layers - 1
  write = jax.jit(cache_variables.write_slots)
  _check(write(whole, new, jnp.int32(layer), slots), whole, new, layer, slots)


@every_shape
@one_or_more_layers
def test_one_slot_of_all_rows(num_layers, name):
  whole, new = _arrays(name, num_layers, 1)
  write = jax.jit(cache_variables.write_one)
  for slot in (0, 3, 4, -2):
    got = write(whole, new, jnp.int32(0), jnp.int32(slot))
    _check(got, whole, new, 0, np.full((BATCH, 1), slot))


@every_shape
@one_or_more_layers
def test_several_slots_of_all_rows(num_layers, name):
  whole, new = _arrays(name, num_layers, 2)
  layer = num_layers - 1
  got = cache_variables.write_from(whole, new, jnp.int32(layer), jnp.int32(2))
  _check(got, whole, new, layer, np.asarray([[2, 3]] * BATCH))


@pytest.mark.parametrize("features", [(), (5,)])
@pytest.mark.parametrize("first", [0, 2, 3, 4, 9])
def test_one_head_goes_to_the_first_slot_in_which_it_fits(first, features):
  whole = testing.normal(1, BATCH, 1, SLOTS, *features)
  new = testing.normal(BATCH, 1, 1, *features, seed=5)
  write = jax.jit(cache_variables.write_one_head)
  slots = np.full((BATCH, 1), min(first, SLOTS - 1))
  _check(
    write(whole, new, jnp.int32(0), jnp.int32(first)), whole, new, 0, slots
  )


@every_shape
def test_empty_slots(name):
  whole, new = _arrays(name, 2, 2)
  found = cache_variables.empty(new, SLOTS)
  assert (found.shape, found.dtype) == (whole.shape[1:], whole.dtype)
  assert not np.any(found)


def test_nothing_but_the_token_is_written():
  """The rest of the stack is neither copied nor gone over."""
  whole = jax.ShapeDtypeStruct((4, 2, 2, 512, 64), jnp.float32)
  new = jax.ShapeDtypeStruct((2, 2, 1, 64), jnp.float32)
  number = jax.ShapeDtypeStruct((), jnp.int32)
  slots = jax.ShapeDtypeStruct((2, 1), jnp.int32)
  for write, where in (
    (cache_variables.write_one, number),
    (cache_variables.write_slots, slots),
  ):
    jitted = jax.jit(write, donate_argnums=0)
    compiled = jitted.lower(whole, new, number, where).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= 4 * 2 * 2 * 512 * 64 * 4
    assert memory.temp_size_in_bytes < 512 * 64 * 4
