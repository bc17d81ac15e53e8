"""Reader of the checkpoints of Pax (paxml): arrays by name, read one by one.

The layouts are described in docs/design/0078. A path may be a job's directory,
its directory `checkpoints`, or one checkpoint. Arrays have their names in the
train state, such as `mdl_vars.params.lm.final_ln.scale` and
`opt_states_0.no_prefix_2.m.params.lm.final_ln.scale`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
import functools
import json
import math
import os
import re
from typing import Any, Final

from etils import epath
import jax.numpy as jnp
import numpy as np
import tensorstore as ts

from paxon.runner import files, user_error
from paxon.runner.stores import drivers
from paxon.tools.pax_checkpoints import dcp_files, flax_messages

# Names of Pax and orbax, of torchtitan, and of Megatron.
_CHECKPOINT = re.compile(r"(?:checkpoint_|step-|iter_)?(\d+)")
_CHECKPOINTS, _STATE, _METADATA = "checkpoints", "state", "metadata"
_OCDBT = "manifest.ocdbt"
# Items of orbax's managers and of MaxText, and orbax's description of a tree.
_ITEMS = (_STATE, "items", "default", "params")
# Of NeMo.
_DCP_ITEM = "weights"
_ORBAX = "_METADATA"
_STEP = "step"
# The file of FLAX, which other kinds may have, too.
_MESSAGES = "checkpoint"
_UNPADDED = "unpadded_shape"
_TAG = "_array_metadata_tag"
# By the name of the file that describes an array.
_FORMATS: Final = {".zarray": "zarr", "zarr.json": "zarr3"}


Region = tuple[slice, ...]
# Returns an array, or the region that is its only, optional argument.
Reader = Callable[..., np.ndarray]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PaxArray:
  """One array of a checkpoint.

  Attributes:
    name: Its path in the train state, joined by dots.
    shape: Its shape as stored, including padding.
    unpadded: Its shape without padding; None if the checkpoint does not tell.
    dtype: Its dtype.
    read: Returns the array as stored, or a region of it.
    find_chunks: Returns the shape of the chunks in which it is stored.
  """

  name: str
  shape: tuple[int, ...]
  unpadded: tuple[int, ...] | None
  dtype: np.dtype
  read: Reader
  find_chunks: Callable[[], tuple[int, ...]]

  @property
  def nbytes(self) -> int:
    """Its stored size in bytes."""
    return math.prod(self.shape) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True, kw_only=True)
class PaxCheckpoint:
  """One checkpoint.

  Attributes:
    path: Its directory, or its file.
    step: Number of completed training steps, from its name.
    kind: `FLAX`, `zarr`, `OCDBT` or `DCP`.
    version: The version of the layout in its metadata; None without metadata.
    arrays: Its arrays by name.
    filled: Names of arrays of which chunks were not stored. TensorStore omits
      chunks of zeros, so they are read as zeros. Grows as arrays are read.
    non_finite: Names of arrays with values that are NaN or infinite. Grows as
      arrays are read, if they are allowed.
  """

  path: epath.Path
  step: int
  kind: str
  version: float | None
  arrays: Mapping[str, PaxArray]
  filled: set[str]
  non_finite: set[str]


def open_checkpoint(
  path: epath.Path,
  *,
  step: int | None = None,
  allow_non_finite: bool = False,
  is_pax: bool = True,
) -> PaxCheckpoint:
  """Returns a checkpoint, whose arrays are not read.

  Args:
    path: A job's directory, its directory of checkpoints, or one checkpoint.
    step: Of the checkpoint; None for the last one.
    allow_non_finite: Whether arrays may have values that are NaN or infinite;
      otherwise reading them raises UserError.
    is_pax: Whether it is one of Pax; otherwise one of orbax or of
      torch.distributed.checkpoint, whose variables get names as in Pax,
      `mdl_vars.params.`.

  Raises:
    user_error.UserError: There is no such checkpoint, or it is damaged.
  """
  path, number = _find(path, step, is_pax=is_pax)
  items = (path / item for item in ((_STATE,) if is_pax else _ITEMS))
  state = next((item for item in items if item.is_dir()), path)
  version, shapes = _read_metadata(path)
  filled: set[str] = set()
  non_finite: set[str] | None = set() if allow_non_finite else None
  make = functools.partial(_make_array, shapes, non_finite)
  dcp = None if is_pax else _find_dcp(path)
  if dcp is not None:
    kind, found = "DCP", _list_dcp(dcp, make)
  elif path.is_file():
    kind, found = "FLAX", _list_messages(path, make)
  elif (state / _OCDBT).exists():
    kind, found = "OCDBT", _list_ocdbt(state, make, filled)
  elif any(_list_folders(state)):
    kind, found = "zarr", _list_zarr(state, make, filled)
  elif (state / _MESSAGES).is_file():
    kind, found = "FLAX", _list_messages(state / _MESSAGES, make)
  else:
    raise user_error.UserError(
      f"{os.fspath(path)} is no checkpoint of Pax: {os.fspath(state)} has"
      f" neither arrays of TensorStore nor the file {_MESSAGES!r}"
      + (", but one of torch (--format)." if _find_dcp(path) else ".")
    )
  arrays: dict[str, PaxArray] = {}
  for array in found:
    if is_pax:
      name = array.name
    elif dcp is not None:
      name = dcp_files.to_pax_name(array.name)
    else:
      name = _to_pax_name(array.name)
    if name in arrays:
      raise user_error.UserError(
        f"{os.fspath(path)} has both {arrays[name].name} and {array.name},"
        " which are the same variable."
      )
    arrays[name] = array
  if not any(name.startswith("mdl_vars.") for name in arrays):
    raise user_error.UserError(
      f"{os.fspath(path)} is no checkpoint of Pax: it has no arrays with names"
      f" 'mdl_vars....', but {', '.join(list(arrays)[:3]) or 'none'}."
    )
  return PaxCheckpoint(
    path=path,
    step=number,
    kind=kind,
    version=version,
    arrays=arrays,
    filled=filled,
    non_finite=set() if non_finite is None else non_finite,
  )


def _to_pax_name(name: str) -> str:
  """Returns the name that a variable of an orbax checkpoint has in Pax."""
  if name == _STEP or name.startswith("opt_state"):
    return name
  # A collection of flax, in the state of a trainer or not.
  for _ in range(2):
    name = name.removeprefix("params.")
  return f"mdl_vars.params.{name}"


def move_layers_first(
  arrays: Mapping[str, PaxArray], axes: Mapping[str, int]
) -> dict[str, PaxArray]:
  """Returns arrays, those of scanned layers as in Praxis's stacks.

  Args:
    arrays: By names in Pax.
    axes: The axis of layers, by the path of a scanned layer below `params.`.
  """
  result = {}
  for name, array in arrays.items():
    for path, axis in axes.items():
      start = f"mdl_vars.params.{path}."
      if name.startswith(start) and len(array.shape) > axis:
        folder = start.rstrip(".").rpartition(".")[0]
        name = f"{folder}.x_layers_0.{name.removeprefix(start)}"
        array = _move_axis(array, axis)
        break
    result[name] = array
  return result


def _move_axis(array: PaxArray, axis: int) -> PaxArray:
  """Returns an array with one of its axes first."""

  def move(sizes: Sequence[Any]) -> tuple[Any, ...]:
    return (sizes[axis], *sizes[:axis], *sizes[axis + 1 :])

  def read(region: Region | None = None) -> np.ndarray:
    if region is not None:
      region = (*region[1 : axis + 1], region[0], *region[axis + 1 :])
    return np.moveaxis(array.read(region), axis, 0)

  return dataclasses.replace(
    array,
    shape=move(array.shape),
    unpadded=array.unpadded and move(array.unpadded),
    read=read,
    find_chunks=lambda: move(array.find_chunks()),
  )


def _find(
  path: epath.Path, step: int | None, *, is_pax: bool
) -> tuple[epath.Path, int]:
  """Returns the path and the step of a checkpoint."""
  files.check_store(path)
  if not path.exists():
    raise user_error.UserError(
      f"{os.fspath(path)} does not exist; pass the job_log_dir of a job of Pax,"
      f" its directory {_CHECKPOINTS!r}, or one checkpoint."
    )
  found = to_step(path)
  is_one = (path / _ORBAX).exists() or _find_dcp(path) is not None
  if found is None and not is_pax and is_one:
    # Saved without steps.
    return path, 0
  if found is None:
    if not path.is_dir():
      raise user_error.UserError(
        f"{os.fspath(path)} is no directory, and a file of Pax has the name"
        " 'checkpoint_1000'; pass the directory that has it."
      )
    folder = path / _CHECKPOINTS
    folder = folder if folder.is_dir() else path
    steps = {
      number: each
      for each in folder.iterdir()
      if (number := to_step(each)) is not None
    }
    if not steps:
      raise user_error.UserError(
        f"{os.fspath(folder)} has no checkpoint of Pax, whose names are"
        " 'checkpoint_00001000' or '1000'."
      )
    found = max(steps) if step is None else step
    if found not in steps:
      raise user_error.UserError(
        f"{os.fspath(folder)} has no checkpoint of step {found}; it has"
        f" {', '.join(map(str, sorted(steps)[-10:]))}."
      )
    path = steps[found]
  elif step not in (None, found):
    raise user_error.UserError(
      f"{os.fspath(path)} is the checkpoint of step {found}; remove @{step}."
    )
  return path, found


def _find_dcp(path: epath.Path) -> epath.Path | None:
  """Returns the directory with the metadata of a checkpoint of torch."""
  places = (path, path / _DCP_ITEM)
  return next((x for x in places if (x / dcp_files.METADATA).exists()), None)


def to_step(path: epath.Path) -> int | None:
  """Returns the step in the name of a checkpoint, or None."""
  matched = _CHECKPOINT.fullmatch(path.name)
  return int(matched[1]) if matched else None


def _read_metadata(
  path: epath.Path,
) -> tuple[float | None, dict[str, tuple[int, ...]]]:
  """Returns the version, and the shapes without padding by name."""
  file = path / _METADATA / _METADATA
  if path.is_file() or not file.exists():
    return None, {}
  text = files.read_text(file)
  try:
    content = json.loads(text)
    shapes = dict(_find_shapes((), content.get("train_state_metadata") or {}))
    return float(content["version"]), shapes
  except (ValueError, KeyError, TypeError, AttributeError) as error:
    raise user_error.UserError(
      f"{os.fspath(file)} is damaged: {type(error).__name__}: {error}."
    ) from error


def _find_shapes(
  path: tuple[str, ...], node: Mapping[str, Any]
) -> Iterator[tuple[str, tuple[int, ...]]]:
  if node.get(_TAG):
    if (shape := node.get(_UNPADDED)) is not None:
      # Orbax writes a sequence as a list, or as a map of its indices.
      sizes = shape.values() if isinstance(shape, dict) else shape
      yield ".".join(path), tuple(map(int, sizes))
    return
  for key, child in node.items():
    if isinstance(child, dict):
      yield from _find_shapes((*path, key), child)


_Make = Callable[
  [str, tuple[int, ...], np.dtype, Reader, Callable[[], tuple[int, ...]]],
  PaxArray,
]


def _make_array(
  shapes: Mapping[str, tuple[int, ...]],
  non_finite: set[str] | None,
  name: str,
  shape: tuple[int, ...],
  dtype: np.dtype,
  read: Reader,
  find_chunks: Callable[[], tuple[int, ...]],
) -> PaxArray:
  unpadded = shapes.get(name)
  if unpadded is not None and (
    len(unpadded) != len(shape)
    or any(a > b for a, b in zip(unpadded, shape, strict=True))
  ):
    raise user_error.UserError(
      f"{name} has shape {shape}, and {unpadded} without padding in the"
      " metadata of the checkpoint."
    )

  def read_checked(region: Region | None = None) -> np.ndarray:
    value = read(region)
    if jnp.issubdtype(dtype, jnp.floating) and not np.isfinite(value).all():
      if non_finite is None:
        raise user_error.UserError(
          f"{name} has values that are NaN or infinite; pass an earlier step as"
          " SRC@STEP, or --allow_non_finite to import them."
        )
      non_finite.add(name)
    return value

  return PaxArray(
    name=name,
    shape=shape,
    unpadded=unpadded,
    dtype=dtype,
    read=read_checked,
    find_chunks=find_chunks,
  )


def _list_messages(path: epath.Path, make: _Make) -> Iterator[PaxArray]:
  for leaf in flax_messages.list_leaves(path):
    rows = (1, *leaf.shape[1:])[: len(leaf.shape)]
    chunks = functools.partial(tuple, rows)
    yield make(leaf.name, leaf.shape, leaf.dtype, leaf.read, chunks)


def _list_dcp(folder: epath.Path, make: _Make) -> Iterator[PaxArray]:
  for each in dcp_files.list_tensors(folder):
    # Any region can be read; those of whole rows are contiguous.
    chunks = (*(1 for _ in each.shape[1:]), *each.shape[-1:])
    array = make(
      each.name,
      each.shape,
      each.dtype,
      each.read,
      functools.partial(tuple, chunks),
    )
    yield dataclasses.replace(array, unpadded=each.shape)


def _list_folders(state: epath.Path) -> Iterator[tuple[epath.Path, str]]:
  """Yields the directory of each array, and the file that describes it."""
  for folder in sorted(state.iterdir(), key=lambda each: each.name):
    for file in _FORMATS:
      if folder.is_dir() and (folder / file).exists():
        yield folder, file


def _list_zarr(
  state: epath.Path, make: _Make, filled: set[str]
) -> Iterator[PaxArray]:
  for folder, file in _list_folders(state):
    spec = drivers.make_kvstore_spec(os.fspath(folder))
    text = files.read_bytes(folder / file)
    yield _describe(folder.name, file, spec, text, make, filled)


def _list_ocdbt(
  state: epath.Path, make: _Make, filled: set[str]
) -> Iterator[PaxArray]:
  base = drivers.make_kvstore_spec(os.fspath(state))
  try:
    store = ts.KvStore.open({"driver": "ocdbt", "base": base}).result()
    keys = sorted(key.decode() for key in store.list().result())
    for key in keys:
      name, _, file = key.rpartition("/")
      if file in _FORMATS:
        text = store.read(key).result().value
        spec = {"driver": "ocdbt", "base": base, "path": f"{name}/"}
        yield _describe(name, file, spec, text, make, filled)
  # TensorStore raises ValueError for all damage.
  except ValueError as error:
    raise _make_damaged_error(os.fspath(state), error) from error


def _describe(
  name: str,
  file: str,
  spec: dict[str, Any],
  text: bytes,
  make: _Make,
  filled: set[str],
) -> PaxArray:
  """Returns an array from the JSON text that describes it."""
  try:
    found = json.loads(text)
    dtype = found["dtype"] if file == ".zarray" else found["data_type"]
    shape = tuple(map(int, found["shape"]))
    dtype = jnp.dtype(dtype)
  except (ValueError, KeyError, TypeError) as error:
    raise _make_damaged_error(f"{name}/{file}", error) from error
  stored = _Stored(name, {"driver": _FORMATS[file], "kvstore": spec}, filled)
  return make(name, shape, dtype, stored.read, stored.find_chunks)


class _Stored:
  """An array of TensorStore."""

  def __init__(self, name: str, spec: dict[str, Any], filled: set[str]) -> None:
    self._name, self._spec, self._filled = name, spec, filled

  @functools.cached_property
  def _store(self) -> ts.TensorStore:
    # No copies of chunks beyond those being read.
    context = ts.Context({"cache_pool": {"total_bytes_limit": 0}})
    spec = {**self._spec, "fill_missing_data_reads": False}
    return ts.open(spec, open=True, context=context).result()

  def find_chunks(self) -> tuple[int, ...]:
    """Returns the shape of its chunks."""
    try:
      store = self._store
    except ValueError as error:
      raise _make_damaged_error(self._name, error) from error
    chunks = store.chunk_layout.read_chunk.shape or store.shape
    # A dimension without a chunk size is not split.
    return tuple(a or b for a, b in zip(chunks, store.shape, strict=True))

  def read(self, region: Region | None = None) -> np.ndarray:
    """Returns it, or a region of it."""
    at = ... if region is None else region
    try:
      try:
        return self._store[at].read().result()
      except ValueError as error:
        if not str(error).startswith("NOT_FOUND"):
          raise
        self._filled.add(self._name)
        spec = {**self._spec, "fill_missing_data_reads": True}
        return ts.open(spec, open=True).result()[at].read().result()
    except ValueError as error:
      raise _make_damaged_error(self._name, error) from error


def _make_damaged_error(
  name: str, error: BaseException
) -> user_error.UserError:
  lines = str(error).splitlines() or [type(error).__name__]
  reason = lines[0].partition(" [tensorstore_spec=")[0][:300]
  return user_error.UserError(f"{name} cannot be read: {reason}.")
