"""Host batches to global arrays."""

from collections.abc import Callable, Mapping

import jax
import numpy as np

from paxon.sharding import axes
from paxon.sharding import layout as layouts


def infeed_hosts(layout: layouts.Layout) -> tuple[int, int]:
  """Returns which rows of a batch this host reads: (index, number of parts).

  A batch is cut into as many equal parts as there are, and the part `index` is
  what this host's devices need. Hosts among which the batch is not split, such
  as those of one tensor axis, read the same part. Where a host's devices need
  rows of several places, every host reads the whole batch.

  Args:
    layout: Its mesh and its rule for `batch`.
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
  """Places one host's rows of a batch.

  Args:
    batch: This host's rows, arrays [host batch, length, ...]. With one host
      these are all rows.
    layout: Where they go.
    num_hosts: In how many parts hosts read a batch, see `infeed_hosts`.

  Returns:
    Global arrays [global batch, length, ...], sharded as the layout's rules
    say for `batch` and `length`.

  Raises:
    ValueError: The global batch does not divide by its shards.
  """
  shards = layout.shards(axes.BATCH)
  for name, value in batch.items():
    rows = value.shape[0] * num_hosts
    if rows % shards:
      raise ValueError(
        f"global_batch_size ({rows}) must be a multiple of {shards}, the "
        f"number of shards of the batch axis on this mesh, in {name!r}."
      )
  return {
    name: jax.make_array_from_process_local_data(
      layout.batch_sharding(value.ndim),
      value,
      # Said, because hosts may hold more than their devices need.
      (value.shape[0] * num_hosts, *value.shape[1:]),
    )
    for name, value in batch.items()
  }


def on_each_device(layout: layouts.Layout) -> Callable[[int], jax.Array]:
  """Returns what makes an array of each process's own number.

  It takes this process's number, int32, and returns int32 [devices]. What only
  depends on the layout is computed here, once, and not at each call.

  Args:
    layout: Whose devices hold one element each.
  """
  mesh = layout.mesh
  spec = jax.sharding.PartitionSpec(mesh.axis_names)
  here = sum(d.process_index == jax.process_index() for d in mesh.devices.flat)
  sharding, shape = jax.sharding.NamedSharding(mesh, spec), (mesh.size,)
  return lambda number: jax.make_array_from_process_local_data(
    sharding, np.full(here, number, np.int32), shape
  )
