"""Reader of checkpoints of torch.distributed.checkpoint (DCP), without torch.

A checkpoint is a directory of `.metadata`, a pickle, and of files `*.distcp`.
The pickle has the size and dtype of each tensor, its chunks, and for each chunk
the file, offset and length of a zip archive, which `torch.save` wrote. Values
are not compressed there, so that regions of a chunk are read by their offsets.

Pickles can run code. Here only the classes below are accepted; they become
plain records.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
import functools
import io
import math
import os
import pickle
import re
from typing import IO, Any, Final
import zipfile

from etils import epath
import jax.numpy as jnp
import numpy as np

from paxon.runner import files, user_error

METADATA: Final = ".metadata"
# Beyond 10 million chunks.
_MAX_METADATA_BYTES = 1 << 32
# Bytes that are read at a time.
_PIECE = 1 << 23
_DTYPES: Final = {
  **{name: name for name in ("bfloat16", "float16", "float32", "float64")},
  **{name: name for name in ("int8", "int16", "int32", "int64", "uint8")},
  **{name: name for name in ("float8_e4m3fn", "float8_e5m2")},
  "bool": "bool",
}
_DCP = "torch.distributed.checkpoint."
_SHARDED = "torch.distributed._shard.sharded_tensor.metadata"
_ERRORS = (
  *(OSError, ValueError, KeyError, TypeError, IndexError, AttributeError),
  *(EOFError, ImportError, RecursionError),
  *(pickle.UnpicklingError, zipfile.BadZipFile),
)
# Of a state that wraps the model's; `model.` is part of names of Hugging Face.
_WRAPPERS = re.compile(r"^(?:(?:app|model|module|state_dict|_orig_mod)\.)+")
_OTHERS = re.compile(
  r"^(?:app\.)?(?:optim|opt_state|lr_scheduler|train_state|dataloader|rng|step$)"
)
_LAYER = re.compile(r"(^|\.)layers\.(\d+)\.")

Region = tuple[slice, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tensor:
  """One tensor of a checkpoint.

  Attributes:
    name: Its name.
    shape: Its shape.
    dtype: Its dtype.
    read: Returns it, or a region of it.
  """

  name: str
  shape: tuple[int, ...]
  dtype: np.dtype
  read: Callable[..., np.ndarray]


class _Record:
  """Instance of any accepted class: the state that was pickled."""

  state: Any = None

  def __setstate__(self, state: Any) -> None:
    self.state = state

  def get(self, name: str) -> Any:
    """Returns a field, or None."""
    return self.state.get(name)


def _rebuild_tensor(
  storage: str,
  offset: int,
  size: Sequence[int],
  stride: Sequence[int],
  *_: object,
) -> tuple[str, int, tuple[int, ...], tuple[int, ...]]:
  return storage, offset, tuple(size), tuple(stride)


def _ignore(*_: object) -> None:
  """Stands in for functions whose result is not used."""


_CLASSES: Final[Mapping[tuple[str, str], Any]] = {
  **{
    (f"{_DCP}{module}", name): _Record
    for module, names in {
      "metadata": (
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties"),
        *("TensorStorageMetadata", "BytesStorageMetadata"),
        "ChunkStorageMetadata",
      ),
      "filesystem": ("_StorageInfo", "_StoragePrefix"),
    }.items()
    for name in names
  },
  (f"{_DCP}metadata", "_MEM_FORMAT_ENCODING"): _ignore,
  # Of torch before 2.3.
  (_SHARDED, "TensorProperties"): _Record,
  (_SHARDED, "MEM_FORMAT_ENCODING"): _ignore,
  **{("torch", name): np_name for name, np_name in _DTYPES.items()},
  **{
    ("torch", f"{kind}Storage"): kind
    for kind in (
      *("BFloat16", "Half", "Float", "Double", "Char", "Short", "Int", "Long"),
      *("Byte", "Bool", "Float8_e4m3fn", "Float8_e5m2"),
    )
  },
  ("torch.storage", "UntypedStorage"): "Untyped",
  ("torch", "Size"): tuple,
  ("torch.serialization", "_get_layout"): _ignore,
  ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
  ("collections", "OrderedDict"): dict,
  **{
    (module, name): _ignore
    for module in ("pathlib", "pathlib._local")
    for name in ("PosixPath", "PurePosixPath", "WindowsPath")
  },
}


class _Unpickler(pickle.Unpickler):
  """Reads pickles of accepted classes only."""

  def find_class(self, module: str, name: str) -> Any:
    """Returns the stand-in of a class.

    Raises:
      ValueError: It is not accepted.
    """
    try:
      return _CLASSES[module, name]
    except KeyError:
      raise ValueError(
        f"it has an object of the class {module}.{name}, which is not loaded,"
        " because pickles of unknown classes can run code"
      ) from None

  def persistent_load(self, pid: Any) -> Any:
    """Returns the name of a storage in its archive."""
    return pid[2]


class _Section(io.RawIOBase):
  """A range of a file as a file."""

  def __init__(self, file: IO[bytes], offset: int, length: int) -> None:
    super().__init__()
    self._file, self._offset, self._length = file, offset, length
    self._at = 0

  def readable(self) -> bool:
    return True

  def seekable(self) -> bool:
    return True

  def tell(self) -> int:
    return self._at

  def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
    start = (0, self._at, self._length)[whence]
    self._at = max(0, start + offset)
    return self._at

  def readinto(self, buffer: Any) -> int:
    size = max(0, min(len(buffer), self._length - self._at))
    self._file.seek(self._offset + self._at)
    data = self._file.read(size)
    buffer[: len(data)] = data
    self._at += len(data)
    return len(data)


def list_tensors(folder: epath.Path) -> Iterator[Tensor]:
  """Yields the tensors of a checkpoint, which are not read.

  Raises:
    user_error.UserError: It is damaged, or has unknown classes.
  """
  path = folder / METADATA
  content = files.read_bytes(path, max_bytes=_MAX_METADATA_BYTES)
  try:
    metadata = _Unpickler(io.BytesIO(content)).load()
    stored = {
      (index.get("fqn"), index.get("offset")): place
      for index, place in metadata.get("storage_data").items()
    }
    for name, each in metadata.get("state_dict_metadata").items():
      # Those of objects have neither size nor chunks.
      if each.state and each.get("chunks") is not None:
        yield _make_tensor(folder, name, each, stored)
  except _ERRORS as error:
    raise _make_damaged_error(os.fspath(path), error) from error


def to_pax_name(name: str) -> str:
  """Returns the name that a variable has in Pax, with layers as `layers_0`."""
  if _OTHERS.match(name):
    return name
  name = _LAYER.sub(r"\1layers_\2.", _WRAPPERS.sub("", name))
  return f"mdl_vars.params.{name}"


def _make_tensor(
  folder: epath.Path, name: str, each: _Record, stored: Mapping[Any, _Record]
) -> Tensor:
  dtype = jnp.dtype(each.get("properties").state[0])
  shape = tuple(each.get("size"))
  chunks = []
  for described in each.get("chunks"):
    offsets, sizes = tuple(described.get("offsets")), described.get("sizes")
    place = stored.get((name, offsets))
    if place is None:
      raise ValueError(f"it lacks the file of {name} at {offsets}")
    if place.get("transform_descriptors"):
      raise ValueError(
        f"{name} is stored with {place.get('transform_descriptors')}, expected"
        " no transforms"
      )
    chunks.append(
      _Chunk(
        path=folder / place.get("relative_path"),
        start=int(place.get("offset")),
        length=int(place.get("length")),
        offsets=offsets,
        sizes=tuple(sizes),
        dtype=dtype,
      )
    )
  count = sum(math.prod(chunk.sizes) for chunk in chunks)
  if count != math.prod(shape):
    raise ValueError(
      f"{name} has shape {shape} and chunks of {count:,} values, expected"
      f" {math.prod(shape):,}"
    )
  read = functools.partial(_read, name, shape, dtype, tuple(chunks))
  return Tensor(name=name, shape=shape, dtype=dtype, read=read)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Chunk:
  """A chunk of a tensor: `sizes` values at `offsets`, in an archive."""

  path: epath.Path
  start: int
  length: int
  offsets: tuple[int, ...]
  sizes: tuple[int, ...]
  dtype: np.dtype

  def find(self, region: Region) -> tuple[Region, Region] | None:
    """Returns the common part with a region, within it and within the chunk."""
    inside, within = [], []
    for part, offset, size in zip(
      region, self.offsets, self.sizes, strict=True
    ):
      start, stop = max(part.start, offset), min(part.stop, offset + size)
      if start >= stop:
        return None
      inside.append(slice(start - part.start, stop - part.start))
      within.append(slice(start - offset, stop - offset))
    return tuple(inside), tuple(within)

  def read(self, region: Region, out: np.ndarray) -> None:
    """Reads a region of the chunk into an array."""
    with files.open_bytes(self.path) as file:
      start, strides = self._locate(file)
      if strides is not None:
        # Not in the order of its axes, such as a transposed tensor.
        whole = np.empty(math.prod(self.sizes), self.dtype)
        _fill(file, start, whole)
        size = self.dtype.itemsize
        out[...] = np.lib.stride_tricks.as_strided(
          whole, self.sizes, [size * stride for stride in strides]
        )[region]
        return
      # The axes from `axis` on are contiguous.
      axis = max(0, len(region) - 1)
      while axis and region[axis] == slice(0, self.sizes[axis]):
        axis -= 1
      inner = math.prod(self.sizes[axis + 1 :])
      for index in np.ndindex(out.shape[:axis]):
        at = 0
        for i, part in enumerate(region[: axis + 1]):
          add = index[i] if i < axis else 0
          at = at * self.sizes[i] + part.start + add
        values = np.empty(out.shape[axis:], self.dtype)
        _fill(file, start + at * inner * self.dtype.itemsize, values)
        out[index] = values

  def _locate(self, file: IO[bytes]) -> tuple[int, tuple[int, ...] | None]:
    """Returns where values begin, and strides if they are not contiguous."""
    archive = zipfile.ZipFile(_Section(file, self.start, self.length))
    (pickled,) = (x for x in archive.namelist() if x.endswith("/data.pkl"))
    found = _Unpickler(archive.open(pickled)).load()
    storage, offset, size, stride = found
    if size != self.sizes:
      raise ValueError(f"a chunk has shape {size}, expected {self.sizes}")
    member = archive.getinfo(f"{pickled.rpartition('/')[0]}/data/{storage}")
    needed = math.prod(size) * self.dtype.itemsize
    if member.compress_type != zipfile.ZIP_STORED or (
      member.file_size < offset * self.dtype.itemsize + needed
    ):
      raise ValueError(f"{member.filename} is compressed or too short")
    # Its header has two fields of variable length before the values.
    file.seek(self.start + member.header_offset + 26)
    lengths = np.frombuffer(file.read(4), "<u2")
    start = self.start + member.header_offset + 30 + int(lengths.sum())
    expected = [math.prod(size[i + 1 :]) for i in range(len(size))]
    is_plain = all(
      n <= 1 or a == b for n, a, b in zip(size, stride, expected, strict=True)
    )
    start += offset * self.dtype.itemsize
    return start, None if is_plain else stride


def _fill(file: IO[bytes], start: int, out: np.ndarray) -> None:
  """Reads the values of a contiguous array."""
  file.seek(start)
  flat = out.reshape(-1).view(np.uint8)
  done = 0
  while done < len(flat):
    data = file.read(min(_PIECE, len(flat) - done))
    if not data:
      raise EOFError(f"it ends {len(flat) - done:,} bytes too early")
    flat[done : done + len(data)] = np.frombuffer(data, np.uint8)
    done += len(data)


def _read(
  name: str,
  shape: tuple[int, ...],
  dtype: np.dtype,
  chunks: Sequence[_Chunk],
  region: Region | None = None,
) -> np.ndarray:
  """Returns a region of a tensor, assembled from its chunks."""
  if region is None:
    region = tuple(slice(0, size) for size in shape)
  result = np.empty([part.stop - part.start for part in region], dtype)
  for chunk in chunks:
    if (found := chunk.find(region)) is not None:
      inside, within = found
      try:
        # A view even without axes.
        chunk.read(within, result[(..., *inside)])
      except _ERRORS as error:
        where = f"{name} in {os.fspath(chunk.path)}"
        raise _make_damaged_error(where, error) from error
  return result


def _make_damaged_error(
  name: str, error: BaseException
) -> user_error.UserError:
  reason = str(error).rstrip(".") or type(error).__name__
  return user_error.UserError(f"{name} cannot be read: {reason}.")
