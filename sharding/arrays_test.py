"""Tests for which rows a host reads, and for placing them."""

import inspect
from typing import NamedTuple, cast

import jax
import numpy as np
import pytest

from paxon.sharding import arrays, layout, mesh


class _Rows:
  """A layout whose devices need these rows; (process, row) for each device."""

  def __init__(self, shards, needs):
    self._shards = shards
    self._needs = needs

  def shards(self, axis):
    return self._shards

  def sharding(self, axes):
    return self

  def devices_indices_map(self, shape):
    assert shape == (self._shards,)
    return {
      _Device(number, process): (slice(row, row + 1),)
      for number, (process, row) in enumerate(self._needs)
    }


class _Device(NamedTuple):
  number: int
  process_index: int


def _untyped(function):
  """The function without the shape checker, which wants a real layout."""
  return inspect.unwrap(function)


@pytest.mark.parametrize(
  ("shards", "needs", "here", "expected"),
  [
    # Two processes of two devices, each with a half.
    (4, [(0, 0), (0, 1), (1, 2), (1, 3)], 0, (0, 2)),
    (4, [(0, 0), (0, 1), (1, 2), (1, 3)], 1, (1, 2)),
    # Four processes, of which two share each half.
    (2, [(0, 0), (1, 0), (2, 1), (3, 1)], 3, (1, 2)),
    # All need all.
    (1, [(0, 0), (1, 0)], 1, (0, 1)),
    # The rows of a process lie apart; and in blocks of different sizes.
    (4, [(0, 0), (0, 2), (1, 1), (1, 3)], 1, (0, 1)),
    (3, [(0, 0), (1, 1), (1, 2)], 0, (0, 1)),
    # Aligned blocks in another order.
    (2, [(0, 1), (1, 0)], 0, (1, 2)),
    # No device of this process.
    (2, [(0, 0), (1, 1)], 2, (0, 1)),
  ],
)
def test_chunk_of_a_host(shards, needs, here, expected, monkeypatch):
  monkeypatch.setattr(jax, "process_index", lambda: here)
  found = cast(layout.Layout, _Rows(shards, needs))
  assert _untyped(arrays.infeed_hosts)(found) == expected


def test_one_host_reads_everything():
  made = layout.Layout(mesh.make_mesh(mesh.MeshSpec.parse("data=4,tensor=2")))
  assert arrays.infeed_hosts(made) == (0, 1)
  batch = {"inputs": np.arange(32, dtype=np.int32).reshape(8, 4)}
  placed = arrays.to_global(batch, made)["inputs"]
  np.testing.assert_array_equal(placed, batch["inputs"])
  assert placed.sharding.is_equivalent_to(made.batch_sharding(2), 2)


def test_numbers_are_placed_without_querying_devices(monkeypatch):
  made = layout.Layout(mesh.make_mesh(mesh.MeshSpec.parse("data=4,tensor=2")))
  place = arrays.on_each_device(made)
  # Thousands of devices are not counted at each step.
  monkeypatch.delattr(jax.sharding, "NamedSharding")
  monkeypatch.delattr(jax, "process_index")
  numbers = [place(np.int32(number)) for number in (7, 3)]
  assert [each.tolist() for each in numbers] == [[7] * 8, [3] * 8]
  assert numbers[0].sharding is numbers[1].sharding
  table = place(np.arange(6, dtype=np.float32).reshape(2, 3))
  assert table.tolist() == [[[0, 1, 2], [3, 4, 5]]] * 8


def test_rejects_indivisible_batch_sizes():
  made = layout.Layout(mesh.make_mesh(mesh.MeshSpec.parse("data=8")))
  with pytest.raises(ValueError, match=r"\(12\) must be a multiple of 8"):
    arrays.to_global({"inputs": np.zeros((6, 4))}, made, num_hosts=2)
