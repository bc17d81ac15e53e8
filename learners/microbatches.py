"""Microbatches: equal splits of a batch along its first dimension."""

from typing import TypeAlias

import jax
import jax.numpy as jnp

from paxon.learners import metrics
from paxon.sharding import axes, logical

Arrays: TypeAlias = dict[str, jax.Array]


def split(
  batch: metrics.Batch, *, num_microbatches: int
) -> tuple[Arrays, Arrays]:
  """Returns the stacked microbatches and the scalars that they share.

  Microbatch i of k has the sequences i, i + k, i + 2k ... Every device thus has
  sequences in all microbatches, and no sequence moves between devices; a
  microbatch of consecutive sequences would leave most devices idle. Arrays have
  the shape [num_microbatches, batch / num_microbatches, ...].

  Raises:
    ValueError: Arrays have different batch sizes, or `num_microbatches` or the
      mesh does not divide them.
  """
  shared = {name: x for name, x in batch.items() if not x.ndim}
  arrays = {name: x for name, x in batch.items() if x.ndim}
  first = next(iter(arrays), "")
  parts = {}
  for name, x in arrays.items():
    batch_size = x.shape[0]
    if batch_size != arrays[first].shape[0]:
      raise ValueError(
        f"batch[{name!r}] has {batch_size} sequences and batch[{first!r}] has"
        f" {arrays[first].shape[0]}; for microbatches all arrays must have the"
        " same number."
      )
    if batch_size % num_microbatches:
      raise ValueError(
        f"The {batch_size} sequences of batch[{name!r}] are not a multiple of"
        f" num_microbatches={num_microbatches}; change either."
      )
    stacked = jnp.moveaxis(
      x.reshape(batch_size // num_microbatches, num_microbatches, *x.shape[1:]),
      1,
      0,
    )
    names = (None, axes.BATCH, axes.LENGTH)[: stacked.ndim]
    names += (None,) * (stacked.ndim - len(names))
    try:
      parts[name] = logical.constrain(stacked, names)
    except ValueError as error:
      raise ValueError(
        f"num_microbatches={num_microbatches} leaves"
        f" {batch_size // num_microbatches} sequences of batch[{name!r}] per"
        f" microbatch, which the mesh cannot split: {error}"
      ) from error
  return parts, shared
