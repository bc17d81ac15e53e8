"""Weights on disk: one safetensors file, or several with an index.

Weights in MXFP4 (gpt-oss) have two tensors, `<name>_blocks` uint8 [E,R,G,16]
and `<name>_scales` uint8 [E,R,G]. They are read as one, bfloat16 [E,G*32,R]:
byte `i` of a block has the values `2 i`, in its low four bits, and `2 i + 1`;
a value is a float of 4 bits (E2M1) times `2 ** (scale - 127)`, which bfloat16
represents exactly.

Weights in fp8 (DeepSeek-V3) have a tensor `<name>`, float8_e4m3fn [R,C], and
`<name>_scale_inv` with a factor for each block of 128 x 128. They are read as
bfloat16, as the published conversion writes them.
"""

from collections.abc import Iterable, Mapping
import dataclasses
import json
import os
import pathlib
import re

from etils import epath
import jax.numpy as jnp
import numpy as np

from paxon.layers.models.hugging_face import mapping, safetensors_file
from paxon.sharding import suggestions

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
# Rows of tied tensors compared at a time.
_ROWS = 1024
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_BLOCKS, _SCALES = "_blocks", "_scales"
_FP8, _FP8_SCALES = "F8_E4M3", "_scale_inv"
# Rows and columns of a block of fp8.
_FP8_BLOCK = 128
# Values of a block of MXFP4, which share a scale.
_BLOCK = 32
# Values of the bits of E2M1; the highest bit is the sign.
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_FP4_VALUES = np.concatenate([_E2M1, -_E2M1])

# File and entry of a tensor, and those of blocks and scales.
_Stored = tuple[epath.Path, safetensors_file.Entry]
_Packed = tuple[_Stored, _Stored]


class WeightsError(ValueError):
  """Files do not have the weights of a model."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightFiles:
  """Tensors of a model in files.

  Attributes:
    entries: File and entry of each tensor, by its name in the file. A tensor in
      MXFP4 has the dtype and shape of its values.
    names: Names of the model's weights.
    packed: Blocks and scales of tensors in MXFP4, by name.
    scaled: Values and scales of tensors in fp8, by name.
  """

  entries: Mapping[str, _Stored]
  names: mapping.Names
  packed: Mapping[str, _Packed] = dataclasses.field(default_factory=dict)
  scaled: Mapping[str, _Packed] = dataclasses.field(default_factory=dict)

  def entry(self, name: str) -> safetensors_file.Entry:
    """Returns the entry of a tensor of the model."""
    return self.entries[self._stored(name)][1]

  def read_rows(self, name: str, start: int, stop: int) -> np.ndarray:
    """Reads rows `start` to `stop` of a tensor of the model.

    Raises:
      WeightsError: One of their values is infinite or not a number.
    """
    stored = self._stored(name)
    path, entry = self.entries[stored]
    if stored in self.packed:
      blocks, scales = (
        safetensors_file.read_rows(*part, start, stop)
        for part in self.packed[stored]
      )
      rows = from_mxfp4(blocks, scales)
    elif stored in self.scaled:
      values, scales = self.scaled[stored]
      first = start // _FP8_BLOCK
      rows = from_fp8(
        safetensors_file.read_rows(*values, start, stop),
        safetensors_file.read_rows(*scales, first, -(-stop // _FP8_BLOCK)),
        first=start - first * _FP8_BLOCK,
      )
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
      if self._stored(name) not in self.entries:
        problems.append(f"{name} {_shape(tensor.shape)} is missing")
      elif self.entry(name).shape != tensor.shape:
        problems.append(
          f"{name} has shape {_shape(self.entry(name).shape)}, config.json"
          f" needs {_shape(tensor.shape)}"
        )
      elif not _is_float(self.entry(name)):
        problems.append(
          f"{name} has dtype {self.entry(name).dtype}; weights must be of"
          " floating point (quantized weights are not supported)"
        )
    known = {self._stored(name) for name in self.names.tensors}
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
        f"The weights do not match the model: {suggestions.limited(problems)}."
      )

  def find_unused(self) -> list[str]:
    """Returns the tensors of floating point that the model has no use for."""
    return [
      name
      for name, (_, entry) in self.entries.items()
      if self.names.is_ignored(name) and _is_float(entry)
    ]

  def _stored(self, name: str) -> str:
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


def find(path: epath.Path, *, names: mapping.Names) -> WeightFiles:
  """Returns the weights in a directory or file.

  Raises:
    WeightsError: There are none, or some of the index are missing.
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
  packed = _find_packed(entries)
  for name, ((file, blocks), _) in packed.items():
    experts, rows, groups, _ = blocks.shape
    shape = (experts, groups * _BLOCK, rows)
    entries[name] = file, dataclasses.replace(blocks, dtype="BF16", shape=shape)
    del entries[name + _BLOCKS], entries[name + _SCALES]
  scaled = _find_scaled(entries)
  for name, ((file, values), _) in scaled.items():
    entries[name] = file, dataclasses.replace(values, dtype="BF16")
    del entries[name + _FP8_SCALES]
  return WeightFiles(entries=entries, names=names, packed=packed, scaled=scaled)


