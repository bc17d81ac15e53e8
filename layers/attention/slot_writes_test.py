"""Tests for writing tokens into slots."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import testing
from paxon.layers.attention import slot_writes

LAYERS, BATCH, SLOTS = 2, 2, 4
WHOLE = testing.normal(LAYERS, BATCH, SLOTS, 3)


def _expected(new, layer, slots):
  """The definition: one token at a time, for those with a slot."""
  whole = np.array(WHOLE)
  for b, t in np.ndindex(*slots.shape):
    if 0 <= slots[b, t] < SLOTS:
      whole[layer, b, slots[b, t]] = new[b, t]
  return whole


@pytest.mark.parametrize(
  "slots", [[[1], [3]], [[4], [0]], [[-1], [2]], [[1, 3, 4], [4, 4, 0]]]
)
def test_each_token_goes_to_its_slot_or_nowhere(slots):
  slots = np.asarray(slots, np.int32)
  new = testing.normal(BATCH, slots.shape[1], 3, seed=5)
  got = jax.jit(slot_writes.to_slots)(WHOLE, new, jnp.int32(1), slots)
  np.testing.assert_array_equal(got, _expected(new, 1, slots))


def test_one_slot_of_all_rows():
  new = testing.normal(BATCH, 1, 3, seed=5)
  write = jax.jit(slot_writes.one_or_none)
  for slot in (0, 3, 4, -2):
    got = write(WHOLE, new, jnp.int32(0), jnp.int32(slot))
    slots = np.full((BATCH, 1), slot)
    np.testing.assert_array_equal(got, _expected(new, 0, slots))


def test_several_slots_of_all_rows():
  new = testing.normal(BATCH, 2, 3, seed=5)
  got = slot_writes.from_slot(WHOLE, new, jnp.int32(1), jnp.int32(2))
  slots = np.asarray([[2, 3]] * BATCH)
  np.testing.assert_array_equal(got, _expected(new, 1, slots))


def test_nothing_but_the_token_is_written():
  """The rest of the stack is neither copied nor gone over."""
  whole = jax.ShapeDtypeStruct((4, 2, 512, 64), jnp.float32)
  new = jax.ShapeDtypeStruct((2, 1, 64), jnp.float32)
  number = jax.ShapeDtypeStruct((), jnp.int32)
  slots = jax.ShapeDtypeStruct((2, 1), jnp.int32)
  for write, where in (
    (slot_writes.one_or_none, number),
    (slot_writes.to_slots, slots),
  ):
    jitted = jax.jit(write, donate_argnums=0)
    compiled = jitted.lower(whole, new, number, where).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= 4 * 2 * 512 * 64 * 4
    assert memory.temp_size_in_bytes < 512 * 64 * 4
