"""Microbatches: splits a batch into equal parts."""

from typing import TypeAlias

import jax
import jax.numpy as jnp

from paxon.learners import metrics
from paxon.sharding import axes, logical

Arrays: TypeAlias = dict[str, jax.Array]


def split(
  batch: metrics.Batch, *, num_microbatches: int
) -> tuple[Arrays, Arrays]:
  """Returns the microbatches, stacked, and what they share.

  Microbatch i has the rows i, i + k, i + 2k ... of k microbatches. So each
  device's rows are spread over all microbatches, and no row changes its device;
  runs of neighbouring rows would leave most devices without work.

  Args:
    batch: Arrays whose first dimension is the batch, and scalars.
    num_microbatches: How many; divides the number of rows.

  Returns:
    Arrays of shape [num_microbatches, rows / num_microbatches, ...], and the
    scalars of the batch.

  Raises:
    ValueError: Rows differ between arrays, or do not divide.
  """
  shared = {name: x for name, x in batch.items() if not x.ndim}
  arrays = {name: x for name, x in batch.items() if x.ndim}
  first = next(iter(arrays), "")
  parts = {}
  for name, x in arrays.items():
    rows = x.shape[0]
    if rows != arrays[first].shape[0]:
      raise ValueError(
        f"batch[{name!r}] has {rows} sequences and batch[{first!r}] has"
        f" {arrays[first].shape[0]}; for microbatches all arrays must have the"
        " same number."
      )
    if rows % num_microbatches:
      raise ValueError(
        f"The {rows} sequences of batch[{name!r}] are not a multiple of"
        f" num_microbatches={num_microbatches}; change either."
      )
    stacked = jnp.moveaxis(
      x.reshape(rows // num_microbatches, num_microbatches, *x.shape[1:]), 1, 0
    )
    names = (None, axes.BATCH, axes.LENGTH)[: stacked.ndim]
    names += (None,) * (stacked.ndim - len(names))
    try:
      parts[name] = logical.constrain(stacked, names)
    except ValueError as error:
      raise ValueError(
        f"num_microbatches={num_microbatches} leaves"
        f" {rows // num_microbatches} sequences of batch[{name!r}] per"
        f" microbatch, which the mesh cannot split: {error}"
      ) from error
  return parts, shared