def from_fp8(
  values: np.ndarray, scales: np.ndarray, *, first: int = 0
) -> np.ndarray:
  """Returns the values of weights in fp8, bfloat16 [R,C].

  Args:
    values: float8_e4m3fn [R,C].
    scales: Factor of each block of 128 x 128, float32.
    first: Row of the first block that `values` begins with.
  """
  rows = (first + np.arange(len(values))) // _FP8_BLOCK
  columns = np.arange(values.shape[1]) // _FP8_BLOCK
  factors = scales.astype(np.float32)[rows][:, columns]
  return (values.astype(np.float32) * factors).astype(jnp.bfloat16)


def from_mxfp4(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
  """Returns the values of weights in MXFP4, bfloat16 [E,G*32,R].

  Args:
    blocks: Two values in each byte, uint8 [E,R,G,16].
    scales: Exponents of the blocks plus 127, uint8 [E,R,G].
  """
  experts, rows, groups, _ = blocks.shape
  result = np.empty((experts, groups * _BLOCK, rows), jnp.bfloat16)
  # One expert at a time, because the float32 values are large.
  for expert, block in enumerate(blocks):
    pairs = [_FP4_VALUES[block & 15], _FP4_VALUES[block >> 4]]
    values = np.stack(pairs, axis=-1).reshape(rows, groups, _BLOCK)
    exponents = scales[expert].astype(np.int32) - 127
    # Infinite values are an error of `read_rows`.
    with np.errstate(over="ignore"):
      values = np.ldexp(values, exponents[:, :, None])
    result[expert] = values.reshape(rows, groups * _BLOCK).T
  return result


def _find_packed(entries: Mapping[str, _Stored]) -> dict[str, _Packed]:
  """Returns the blocks and scales of tensors in MXFP4.

  Raises:
    WeightsError: One of them is missing, or their shapes do not fit.
  """
  found = {}
  for stored in entries:
    name = stored.removesuffix(_BLOCKS).removesuffix(_SCALES)
    if name == stored:
      continue
    for end in (_BLOCKS, _SCALES):
      if name + end not in entries:
        raise WeightsError(
          f"{stored} has no {name}{end}; weights in MXFP4 need both."
        )
    blocks, scales = entries[name + _BLOCKS], entries[name + _SCALES]
    shapes = blocks[1].shape, scales[1].shape
    if len(shapes[0]) != 4 or shapes[0] != (*shapes[1], _BLOCK // 2):
      raise WeightsError(
        f"{name}{_BLOCKS} has shape {_shape(shapes[0])} and {name}{_SCALES}"
        f" {_shape(shapes[1])}; they must be [E,R,G,16] and [E,R,G]."
      )
    found[name] = blocks, scales
  return found


def _find_scaled(entries: Mapping[str, _Stored]) -> dict[str, _Packed]:
  """Returns the values and scales of tensors in fp8.

  Raises:
    WeightsError: One of them is missing, or their shapes do not fit.
  """
  found = {}
  for name, stored in entries.items():
    if name.endswith(_FP8_SCALES):
      if name.removesuffix(_FP8_SCALES) not in entries:
        raise WeightsError(f"{name} has no {name.removesuffix(_FP8_SCALES)}.")
    elif stored[1].dtype == _FP8:
      if name + _FP8_SCALES not in entries:
        raise WeightsError(
          f"{name} is in fp8 and has no {name}{_FP8_SCALES}; weights in fp8"
          " need their scales."
        )
      scales, shape = entries[name + _FP8_SCALES], stored[1].shape
      expected = tuple(-(-size // _FP8_BLOCK) for size in shape)
      if len(shape) != 2 or scales[1].shape != expected:
        raise WeightsError(
          f"{name} has shape {_shape(shape)} and {name}{_FP8_SCALES}"
          f" {_shape(scales[1].shape)}; fp8 needs [R,C] and one scale for each"
          f" block of {_FP8_BLOCK} x {_FP8_BLOCK}."
        )
      found[name] = stored, scales
  return found


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
  return jnp.issubdtype(entry.numpy_dtype, jnp.floating)


def _shape(shape: Iterable[int]) -> str:
  return f"[{', '.join(map(str, shape))}]"
