"""Blocks of a variable: regions of the arrays of a checkpoint, converted.

A region consists of whole chunks of an array and has about `_REGION` bytes, or
those of one chunk. Axis patterns move it to a region of the variable, whose
chunks are chosen so that no two regions share one. So neither arrays nor
variables are ever in memory as a whole, and every chunk is read and written
once.
"""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import functools
import itertools
import math

import numpy as np

from paxon.runner import user_error
from paxon.runner.checkpoints import lazy_array
from paxon.tools.pax_checkpoints import axis_pattern, pax_files

# Bytes that are read at a time, if chunks are smaller, and of written chunks.
_REGION = 1 << 24
# Bytes that are rewritten at a time.
_TILE = 1 << 19
# An axis that no pattern can name.
_LAYERS = "#"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conversion:
  """The way from arrays to a variable.

  Attributes:
    pattern: The rearrangement of a layer's axes.
    sizes: The size of each axis of the pattern.
    entry: Index of the entry of a layer's first axis that is read; None for
      arrays without such an axis.
    num_layers: The size of the variable's leading axis; None without one.
    mean_axis: Index among a layer's axes of one of size 1, which arrays lack.
    is_padding_zero: Whether values beyond the sizes must be zero, if the
      checkpoint does not tell that they are padding.
    dtype: Dtype of the variable.
    factor: Factor on all values.
    shift: Added to all values.
  """

  pattern: axis_pattern.AxisPattern
  sizes: Mapping[str, int]
  entry: int | None
  num_layers: int | None
  mean_axis: int | None
  is_padding_zero: bool
  dtype: np.dtype
  factor: float
  shift: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
  """An array, and the layers of the variable that it has.

  Attributes:
    array: The array.
    layers: From the flat index of its leading axes to the layer.
    index: Index along the axis that stacks several arrays.
  """

  array: pax_files.PaxArray
  layers: Mapping[int, int]
  index: int


def make(
  parts: Sequence[Part], conversion: Conversion, *, shape: tuple[int, ...]
) -> lazy_array.Blocks:
  """Returns a variable of a shape in blocks.

  Raises:
    user_error.UserError: An array cannot be read, or has too few values. While
      blocks are read, also if its padding is not zero.
  """
  readers = [_Reader(part, conversion) for part in parts]
  return lazy_array.Blocks(
    shape=shape,
    dtype=conversion.dtype,
    chunks=readers[0].find_chunks(shape),
    read=functools.partial(_read_all, readers),
  )


def _read_all(
  readers: Sequence["_Reader"],
) -> Iterator[tuple[lazy_array.Region, np.ndarray]]:
  for reader in readers:
    yield from reader.read()


