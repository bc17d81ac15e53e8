"""Checkpoints near the accelerator: on a local disk of each host.

Each process saves the shards of its devices to a directory of its host, which
may be in memory (`/dev/shm`), and also those of a process on the next host
that no other process has. So the shards of a lost host are still on another
one. The copies travel by `jax.device_put` onto a mesh whose devices are those
of the next host.

A save is complete if the shards that are left cover all arrays, wherever they
are and whichever process wrote them. `restore` reads what is on its own host;
other shards are broadcast by a process that has them. So any mesh and any
number of processes can read it.

The newest complete save is kept until the next one is complete on all
processes. Its layout:

  LOCAL_DIR/RUN/STEP.SAVE/PROCESS/{data.bin,index.json}
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent import futures
import contextlib
import dataclasses
import math
import os
import pathlib
import re
import shutil
import socket
import sys
import time
from typing import Any
import uuid

from etils import epath
import jax
import jax.numpy as jnp
import numpy as np

from paxon.runner import files, user_error
from paxon.runner import run_dir as run_dirs
from paxon.runner.checkpoints import checkpointer, named_tree, shard_files
from paxon.runner.hosts import agreement

Box = shard_files.Box
FLAG = "--local_checkpoint_dir"


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Save:
  """A complete save.

  Attributes:
    step: Number of completed training steps.
    name: The name of its folder.
    header: The step, the position of the data, and the arrays.
    held: The readable shards, by process.
    shards: The shards of this process.
  """

  step: int
  name: str
  header: Mapping[str, Any]
  held: Sequence[Collection[Box]]
  shards: Mapping[Box, shard_files.Shard]


class LocalTier:
  """The checkpoints of one run on the disks of its hosts.

  All methods are called by all processes, in the same order.
  """

  def __init__(self, folder: str | os.PathLike[str], run_dir: epath.Path):
    """Finds the newest complete checkpoint.

    Args:
      folder: Directory of this host; processes of one host may share it.
      run_dir: The run directory, which has the name of the run.

    Raises:
      user_error.UserError: A process cannot write to its directory.
    """
    parent = pathlib.Path(os.path.abspath(folder))
    # First: a run that cannot start leaves no files.
    _check_writable(parent)
    self._folder = parent / agreement.from_first(lambda: _find_run(run_dir))
    self._pool = futures.ThreadPoolExecutor(1, "local-checkpoint")
    self._pending: tuple[int, str, futures.Future[None]] | None = None
    self._has_failed = False
    self._neighbour = _find_neighbours()
    self._lonely: dict[str, Collection[Box]] = {}
    # The newest complete save: its step and the name of its folder.
    self._newest: tuple[int, str] | None = None
    self._found = self._find()
    if self._found is not None:
      self._newest = self._found.step, self._found.name

  @property
  def step(self) -> int | None:
    """The step of the newest complete checkpoint, None if there is none."""
    return None if self._newest is None else self._newest[0]

  def save(
    self, step: int, tree: Any, *, specs: Any, data: Mapping[str, Any]
  ) -> None:
    """Copies a state to the host and starts writing it.

    The arrays may be donated when it returns. Waits for the save before. A
    failure, such as a full disk, is only reported: the run directory has
    checkpoints, too.

    Args:
      step: Number of completed training steps.
      tree: A pytree of arrays.
      specs: The same pytree of `VariableSpec`.
      data: The position of the training data after these steps; JSON values.
    """
    self.wait()
    if step == self.step:
      return
    shards = self._copy_to_host(tree, specs)
    name = f"{step}.{agreement.from_first(lambda: uuid.uuid4().hex[:8])}"
    header = {
      "format_version": named_tree.FORMAT_VERSION,
      "step": step,
      "time": time.time(),
      "data": dict(data),
      "arrays": named_tree.describe(specs),
    }
    folder = self._folder / name / str(jax.process_index())
    self._pending = (
      step,
      name,
      self._pool.submit(
        shard_files.write, folder, _take_all(shards), header=header
      ),
    )

  def wait(self) -> None:
    """Waits for the pending save of all processes; deletes the one before."""
    if self._pending is None:
      return
    step, name, future = self._pending
    self._pending = None
    # Listed before the others can have started another save.
    older = [path for path in _list(self._folder) if path.name != name]
    problem = None
    try:
      future.result()
    except OSError as error:
      problem = f"{error.strerror or error} on {socket.gethostname()}"
    problems = [each for each in agreement.gather(problem) if each]
    if problems:
      shutil.rmtree(self._folder / name, ignore_errors=True)
      self._report_failure(step, problems[0])
      return
    self._newest, self._found, self._has_failed = (step, name), None, False
    for path in older:
      shutil.rmtree(path, ignore_errors=True)

  def _report_failure(self, step: int, problem: str) -> None:
    """Prints a line for the first of several failures in sequence."""
    if agreement.is_first() and not self._has_failed:
      _warn(
        f"the local checkpoint of step {step} could not be written ({problem});"
        " the run continues with the checkpoints of its directory"
      )
    self._has_failed = True

  def restore(self, *, specs: Any, shardings: Any) -> checkpointer.Restored:
    """Reads the newest checkpoint onto any mesh.

    Args:
      specs: A pytree of `VariableSpec`.
      shardings: The same pytree of shardings.

    Raises:
      named_tree.CheckpointMismatchError: It does not fit the specs.
      checkpointer.DamagedCheckpointError: Its files were damaged since they
        were written by this process; it is not used any more.
    """
    assert self._newest is not None
    step, name = self._newest
    save = self._found or self._open(name)
    if save is None:
      self._newest = None
      raise checkpointer.DamagedCheckpointError(
        f"The local checkpoint of step {step} is damaged: shards are missing"
      )
    named_tree.check_version(
      save.header["format_version"], where=f"The local checkpoint {save.name}"
    )
    named_tree.check(
      save.header["arrays"],
      specs=specs,
      where=f"The local checkpoint of step {save.step}",
    )
    leaves = jax.tree.leaves(specs)
    targets = jax.tree.structure(specs).flatten_up_to(shardings)
    stored = _group_by_name(box for held in save.held for box in held)
    plans = [
      _plan(spec, sharding, stored[spec.name])
      for spec, sharding in zip(leaves, targets, strict=True)
    ]
    here = save.held[jax.process_index()]
    missing = {box for plan in plans for box in plan.read if box not in here}
    asked = agreement.gather([box.to_json() for box in sorted(missing)])
    sources = {
      box: next(p for p, held in enumerate(save.held) if box in held)
      for each in asked
      for box in map(Box.from_json, each)
    }
    receivers = sum(bool(each) for each in asked)
    print(
      f"reading the local checkpoint of step {save.step}"
      + f"; {receivers} of {len(asked)} processes read shards of another host"
      * bool(receivers),
      flush=True,
    )
    arrays = [plan.make(save.shards, sources) for plan in plans]
    return checkpointer.Restored(
      tree=jax.tree.unflatten(jax.tree.structure(specs), arrays),
      data=save.header["data"],
      step=save.step,
    )

  def clear(self, *, until: int | None = None) -> None:
    """Deletes all checkpoints of this run from this host.

    Args:
      until: Does nothing if one of a later step exists or is being written.
    """
    last = self.step if self._pending is None else self._pending[0]
    if until is None or last is None or last <= until:
      shutil.rmtree(self._folder, ignore_errors=True)
      self._newest = None

  def close(self) -> None:
    """Ends the background thread."""
    self._pool.shutdown()

  def _find(self) -> _Save | None:
    """Returns the newest complete save that is left."""
    names = {
      name
      for each in agreement.gather([p.name for p in _list(self._folder)])
      for name in each
    }
    for name in sorted(names, key=_parse_step, reverse=True):
      if (found := self._open(name)) is not None:
        return found
      if agreement.is_first():
        _warn(
          f"the local checkpoint of step {_parse_step(name)} is incomplete, and"
          " not used"
        )
    return None

  def _open(self, name: str) -> _Save | None:
    """Returns a save if the processes have all of its shards, undamaged."""
    indexes = [
      index
      for folder in _list(self._folder / name)
      if (index := shard_files.read_index(folder)) is not None
    ]
    shards = [each for index in indexes for each in index.shards]
    intact = {each.box: each for each in shards if each.is_intact()}
    for path in {each.path for each in shards if each.box not in intact}:
      _warn(f"{path} on {socket.gethostname()} is damaged")
    held = [
      frozenset(map(Box.from_json, each))
      for each in agreement.gather([box.to_json() for box in sorted(intact)])
    ]
    headers = agreement.gather(indexes[0].header if indexes else None)
    header = next((each for each in headers if each is not None), None)
    if header is None or not _is_complete(header["arrays"], held):
      return None
    return _Save(
      step=_parse_step(name), name=name, header=header, held=held, shards=intact
    )

  def _copy_to_host(
    self, tree: Any, specs: Any
  ) -> list[tuple[Box, shard_files.Array]]:
    """Returns the shards to write, own and copied, in host memory."""
    named = {
      spec.name: array
      for spec, array in zip(
        jax.tree.leaves(specs),
        jax.tree.structure(specs).flatten_up_to(tree),
        strict=True,
      )
    }
    shards = []
    for name, array in named.items():
      own = _unique_shards(name, array)
      for shard in own.values():
        shard.copy_to_host_async()
      if self._neighbour:
        lonely = self._find_lonely(name, array)
        if lonely:
          # One array at a time, because it needs memory of the devices.
          copy = jax.device_put(array, _move(array.sharding, self._neighbour))
          moved = _unique_shards(name, copy)
          shards += [(b, _to_host(x)) for b, x in moved.items() if b in lonely]
          del copy, moved
      shards += [(box, _to_host(shard)) for box, shard in own.items()]
    return shards

  def _find_lonely(self, name: str, array: jax.Array) -> Collection[Box]:
    """Returns the boxes of an array that only one process has."""
    if name not in self._lonely:
      owners: dict[Box, set[int]] = {}
      indices = array.sharding.devices_indices_map(array.shape)
      for device, index in indices.items():
        box = Box.from_index(name, index, array.shape)
        owners.setdefault(box, set()).add(device.process_index)
      self._lonely[name] = frozenset(
        box for box, found in owners.items() if len(found) == 1
      )
    return self._lonely[name]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Plan:
  """How an array is put together.

  Attributes:
    name: Its logical name.
    shape: Its shape.
    dtype: Its dtype.
    sharding: Where it is placed.
    targets: The parts that the devices of this process need.
    read: The stored shards that overlap with them.
    stored: All stored shards of the array.
  """

  name: str
  shape: tuple[int, ...]
  dtype: Any
  sharding: jax.sharding.Sharding
  targets: Collection[Box]
  read: Collection[Box]
  stored: Collection[Box]

  def make(
    self,
    shards: Mapping[Box, shard_files.Shard],
    sources: Mapping[Box, int],
  ) -> jax.Array:
    """Reads, broadcasts and places the array.

    Args:
      shards: The shards of this host.
      sources: Processes that broadcast shards, by shard.
    """
    values = {box: np.empty(box.shape, self.dtype) for box in self.targets}
    for box in sorted(self.stored):
      if box in sources:
        data = self._receive(box, shards.get(box), sources[box])
      elif box in self.read:
        data = shards[box].read()
      else:
        continue
      for target, array in values.items():
        if common := target.overlap(box):
          array[common.within(target)] = data[common.within(box)]
    return jax.make_array_from_callback(
      self.shape,
      self.sharding,
      lambda index: values[Box.from_index(self.name, index, self.shape)],
    )

  def _receive(
    self, box: Box, shard: shard_files.Shard | None, source: int
  ) -> shard_files.Array:
    own = b""
    if shard is not None and source == jax.process_index():
      own = shard_files.to_bytes(shard.read())
    size = box.size * jnp.dtype(self.dtype).itemsize
    data = agreement.broadcast_sized(own, size=size, source=source)
    return data.view(self.dtype).reshape(box.shape)


def _plan(
  spec: Any, sharding: jax.sharding.Sharding, stored: Collection[Box]
) -> _Plan:
  indices = sharding.addressable_devices_indices_map(spec.shape)
  targets = {
    Box.from_index(spec.name, index, spec.shape) for index in indices.values()
  }
  return _Plan(
    name=spec.name,
    shape=spec.shape,
    dtype=spec.dtype,
    sharding=sharding,
    targets=targets,
    read={box for box in stored if any(map(box.overlap, targets))},
    stored=stored,
  )


def _check_writable(folder: pathlib.Path) -> None:
  problem = None
  try:
    probe = folder / f"probe-{uuid.uuid4().hex[:8]}"
    probe.mkdir(parents=True)
    probe.rmdir()
  except OSError as error:
    problem = f"{FLAG}={folder} cannot be written to on {socket.gethostname()}:"
    problem += f" {error.strerror}."
  for each in agreement.gather(problem):
    if each is not None:
      raise user_error.UserError(each)


def _find_run(run_dir: epath.Path) -> str:
  """Returns a name of the run, which it keeps in its directory.

  A copy of the directory is another run, so its path is kept, too.
  """
  path = run_dir / run_dirs.LOCAL_CHECKPOINTS
  directory = os.path.normpath(os.fspath(run_dir))
  with contextlib.suppress(FileNotFoundError):
    found = files.read_json(path, _to_run, kind="a run")
    if found["directory"] == directory:
      return found["run"]
    _warn(
      f"the local checkpoints of {found['directory']} are not used, because"
      f" this run directory is {directory}"
    )
  run = uuid.uuid4().hex
  files.write_text(path, files.to_json({"run": run, "directory": directory}))
  return run


def _to_run(value: Any) -> dict[str, str]:
  found = files.to_object(value)
  # The name of a folder that is deleted.
  if not re.fullmatch("[0-9a-f]{32}", found["run"]):
    raise ValueError("'run' must have 32 hexadecimal digits")
  return {name: str(found[name]) for name in ("run", "directory")}


def forget_run(run_dir: epath.Path) -> None:
  """Removes the name of a run, so that its local checkpoints are not found."""
  path = run_dir / run_dirs.LOCAL_CHECKPOINTS
  if path.exists():
    path.unlink()


def _find_neighbours() -> Mapping[jax.Device, jax.Device]:
  """Returns for each device that of the process that keeps its copy.

  It is on another host, if there are several.
  """
  if agreement.is_alone():
    return {}
  hosts = agreement.gather(socket.gethostname())
  count = len(hosts)
  distance = next(
    (
      distance
      for distance in range(1, count)
      if all(hosts[p] != hosts[(p + distance) % count] for p in range(count))
    ),
    1,
  )
  devices: dict[int, list[jax.Device]] = {p: [] for p in range(count)}
  for device in jax.devices():
    devices[device.process_index].append(device)
  return {
    device: neighbour
    for p in range(count)
    for device, neighbour in zip(
      devices[p], devices[(p + distance) % count], strict=True
    )
  }


def _move(
  sharding: jax.sharding.Sharding, to: Mapping[jax.Device, jax.Device]
) -> jax.sharding.NamedSharding:
  """Returns a sharding over the same mesh with other devices."""
  assert isinstance(sharding, jax.sharding.NamedSharding)
  mesh = sharding.mesh
  devices = np.empty_like(mesh.devices)
  devices.flat[:] = [to[device] for device in mesh.devices.flat]
  return jax.sharding.NamedSharding(
    jax.sharding.Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types),
    sharding.spec,
    memory_kind=sharding.memory_kind,
  )


def _unique_shards(name: str, array: jax.Array) -> dict[Box, jax.Array]:
  """Returns the shards of this process, without replicas."""
  return {
    Box.from_index(name, shard.index, array.shape): shard.data
    for shard in array.addressable_shards
  }


def _to_host(shard: jax.Array) -> shard_files.Array:
  # A copy, because on CPUs the array is the memory of the device.
  return np.array(shard, order="C", copy=True)


def _take_all(
  shards: list[tuple[Box, shard_files.Array]],
) -> Iterator[tuple[Box, shard_files.Array]]:
  """Yields shards, each of which is freed when it has been used."""
  shards.reverse()
  while shards:
    yield shards.pop()


def _group_by_name(boxes: Iterator[Box]) -> dict[str, set[Box]]:
  found: dict[str, set[Box]] = {}
  for box in boxes:
    found.setdefault(box.name, set()).add(box)
  return found


def _is_complete(
  arrays: Mapping[str, Any], held: Sequence[Collection[Box]]
) -> bool:
  """Whether the boxes, which are equal or disjoint, cover all arrays."""
  found = _group_by_name(box for each in held for box in each)
  return all(
    sum(box.size for box in found.get(name, ())) == math.prod(each["shape"])
    for name, each in arrays.items()
  )


def _warn(text: str) -> None:
  print(f"warning: {text}", file=sys.stderr, flush=True)


def _list(folder: pathlib.Path) -> list[pathlib.Path]:
  """Returns the folders in a folder, which may not exist."""
  try:
    return [each for each in folder.iterdir() if each.name[0].isdigit()]
  except (FileNotFoundError, NotADirectoryError):
    return []


def _parse_step(name: str) -> int:
  step = name.partition(".")[0]
  return int(step) if step.isdigit() else -1
