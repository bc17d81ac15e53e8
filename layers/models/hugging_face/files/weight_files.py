"""Weights on disk: one safetensors file, or several with an index.

Quantized weights have several tensors each, which are read as one of their
values (`quantized_weights`).
"""

from collections.abc import Iterable, Mapping
import dataclasses
import json
import os
import pathlib
import re
from typing import Any

from etils import epath
import jax.numpy as jnp
import numpy as np

from paxon.layers.models.hugging_face import mapping
from paxon.layers.models.hugging_face.files import (
  quantized_config,
  quantized_parts,
  quantized_weights,
  safetensors_file,
)
from paxon.sharding import suggestions

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
# Rows of tied tensors compared at a time.
_ROWS = 1024
_EXPERT = re.compile(r"\.experts\.(\d{1,9})\.")

# File and entry of a tensor.
_Stored = quantized_parts.Stored


class WeightsError(ValueError):
  """Files do not have the weights of a model."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightFiles:
  """Tensors of a model in files.

  Attributes:
    entries: File and entry of each tensor, by its name in the file. A quantized
      weight has the dtype and shape of its values.
    names: Names of the model's weights.
    quantized: Quantized weights, by name.
  """

  entries: Mapping[str, _Stored]
  names: mapping.Names
  quantized: Mapping[str, quantized_parts.Weight] = dataclasses.field(
    default_factory=dict
  )

  def entry(self, name: str) -> safetensors_file.Entry:
    """Returns the entry of a tensor of the model."""
    return self.entries[self._find_stored(name)][1]

  def read_rows(self, name: str, start: int, stop: int) -> np.ndarray:
    """Reads rows `start` to `stop` of a tensor of the model.

    Raises:
      WeightsError: One of their values is infinite or not a number.
    """
    stored = self._find_stored(name)
    path, entry = self.entries[stored]
    if stored in self.quantized:
      try:
        rows = self.quantized[stored].read_rows(start, stop)
      except quantized_parts.QuantizedWeightsError as error:
        raise WeightsError(str(error)) from error
    else:
      rows = safetensors_file.read_rows(path, entry, start, stop)
    if not np.isfinite(rows).all():
      at = np.argwhere(~np.isfinite(rows))[0]
      value = rows[tuple(at)]
      place = [start + int(at[0]), *map(int, at[1:])] if at.size else []
      raise WeightsError(
        f"{os.fspath(path)}: {name}{place} is {value}; weights must be finite."
      )
    return rows

  def leaf_dtype(self, leaf: mapping.Leaf) -> np.dtype:
    """Returns the dtype of all tensors that a variable is made of.

    Raises:
      WeightsError: They have several dtypes.
    """
    found = {tensor.name: self.entry(tensor.name) for tensor, _ in leaf.sources}
    by_dtype = {entry.dtype: name for name, entry in found.items()}
    if len(by_dtype) > 1:
      shown = ", ".join(f"{n} is {dtype}" for dtype, n in by_dtype.items())
      raise WeightsError(
        f"The layers of {leaf.name} have several dtypes ({shown}); choose one"
        " to store."
      )
    return next(iter(found.values())).numpy_dtype

  def check(self) -> None:
    """Raises an error unless the files have exactly this model's weights.

    Raises:
      WeightsError: A tensor is missing, unknown, of another shape, not of
        floating point, or differs from the one it is tied to; or layers have
        another number of experts.
    """
    self._check_experts()
    problems = []
    for name, tensor in self.names.tensors.items():
      if self._find_stored(name) not in self.entries:
        problems.append(f"{name} {_shape(tensor.shape)} is missing")
      elif self.entry(name).shape != tensor.shape:
        problems.append(
          f"{name} has shape {_shape(self.entry(name).shape)}, config.json"
          f" needs {_shape(tensor.shape)}"
        )
      elif not _is_float(self.entry(name)):
        problems.append(
          f"{name} has dtype {self.entry(name).dtype}; weights must be of"
          f" floating point, or quantized as {quantized_config.FIELD} of"
          " config.json says"
        )
    known = {self._find_stored(name) for name in self.names.tensors}
    for name in sorted(set(self.entries) - known):
      whole = {name, f"{self.names.prefix}{name}"}
      if not (
        whole & set(self.names.tied) or any(map(self.names.is_ignored, whole))
      ):
        problems.append(f"{name} is not part of the model")
    if not problems:
      problems = list(self._tied_problems())
    if problems:
      raise WeightsError(
        f"The weights do not match the model: {suggestions.limit(problems)}."
      )

  def find_unused(self) -> list[str]:
    """Returns the tensors of floating point that the model has no use for."""
    return [
      name
      for name, (_, entry) in self.entries.items()
      if self.names.is_ignored(name) and _is_float(entry)
    ]

  def _find_stored(self, name: str) -> str:
    """Returns the name in the files, which may omit the prefix or a copy."""
    short = name.removeprefix(self.names.prefix)
    for each in (name, short, self.names.copied.get(name)):
      if each in self.entries:
        return each
    return name

  def _check_experts(self) -> None:
    """Raises WeightsError if layers have another number of experts."""
    found = [_EXPERT.search(name) for name in self.entries]
    count = max((int(each[1]) + 1 for each in found if each), default=None)
    expected = self.names.sizes.get("E")
    if count is not None and expected is not None and count != expected:
      raise WeightsError(
        f"The weights do not match the model: they have {count} experts in a"
        f" layer, config.json has {expected}."
      )

  def _tied_problems(self) -> Iterable[str]:
    for name, other in self.names.tied.items():
      if name not in self.entries:
        continue
      shape = self.entry(other).shape
      is_same = self.entries[name][1].shape == shape and all(
        np.array_equal(
          self.read_rows(name, start, min(start + _ROWS, shape[0])),
          self.read_rows(other, start, min(start + _ROWS, shape[0])),
        )
        for start in range(0, shape[0], _ROWS)
      )
      if not is_same:
        yield (
          f"{name} differs from {other}, to which config.json ties it"
          " (tie_word_embeddings)"
        )


def find(
  path: epath.Path, *, names: mapping.Names, dtype: Any = None
) -> WeightFiles:
  """Returns the weights in a directory or file.

  Args:
    path: Directory or file.
    names: Names of the model's weights.
    dtype: Of the values of quantized weights; None is that of the model.

  Raises:
    WeightsError: There are none, some of the index are missing, or tensors of
      quantized weights do not fit.
    DamagedFileError: A file is truncated or not a safetensors file.
  """
  entries: dict[str, tuple[epath.Path, safetensors_file.Entry]] = {}
  for each, wanted in _files(path):
    if not each.exists():
      raise WeightsError(f"{os.fspath(each)} is missing; {INDEX} lists it.")
    header = safetensors_file.read_header(each)
    missing = sorted(wanted - set(header))
    if missing:
      raise WeightsError(
        f"{os.fspath(each)} does not have {missing[0]}, which {INDEX} lists."
      )
    for stored, entry in header.items():
      name = names.to_current(stored)
      if name in entries:
        raise WeightsError(
          f"{name} is in {os.fspath(entries[name][0])} and in"
          f" {os.fspath(each)}; delete one of them."
        )
      entries[name] = each, entry
  scheme = names.quantization or quantized_config.parse({})
  # Files may leave out the prefix.
  shapes = {
    name: tensor.shape
    for full, tensor in names.tensors.items()
    for name in (full, full.removeprefix(names.prefix))
  }
  try:
    quantized, used = quantized_weights.find(
      entries,
      scheme,
      shapes=shapes,
      is_transposed=names.is_transposed,
      dtype=dtype,
    )
  except quantized_parts.QuantizedWeightsError as error:
    raise WeightsError(str(error)) from error
  plain = {name: each for name, each in entries.items() if name not in used}
  values = {name: each.stored for name, each in quantized.items()}
  return WeightFiles(entries=plain | values, names=names, quantized=quantized)


def _files(path: epath.Path) -> list[tuple[epath.Path, set[str]]]:
  """Returns the files and the tensors that an index lists for each."""
  if not path.is_dir():
    return [(path, set())]
  if (path / INDEX).exists():
    index = path / INDEX
    if (path / WEIGHTS).exists():
      raise WeightsError(
        f"{os.fspath(path)} has both {WEIGHTS} and {INDEX}; delete one of them,"
        f" or name the file {WEIGHTS} instead of the folder."
      )
    try:
      by_file: dict[str, set[str]] = {}
      for name, file in json.loads(index.read_text())["weight_map"].items():
        by_file.setdefault(file, set()).add(name)
      if not by_file:
        raise ValueError("no tensor")
    except (
      ValueError,
      KeyError,
      AttributeError,
      TypeError,
      RecursionError,
    ) as error:
      raise WeightsError(
        f"{os.fspath(index)} cannot be read; copy it again."
      ) from error
    for file in by_file:
      # Not a path to a file elsewhere.
      is_name = isinstance(file, str) and pathlib.PurePath(file).name == file
      if not file or not is_name or file == "..":
        raise WeightsError(
          f"{os.fspath(index)} names the file {file!r}; it must be a"
          " file name in the same folder."
        )
    return [(path / file, each) for file, each in sorted(by_file.items())]
  if (path / WEIGHTS).exists():
    return [(path / WEIGHTS, set())]
  others = sorted(
    each.name
    for each in path.iterdir()
    if each.name.endswith((".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf"))
  )
  also = f"; the format of {others[0]} is not supported" if others else ""
  raise WeightsError(f"No {WEIGHTS} or {INDEX} in {os.fspath(path)}{also}.")


def _is_float(entry: safetensors_file.Entry) -> bool:
  """Whether values are floats, and need no scale."""
  dtype = entry.numpy_dtype
  return jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize > 1


def _shape(shape: Iterable[int]) -> str:
  return f"[{', '.join(map(str, shape))}]"