class _Reader:
  """Reads and converts one array."""

  def __init__(self, part: Part, conversion: Conversion) -> None:
    self._part, self._conversion = part, conversion
    self._pattern = conversion.pattern
    self._groups = [
      [conversion.sizes[name] for name in group]
      for group in self._pattern.inputs
    ]
    self._wanted = self._pattern.input_shape(conversion.sizes)
    self._inner = len(part.array.shape) - len(self._wanted)
    self._depth = self._inner - (conversion.entry is not None)
    array = part.array
    if self._depth < 0:
      raise user_error.UserError(
        f"{array.name} has shape {array.shape}, expected"
        f" {len(self._wanted) - self._depth} axes or more."
      )
    sizes = array.shape[self._inner :]
    if any(a < b for a, b in zip(sizes, self._wanted, strict=True)):
      raise user_error.UserError(
        f"{array.name} has shape {array.shape}, expected at least"
        f" {self._wanted}."
      )
    self._steps = self._find_steps()

  def _find_steps(self) -> list[int]:
    """Returns the shape of regions."""
    array = self._part.array
    steps = list(map(min, array.find_chunks(), array.shape))
    size = math.prod(steps) * array.dtype.itemsize
    for axis in reversed(range(len(steps))):
      if not self._fits(axis, steps[axis]):
        size = size // steps[axis] * array.shape[axis]
        steps[axis] = array.shape[axis]
      while (
        steps[axis] < array.shape[axis]
        and 2 * size <= _REGION
        and self._fits(axis, 2 * steps[axis])
      ):
        steps[axis], size = 2 * steps[axis], 2 * size
    return steps

  def _fits(self, axis: int, step: int) -> bool:
    """Whether the regions of a step are regions of the variable."""
    if axis < self._inner:
      return True
    sizes = self._groups[axis - self._inner]
    return axis_pattern.split_step(step, sizes) is not None

  @property
  def _has_layers_in_order(self) -> bool:
    layers = self._part.layers
    count = self._conversion.num_layers
    in_order = dict(enumerate(range(count or 0)))
    return self._depth == 1 and layers == in_order

  def find_chunks(self, shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the shape of the chunks of the variable."""
    steps = {}
    for group, sizes, step in zip(
      self._pattern.inputs,
      self._groups,
      self._steps[self._inner :],
      strict=True,
    ):
      found = axis_pattern.split_step(step, sizes)
      assert found is not None
      steps |= dict(zip(group, found, strict=True))
    # An axis that the arrays lack stacks several of them.
    chunks = [steps.get(name, 1) for (name,) in self._pattern.outputs]
    at = self._conversion.mean_axis
    if at is not None:
      chunks.insert(at, 1)
    if self._conversion.num_layers is not None:
      chunks.insert(0, self._steps[0] if self._has_layers_in_order else 1)
    chunks = list(map(min, chunks, shape))
    size = math.prod(chunks) * self._conversion.dtype.itemsize
    for axis, step in enumerate(chunks):
      if size > _REGION:
        # Divisors, so that regions consist of whole chunks.
        whole = step == shape[axis]
        count = min(step, -(-size // _REGION))
        chunk = -(-step // count)
        while not whole and step % chunk:
          chunk -= 1
        size = size // step * chunk
        chunks[axis] = chunk
    return tuple(chunks)

  def read(self) -> Iterator[tuple[lazy_array.Region, np.ndarray]]:
    """Yields the regions of the variable and their values."""
    array = self._part.array
    ends = list(array.shape)
    if array.unpadded is not None or not self._conversion.is_padding_zero:
      ends[self._inner :] = self._wanted
    ranges = [
      [slice(i, min(i + step, end)) for i in range(0, end, step)]
      for end, step in zip(ends, self._steps, strict=True)
    ]
    entry = self._conversion.entry
    if entry is not None:
      ranges[self._depth] = [slice(entry, entry + 1)]
    for region in itertools.product(*ranges):
      layers = [self._part.layers.get(i) for i in self._flatten(region)]
      if any(layer is not None for layer in layers):
        # No name here keeps the values while the next ones are read.
        yield from self._convert(
          array.read(region), layers, region[self._inner :]
        )

  def _flatten(self, region: lazy_array.Region) -> list[int]:
    """Returns the flat indices of the leading axes of a region."""
    sizes = self._part.array.shape[: self._depth]
    result = [0]
    for size, part in zip(sizes, region, strict=False):
      result = [i * size + j for i in result for j in range(size)[part]]
    return result

  def _convert(
    self,
    value: np.ndarray,
    layers: Sequence[int | None],
    region: lazy_array.Region,
  ) -> Iterator[tuple[lazy_array.Region, np.ndarray]]:
    """Yields the values of a region of an array, for each run of layers."""
    value = value.reshape(len(layers), *value.shape[self._inner :])
    kept = []
    for axis, (part, size) in enumerate(zip(region, self._wanted, strict=True)):
      inside = max(0, min(part.stop, size) - part.start)
      rest = value[(slice(None),) * (axis + 1) + (slice(inside, None),)]
      if np.any(rest != 0):
        array = self._part.array
        raise user_error.UserError(
          f"{array.name} has shape {array.shape[self._inner :]} in a layer and"
          f" the experiment {self._wanted}; what is beyond is not zero, so it"
          " is no padding."
        )
      if not inside:
        return
      value = value[(slice(None),) * (axis + 1) + (slice(inside),)]
      kept.append(slice(part.start, part.start + inside))
    where = self._pattern.locate(kept, self._conversion.sizes)
    if self._pattern.stacked is not None:
      where[self._pattern.stacked] = slice(
        self._part.index, self._part.index + 1
      )
    sizes = {name: part.stop - part.start for name, part in where.items()}
    target = [where[name] for (name,) in self._pattern.outputs]
    if self._conversion.mean_axis is not None:
      target.insert(self._conversion.mean_axis, slice(0, 1))
    pattern = self._pattern.add_axis(_LAYERS)
    for first, count in _find_runs(layers):
      layer = layers[first]
      assert layer is not None
      sizes[_LAYERS] = count
      block = pattern.apply([value[first : first + count]], sizes)
      if self._conversion.mean_axis is not None:
        block = np.expand_dims(block, self._conversion.mean_axis + 1)
      block = self._change(block)
      if self._conversion.num_layers is None:
        yield tuple(target), block[0]
      else:
        yield (slice(layer, layer + count), *target), block

  def _change(self, value: np.ndarray) -> np.ndarray:
    """Returns `value * factor + shift`."""
    factor, shift = self._conversion.factor, self._conversion.shift
    dtype = self._conversion.dtype
    is_same = factor == 1 and not shift and value.dtype == dtype
    if is_same and value.flags.c_contiguous:
      return value
    result = np.empty(value.shape, dtype)
    _write(result, value, factor, shift)
    return result


def _write(
  out: np.ndarray, value: np.ndarray, factor: float, shift: float
) -> None:
  """Writes `value * factor + shift` into `out`.

  In tiles that stay in the cache, because axes may be transposed, and because
  results are of float64.
  """
  if value.nbytes > _TILE:
    step = max(1, _TILE * len(value) // value.nbytes)
    for start in range(0, len(value), step):
      at = slice(start, start + step) if step > 1 else start
      _write(out[at], value[at], factor, shift)
  elif factor == 1 and not shift:
    out[...] = value
  else:
    out[...] = value.astype(np.float64) * factor + shift


def _find_runs(layers: Sequence[int | None]) -> Iterator[tuple[int, int]]:
  """Yields the start and the length of runs of consecutive layers."""
  start = 0
  for end in range(1, len(layers) + 1):
    last = layers[end - 1]
    if end < len(layers) and last is not None and layers[end] == last + 1:
      continue
    if last is not None:
      yield start, end - start
    start = end
