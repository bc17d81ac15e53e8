"""Arrays that are read when a checkpoint writes them, one after the other.

A tree of them can be larger than the memory of this machine: one array at a
time is there. What lies on disk is what arrays of numpy would have given.
"""

from collections.abc import Callable, Sequence
import dataclasses
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp


@dataclasses.dataclass(frozen=True, kw_only=True)
class LazyArray:
  """An array that is not there yet.

  Attributes:
    shape: Its shape.
    dtype: Its dtype.
    read: Returns it; called once.
  """

  shape: tuple[int, ...]
  dtype: Any
  read: Callable[[], np.ndarray]

  @property
  def nbytes(self) -> int:
    """Its size in memory, in bytes."""
    return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize


class _Handler(ocp.type_handlers.NumpyHandler):
  """Writes lazy arrays, each before the next is read."""

  async def serialize(
    self,
    values: Sequence[Any],
    infos: Sequence[Any],
    args: Sequence[Any] | None = None,
  ) -> Sequence[Any]:
    """Returns when all are written."""
    args = args or [ocp.SaveArgs()] * len(values)
    for value, info, arg in zip(values, infos, args, strict=True):
      array = np.asarray(value.read())
      if array.shape != value.shape or array.dtype != value.dtype:
        raise ValueError(
          f"A lazy array of shape {value.shape} and dtype {value.dtype} was"
          f" read as {array.shape} and {array.dtype}."
        )
      for future in await super().serialize([array], [info], [arg]):
        future.result()
      # Before the next one is read.
      del array
    return []


def handler() -> ocp.PyTreeCheckpointHandler:
  """Returns what writes a tree whose leaves are all `LazyArray`."""
  return ocp.PyTreeCheckpointHandler(
    type_handler_registry=ocp.type_handlers.create_type_handler_registry(
      (LazyArray, _Handler(deepcopy_host_arrays=False))
    )
  )
