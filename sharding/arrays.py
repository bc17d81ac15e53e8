"""Host batches to global arrays."""

from collections.abc import Mapping

import jax
import numpy as np

from paxon.sharding import axes
from paxon.sharding import layout as layouts


def to_global(
  batch: Mapping[str, np.ndarray], layout: layouts.Layout
) -> dict[str, jax.Array]:
  """Places one host's rows of a batch.

  Args:
    batch: This host's rows, arrays [host batch, length, ...]. With one host
      these are all rows.
    layout: Where they go.

  Returns:
    Global arrays [global batch, length, ...], sharded as the layout's rules
    say for `batch` and `length`.

  Raises:
    ValueError: The global batch does not divide by its shards.
  """
  shards = layout.shards(axes.BATCH)
  for name, value in batch.items():
    rows = value.shape[0] * jax.process_count()
    if rows % shards:
      raise ValueError(
        f"global_batch_size ({rows}) must be a multiple of {shards}, the "
        f"number of shards of the batch axis on this mesh, in {name!r}."
      )
  return {
    name: jax.make_array_from_process_local_data(
      layout.batch_sharding(value.ndim), value
    )
    for name, value in batch.items()
  }
