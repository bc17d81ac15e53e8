"""Conversion of host batches to global arrays."""

from collections.abc import Callable, Mapping

import jax
import numpy as np

from paxon.sharding import axes
from paxon.sharding import layout as layouts


def infeed_hosts(layout: layouts.Layout) -> tuple[int, int]:
  """Returns the chunk of a batch that this host reads: (index, number).

  A batch is split into `number` equal chunks of consecutive sequences. Hosts
  that hold the same sequences, such as those of one tensor axis, read the same
  chunk. If the devices of any host need sequences that are not one chunk, every
  host reads the whole batch.
  """
  shards = layout.shards(axes.BATCH)
  places: dict[int, set[int]] = {}
  sharding = layout.sharding((axes.BATCH,))
  for device, (rows,) in sharding.devices_indices_map((shards,)).items():
    found = places.setdefault(device.process_index, set())
    found.update(range(*rows.indices(shards)))
  here = jax.process_index()
  size = len(places.get(here, ()))
  for found in places.values():
    first = min(found)
    is_part = found == set(range(first, first + size)) and first % size == 0
    if not is_part:
      return 0, 1
  return (min(places[here]) // size, shards // size) if size else (0, 1)


def to_global(
  batch: Mapping[str, np.ndarray],
  layout: layouts.Layout,
  *,
  num_hosts: int = 1,
) -> dict[str, jax.Array]:
  """Returns global arrays made of the sequences of each host.

  Arrays [host batch, length, ...] become [global batch, length, ...], sharded
  by the layout's rules for `batch` and `length`. `num_hosts` is the number of
  chunks of a batch, see `infeed_hosts`.

  Raises:
    ValueError: The global batch size is not a multiple of its shards.
  """
  shards = layout.shards(axes.BATCH)
  for name, value in batch.items():
    batch_size = value.shape[0] * num_hosts
    if batch_size % shards:
      raise ValueError(
        f"global_batch_size ({batch_size}) must be a multiple of {shards}, the "
        f"number of shards of the batch axis on this mesh, in {name!r}."
      )
  return {
    name: jax.make_array_from_process_local_data(
      layout.batch_sharding(value.ndim),
      value,
      # Explicit, because hosts may hold more than their devices need.
      (value.shape[0] * num_hosts, *value.shape[1:]),
    )
    for name, value in batch.items()
  }


def split_batch(
  batch: Mapping[str, np.ndarray], layout: layouts.Layout
) -> dict[str, jax.Array]:
  """Returns global arrays of a batch that each process has whole.

  Arrays [batch, length, ...] are sharded as those of `to_global`. Processes do
  not compare what they have.
  """
  return {
    name: jax.make_array_from_callback(
      value.shape, layout.batch_sharding(value.ndim), value.__getitem__
    )
    for name, value in batch.items()
  }


def on_each_device(
  layout: layouts.Layout,
) -> Callable[[np.ndarray | np.generic], jax.Array]:
  """Returns a function that gathers one array per process into an array.

  The function takes this process's array, [...], and returns [devices, ...]
  with the array of each device's process. The sharding is computed only once.
  """
  mesh = layout.mesh
  spec = jax.sharding.PartitionSpec(mesh.axis_names)
  here = sum(d.process_index == jax.process_index() for d in mesh.devices.flat)
  sharding = jax.sharding.NamedSharding(mesh, spec)
  return lambda value: jax.make_array_from_process_local_data(
    sharding,
    np.broadcast_to(value, (here, *value.shape)),
    (mesh.size, *value.shape),
  )
