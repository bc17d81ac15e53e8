"""Arrays that are read while a checkpoint is written, one at a time.

A tree of them can be larger than the memory of this machine. The files are the
same as those of numpy arrays.
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
  """An array that is not in memory yet.

  Attributes:
    shape: Its shape.
    dtype: Its dtype.
    read: Returns the array; called once.
  """

  shape: tuple[int, ...]
  dtype: Any
  read: Callable[[], np.ndarray]

  @property
  def nbytes(self) -> int:
    """Its size in bytes."""
    return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize


class _Handler(ocp.type_handlers.NumpyHandler):
  """Writes each lazy array before it reads the next one."""

  async def serialize(
    self,
    values: Sequence[Any],
    infos: Sequence[Any],
    args: Sequence[Any] | None = None,
  ) -> Sequence[Any]:
    """Returns when all arrays are written."""
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
      # Frees it before the next one is read.
      del array
    return []


def make_handler() -> ocp.PyTreeCheckpointHandler:
  """Returns a handler of trees whose leaves are all `LazyArray`."""
  return ocp.PyTreeCheckpointHandler(
    type_handler_registry=ocp.type_handlers.create_type_handler_registry(
      (LazyArray, _Handler(deepcopy_host_arrays=False))
    )
  )
