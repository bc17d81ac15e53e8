"""Arrays that are read while a checkpoint is written, one at a time.

A tree of them can be larger than the memory of this machine, and so can an
array that is read in blocks. Checkpoints are read like those of numpy arrays.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
import dataclasses
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

Region = tuple[slice, ...]
# Larger blocks are written before the next one is read.
_READ_AHEAD = 1 << 26


@dataclasses.dataclass(frozen=True, kw_only=True)
class Blocks:
  """An array that is read in blocks, of which at most two are in memory.

  Attributes:
    shape: Its shape.
    dtype: Its dtype.
    chunks: The shape of the chunks in which it is stored. A block that does
      not consist of whole chunks is correct, but slow to write.
    read: Yields the region and the values of each block; every value once.
  """

  shape: tuple[int, ...]
  dtype: Any
  chunks: tuple[int, ...]
  read: Callable[[], Iterator[tuple[Region, np.ndarray]]]

  @property
  def size(self) -> int:
    """The number of its values."""
    return math.prod(self.shape)

  def to_numpy(self) -> np.ndarray:
    """Returns the whole array."""
    result = np.empty(self.shape, self.dtype)
    for region, block in self.read():
      result[region] = block
    return result


@dataclasses.dataclass(frozen=True, kw_only=True)
class LazyArray:
  """An array that is not in memory yet.

  Attributes:
    shape: Its shape.
    dtype: Its dtype.
    read: Returns the array, or its blocks; called once.
  """

  shape: tuple[int, ...]
  dtype: Any
  read: Callable[[], np.ndarray | Blocks]

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
      # Orbax passes it on to `_open_and_write`.
      array: Any = value.read()
      if not isinstance(array, Blocks):
        array = np.asarray(array)
      if array.shape != value.shape or array.dtype != value.dtype:
        raise ValueError(
          f"A lazy array of shape {value.shape} and dtype {value.dtype} was"
          f" read as {array.shape} and {array.dtype}."
        )
      writing: Any = super().serialize
      for future in await writing([array], [info], [arg]):
        future.result()
      # Frees it before the next one is read.
      del array
    return []

  async def _open_and_write(
    self, value: Any, tspec: dict[str, Any], ts_context: ts.Context
  ) -> None:
    """Writes an array with orbax's specification of its file."""
    if not isinstance(value, Blocks):
      await super()._open_and_write(value, tspec, ts_context)
      return
    tspec["metadata"]["chunks"] = list(value.chunks)
    # Weights shrink by a few percent, and writing takes twice the time.
    tspec["metadata"]["compressor"] = None
    store = await ts.open(ts.Spec(tspec), create=True, context=ts_context)
    blocks, written = value.read(), 0
    loop = asyncio.get_running_loop()
    with futures.ThreadPoolExecutor(1) as pool:
      pending = None
      while True:
        found = await (
          pending or loop.run_in_executor(pool, next, blocks, None)
        )
        pending = None
        if found is None:
          break
        region, block = found
        if block.nbytes <= _READ_AHEAD:
          # While this one is compressed and written.
          pending = loop.run_in_executor(pool, next, blocks, None)
        await store[region].write(
          block, can_reference_source_data_indefinitely=True
        )
        written += block.size
        del found, block
    if written != value.size:
      raise ValueError(
        f"The blocks of a lazy array of shape {value.shape} have {written}"
        " values."
      )


def make_handler() -> ocp.PyTreeCheckpointHandler:
  """Returns a handler of trees whose leaves are all `LazyArray`."""
  return ocp.PyTreeCheckpointHandler(
    type_handler_registry=ocp.type_handlers.create_type_handler_registry(
      (LazyArray, _Handler(deepcopy_host_arrays=False))
    )
  )
