"""A quantized weight in files: its tensors, and reads of its values."""

from collections.abc import Callable, Mapping
import dataclasses
import math
import os
from typing import Any

from etils import epath
import numpy as np

from paxon.layers.models.hugging_face.files import (
  quantized_config,
  safetensors_file,
)

# File and entry of a tensor.
Stored = tuple[epath.Path, safetensors_file.Entry]
Shape = tuple[int, ...]

# Values in float32 while they are computed.
_CHUNK = 1 << 21


class QuantizedWeightsError(ValueError):
  """Tensors of a quantized weight are missing or do not fit."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
  """Tensors of a form.

  Attributes:
    main: End of the name of the tensor that identifies the form.
    dtypes: Of that tensor; empty is any.
    needed: Ends of further tensors; one of each tuple is needed, and is known
      by the first.
    optional: Ends of tensors that may be missing.
    shape: Returns the shape of the weight, from its tensors and the shape of
      the model's, which is None if the model has no such weight.
    shapes: Returns the supported shapes of tensors.
    decode: Returns the values of some rows, float32.
    details: Returns numbers that small tensors have.
    weight: End of the name of the weight.
  """

  main: str
  dtypes: tuple[str, ...] = ()
  needed: tuple[tuple[str, ...], ...] = ()
  optional: tuple[str, ...] = ()
  shape: Callable[["Weight", Shape | None], Shape]
  shapes: Callable[["Weight"], Mapping[str, tuple[Shape, ...]]]
  decode: Callable[["Parts", int, int], np.ndarray]
  details: Callable[["Weight"], dict[str, Any]] = lambda weight: {}
  weight: str = ".weight"

  @property
  def ends(self) -> tuple[str, ...]:
    """All ends of names."""
    return (
      self.main,
      *(x for each in self.needed for x in each),
      *self.optional,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Weight:
  """A quantized weight of a file.

  Attributes:
    stem: Its name without `.weight`.
    parts: Name, file and entry of each tensor, by the end of its name.
    storage: Its number of bits, and blocks of scales.
    layout: The tensors of its form.
    dtype: Dtype of the values.
    shape: Shape of the values.
    details: Further numbers that the file has for it.
    is_transposed: Whether values are read as [C,R].
  """

  stem: str
  parts: Mapping[str, tuple[str, Stored]]
  storage: quantized_config.Storage
  layout: Layout
  dtype: np.dtype
  shape: Shape = ()
  details: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  is_transposed: bool = False

  @property
  def name(self) -> str:
    """Name of the weight."""
    return self.stem + self.layout.weight

  @property
  def stored(self) -> Stored:
    """File of its main tensor, and an entry as which the values are read."""
    path, entry = self.parts[self.layout.main][1]
    return path, dataclasses.replace(
      entry,
      dtype=safetensors_file.dtype_name(self.dtype),
      shape=self.shape[::-1] if self.is_transposed else self.shape,
    )

  def entry(self, end: str) -> safetensors_file.Entry:
    """Returns the entry of a tensor."""
    return self.parts[end][1][1]

  def read_rows(self, start: int, stop: int) -> np.ndarray:
    """Returns rows `start` to `stop` of the values.

    Raises:
      QuantizedWeightsError: Groups of inputs are out of range.
    """
    if self.is_transposed:
      whole = dataclasses.replace(self, is_transposed=False)
      return whole.read_rows(0, self.shape[0])[:, start:stop].T
    parts = Parts(self)
    result = np.empty((stop - start, *self.shape[1:]), self.dtype)
    step = max(1, _CHUNK // max(1, math.prod(self.shape[1:])))
    # Values that are not finite are an error of the caller.
    with np.errstate(over="ignore", invalid="ignore"):
      for i in range(start, stop, step):
        end = min(i + step, stop)
        result[i - start : end - start] = self.layout.decode(parts, i, end)
    return result

  def make_error(self, end: str, problem: str) -> QuantizedWeightsError:
    """Returns an error that names a tensor and its file."""
    name, (path, _) = self.parts[end]
    return QuantizedWeightsError(f"{os.fspath(path)}: {name} {problem}.")


@dataclasses.dataclass(frozen=True)
class Grid:
  """Blocks of a weight that share a scale: their size and number."""

  block: quantized_config.Block
  shape: tuple[int, int]


def find_grid(weight: Weight) -> Grid:
  """Returns the blocks that fit the scales, or else the first."""
  grids = [
    Grid(
      block,
      (
        -(-weight.shape[0] // (block[0] or weight.shape[0])),
        -(-weight.shape[1] // (block[1] or weight.shape[1])),
      ),
    )
    for block in weight.storage.blocks
  ]
  ends = [end for end in weight.parts if end.startswith(".weight_scale")]
  shape = weight.entry(ends[0]).shape if ends else None
  return next((x for x in grids if shape in shapes_of_scales(x)), grids[0])


def shapes_of_scales(grid: Grid) -> tuple[Shape, ...]:
  """Returns the supported shapes of scales."""
  if grid.shape == (1, 1):
    return grid.shape, (1,), ()
  return (grid.shape, grid.shape[:1]) if grid.shape[1] == 1 else (grid.shape,)


class Parts:
  """The tensors of a weight, those without its rows read once."""

  def __init__(self, weight: Weight) -> None:
    self.weight, self.shape, self.storage = weight, weight.shape, weight.storage
    self._whole: dict[str, np.ndarray] = {}

  def has(self, end: str) -> bool:
    """Whether the file has an optional tensor."""
    return end in self.weight.parts

  def whole(self, end: str) -> np.ndarray:
    """Returns a tensor; a scalar is one row."""
    if end not in self._whole:
      path, entry = self.weight.parts[end][1]
      entry = dataclasses.replace(entry, shape=entry.shape or (1,))
      size = entry.shape[0]
      self._whole[end] = safetensors_file.read_rows(path, entry, 0, size)
    return self._whole[end]

  def rows(self, end: str, start: int, stop: int) -> np.ndarray:
    """Returns rows of a tensor."""
    return safetensors_file.read_rows(*self.weight.parts[end][1], start, stop)

  def bytes(self, end: str, start: int, stop: int) -> np.ndarray:
    """Returns bytes of a tensor of any dtype, uint8."""
    path, entry = self.weight.parts[end][1]
    shape = (entry.stop - entry.start,)
    entry = dataclasses.replace(entry, dtype="U8", shape=shape)
    return safetensors_file.read_rows(path, entry, start, stop)

  def groups(self, end: str) -> np.ndarray:
    """Returns the group of each input, which a tensor may have.

    Raises:
      QuantizedWeightsError: One is out of range.
    """
    grid = find_grid(self.weight)
    columns = np.arange(self.shape[1]) // (grid.block[1] or self.shape[1])
    if not self.has(end):
      return columns
    found = self.whole(end)
    # Without an order, compressed-tensors may store -1.
    if (found == -1).all():
      return columns
    if found.min() < 0 or found.max() >= grid.shape[1]:
      raise self.weight.make_error(
        end,
        f"has groups {found.min()} to {found.max()}, and there are scales of"
        f" {grid.shape[1]}",
      )
    return found


def show(shape: Shape) -> str:
  """Returns a shape as text."""
  return f"[{', '.join(map(str, shape))}]"
