"""Saves and restores the state of a run with orbax.

A checkpoint of step s is the folder `s/` with four items:

  state      the arrays, by logical names
  data       the position of the training data after s steps, JSON
  metadata   format version, step, time, and each array's shape, dtype and
             axes, JSON
  manifest   the size and checksum of each file of the other three, JSON

Saving copies the arrays to the host and returns; writing goes on in the
background. A folder gets its final name only when it is complete, manifest
included, so a killed process leaves the checkpoint before as the latest one.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import json
import time
from types import TracebackType
from typing import Any

from etils import epath
import jax
import orbax.checkpoint as ocp

from paxon.runner.checkpoints import (
  checked_item,
  compatibility,
  lazy_array,
  manifest,
  named_tree,
  orbax_noise,
)
from paxon.runner.checkpoints import retention as retention_lib
from paxon.runner.hosts import agreement
from paxon.runner.settings import training

_STATE, _DATA, _METADATA = "state", "data", "metadata"
_MANIFEST = "manifest"
# Orbax calls it so in the folder of a JSON item.
_JSON_FILE = "metadata"
_HAS_MANIFEST = 2
# Of larger arrays each device moves its part to the host.
_ONE_COPY_BYTES = 2**20


class DamagedCheckpointError(Exception):
  """A checkpoint cannot be read; the message names its folder and files."""


class SaveError(Exception):
  """A checkpoint could not be written; the message says why."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Restored:
  """What a checkpoint held.

  Attributes:
    tree: Arrays, in the structure of the specs that were asked for.
    data: The position of the training data.
    step: The number of training steps before the checkpoint.
  """

  tree: Any
  data: Mapping[str, Any]
  step: int


class Checkpointer:
  """The checkpoints in one folder. Use it as a context, or call `close`."""

  def __init__(
    self,
    folder: epath.Path,
    *,
    retention: training.Retention | None = None,
    read_only: bool = False,
    lazy: bool = False,
  ) -> None:
    """Opens a folder.

    Args:
      folder: Made when missing, unless read only.
      retention: Which checkpoints are kept; `None` for all.
      read_only: Never changes the folder, which another process may write to.
      lazy: Trees that are saved have leaves of `lazy_array.LazyArray`, written
        one by one before `save` returns.
    """
    self._folder = folder
    self._lazy = lazy
    self._read_only = read_only
    self._retention = retention or training.Retention(newest=None)
    self._value: Callable[[int], float | None] = lambda step: None
    self._values: dict[int, float | None] = {}
    self._times: dict[int, float] = {}
    self._left_out = set[int]()
    self._manager: ocp.CheckpointManager | None = None
    self._end_silence = orbax_noise.silence()
    if folder.exists() or not read_only:
      self._manager = self._open()

  def _open(self) -> ocp.CheckpointManager:
    if self._read_only:
      # Other defaults do not go with it, and orbax warns of each.
      options = ocp.CheckpointManagerOptions(
        read_only=True, create=False, save_interval_steps=0
      )
    else:
      options = ocp.CheckpointManagerOptions(
        # Cleans up what a killed process left unfinished.
        cleanup_tmp_directories=True,
        preservation_policy=_Policy(self._is_kept),
        # Where folders are made in the background and that fails, orbax's
        # writing threads wait for them, and the process cannot exit.
        async_options=ocp.AsyncOptions(create_directories_asynchronously=False),
      )
    return ocp.CheckpointManager(
      self._folder,
      options=options,
      item_handlers={
        _STATE: lazy_array.handler()
        if self._lazy
        else ocp.PyTreeCheckpointHandler(),
        _DATA: ocp.JsonCheckpointHandler(),
        _METADATA: ocp.JsonCheckpointHandler(),
        # Comes last, because items are finished in this order.
        _MANIFEST: checked_item.ManifestHandler((_STATE, _DATA, _METADATA)),
      },
    )

  def __enter__(self) -> "Checkpointer":
    return self

  def __exit__(
    self,
    exception_type: type[BaseException] | None,
    exception: BaseException | None,
    traceback: TracebackType | None,
  ) -> None:
    if exception is not None and not agreement.is_alone():
      # A save under way would wait for a process that may be gone.
      self._manager = None
    self.close()

  def steps(self) -> list[int]:
    """Returns the steps of all complete checkpoints, in order.

    Those that were left out are not among them.
    """
    steps = self._manager.all_steps() if self._manager else ()
    return sorted(set(steps) - self._left_out)

  def latest_step(self) -> int | None:
    """Returns the step of the newest complete checkpoint, `None` without."""
    steps = self.steps()
    return steps[-1] if steps else None

  def leave_out(self, step: int) -> None:
    """Treats a checkpoint as if it were not there, because it is damaged.

    Its files stay until its step is saved anew. It does not count as one of
    those that are kept.

    Args:
      step: Of the checkpoint.
    """
    self._left_out.add(step)

  def rank_by(self, value: Callable[[int], float | None]) -> None:
    """Sets what the best checkpoints are told by.

    Args:
      value: Gives the metric of the retention at a step; `None` where it is
        not known. It is asked at each save.
    """
    self._value = value

  def save(
    self, step: int, tree: Any, *, specs: Any, data: Mapping[str, Any]
  ) -> None:
    """Starts saving; the arrays may be donated as soon as it returns.

    Waits for the save before, if that is still under way. Does nothing if this
    step is already saved. When it is complete, checkpoints that are not to be
    kept are deleted.

    Args:
      step: The number of training steps made.
      tree: A pytree of arrays.
      specs: The same pytree of `VariableSpec`.
      data: The position of the training data after these steps; JSON values.

    Raises:
      SaveError: This save, or the one before, failed.
    """
    if self._manager is None or self._read_only:
      raise ValueError(f"{self._folder} is open for reading only, or closed.")
    if step in self.steps():
      return
    self._values = {each: self._value(each) for each in self.steps()}
    # Which checkpoints are kept depends on it, and all processes agree on that.
    self._times[step] = agreement.from_first(time.time)
    metadata = {
      "format_version": compatibility.FORMAT_VERSION,
      "step": step,
      "time": self._times[step],
      "arrays": compatibility.describe(specs),
    }
    args = ocp.args.Composite(
      **{
        _STATE: ocp.args.PyTreeSave(
          jax.tree.map(_one_copy, named_tree.to_named(tree, specs=specs))
        ),
        _DATA: ocp.args.JsonSave(dict(data)),
        _METADATA: ocp.args.JsonSave(metadata),
        _MANIFEST: checked_item.ManifestArgs(),
      }
    )
    with self._saving():
      if step in self._left_out:
        self._manager.delete(step)
        self._left_out.remove(step)
      # Forced, because a later one that is damaged may be there.
      self._manager.save(step, args=args, force=True)

  def _is_kept(
    self, steps: Sequence[int], times: Sequence[float]
  ) -> list[bool]:
    """Decides at a save; the newest of the steps is being saved."""
    saved = [
      retention_lib.Saved(step=step, time=self._time(step, otherwise=time))
      for step, time in zip(steps, times, strict=True)
      if step not in self._left_out
    ]
    reasons = retention_lib.reasons_to_keep(
      self._retention, saved, value=self._values.get
    )
    return [step in self._left_out or bool(reasons[step]) for step in steps]

  def _time(self, step: int, *, otherwise: float) -> float:
    """Returns when a checkpoint was saved, in seconds since the epoch."""
    if step not in self._times:
      try:
        self._times[step] = float(self._metadata(step)["time"])
      # Format version 1 has none; and a damaged one is found when it is read.
      except (DamagedCheckpointError, KeyError, TypeError, ValueError):
        self._times[step] = otherwise
    return self._times[step]

  def describe(self, step: int) -> dict[str, Any]:
    """Returns what a checkpoint says of itself, as JSON values.

    Args:
      step: Of the checkpoint.

    Returns:
      `format_version`, `step`, `time` (since format version 2, seconds since
      the epoch), `arrays` (shape, dtype and axes by name) and `checksums` (size
      and CRC-32 by file; `None` before format version 2).

    Raises:
      DamagedCheckpointError: The metadata or the manifest cannot be read.
    """
    entries = self._entries(step)
    return {
      **self._metadata(step),
      "checksums": None
      if entries is None
      else {name: dataclasses.asdict(each) for name, each in entries.items()},
    }

  def verify(self, step: int) -> None:
    """Reads all files of a checkpoint and compares their checksums.

    Args:
      step: Of the checkpoint. One of format version 1 has no checksums, and
        only its metadata is read.

    Raises:
      DamagedCheckpointError: Files are missing, incomplete or changed; the
        message names them.
      CheckpointMismatchError: A later version of this program has written it.
    """
    self._verify(step)

  def _verify(self, step: int) -> dict[str, Any]:
    """Returns the metadata of a checkpoint that is as it was written.

    Of several processes each reads its share of the files, and what one of them
    finds is raised by all.
    """
    if agreement.is_alone():
      return self._verify_share(step)
    metadata, problem = {}, None
    try:
      metadata = self._verify_share(step)
    except DamagedCheckpointError as error:
      problem = str(error)
    _agree_on(problem)
    return metadata

  def _verify_share(self, step: int) -> dict[str, Any]:
    path = self._folder / str(step)
    entries = self._entries(step)
    if entries is not None:
      # First, because the version in it says what the rest means.
      own = {n: e for n, e in entries.items() if n.startswith(f"{_METADATA}/")}
      self._refuse(step, manifest.problems(path, own))
    metadata = self._metadata(step)
    version = metadata["format_version"]
    compatibility.check_version(version, where=f"The checkpoint {path}")
    if entries is not None:
      share = agreement.share(sorted(entries))
      self._refuse(
        step, manifest.problems(path, {n: entries[n] for n in share})
      )
    elif version >= _HAS_MANIFEST:
      self._refuse(step, [f"{_MANIFEST}/{checked_item.FILE_NAME} is missing"])
    return metadata

  def _entries(self, step: int) -> dict[str, manifest.Entry] | None:
    name = f"{_MANIFEST}/{checked_item.FILE_NAME}"
    try:
      return manifest.from_text((self._folder / str(step) / name).read_text())
    except FileNotFoundError:
      return None
    except (OSError, ValueError) as error:
      raise self._damaged(step, f"{name}: {_first_line(error)}") from error

  def _metadata(self, step: int) -> dict[str, Any]:
    name = f"{_METADATA}/{_JSON_FILE}"
    try:
      metadata = json.loads((self._folder / str(step) / name).read_text())
      if not isinstance(metadata["format_version"], int):
        raise ValueError("its format_version is no number")
    except (OSError, ValueError, KeyError, TypeError) as error:
      raise self._damaged(step, f"{name}: {_first_line(error)}") from error
    return metadata

  def _refuse(self, step: int, problems: list[str]) -> None:
    if problems:
      more = len(problems) - 1
      also = f" (and {more} more)" if more else ""
      raise self._damaged(step, f"{problems[0]}{also}")

  def _damaged(self, step: int, what: str) -> DamagedCheckpointError:
    return DamagedCheckpointError(
      f"The checkpoint {self._folder / str(step)} is damaged: {what}"
    )

  def restore(self, step: int, *, specs: Any, shardings: Any) -> Restored:
    """Reads a checkpoint, placed for the mesh at hand, after verifying it.

    Args:
      step: Of the checkpoint.
      specs: A pytree of `VariableSpec`; it may leave out whole collections.
      shardings: The same pytree of shardings.

    Raises:
      CheckpointMismatchError: The checkpoint does not fit the specs.
      DamagedCheckpointError: Its files are incomplete or changed, for one of
        several processes at least.
    """
    if self._manager is None:
      raise ValueError(f"{self._folder} does not exist.")
    metadata = self._verify(step)
    restored, problem, cause = None, None, None
    try:
      restored = self._read(metadata, step, specs, shardings)
    # Of the metadata, which are the same for all processes.
    except compatibility.CheckpointMismatchError:
      raise
    # What orbax raises depends on the file; its other causes are tested here.
    except Exception as error:
      what = f"{type(error).__name__}: {_first_line(error)}"
      problem = str(self._damaged(step, f"it cannot be read ({what})"))
      cause = error
    _agree_on(problem, cause=cause)
    assert restored is not None
    return restored

  def _read(
    self,
    metadata: Mapping[str, Any],
    step: int,
    specs: Any,
    shardings: Any,
  ) -> Restored:
    path = self._folder / str(step)
    compatibility.check(
      metadata["arrays"],
      specs=specs,
      version=metadata["format_version"],
      where=f"The checkpoint {path}",
    )
    wanted = named_tree.to_named(
      jax.tree.map(
        lambda spec, sharding: jax.ShapeDtypeStruct(
          spec.shape, spec.dtype, sharding=sharding
        ),
        specs,
        shardings,
      ),
      specs=specs,
    )
    # Not by the manager: it ends with a barrier of all devices, and where one
    # process fails before, the others' barrier meets what that one does next.
    with contextlib.closing(ocp.PyTreeCheckpointHandler()) as handler:
      named = handler.restore(
        path / _STATE,
        args=ocp.args.PyTreeRestore(
          item=wanted,
          restore_args=ocp.checkpoint_utils.construct_restore_args(wanted),
          partial_restore=True,
        ),
      )
    return Restored(
      tree=named_tree.from_named(named, specs=specs),
      data=json.loads((path / _DATA / _JSON_FILE).read_text()),
      step=metadata["step"],
    )

  def wait(self) -> None:
    """Returns when all saves are complete.

    Raises:
      SaveError: One of them failed, such as on a full disk.
    """
    if self._manager:
      with self._saving():
        self._manager.wait_until_finished()

  def close(self) -> None:
    """Waits for saves under way and ends the background threads."""
    try:
      if self._manager:
        self._manager.close()
    finally:
      self._manager = None
      self._end_silence()

  @contextlib.contextmanager
  def _saving(self) -> Iterator[None]:
    try:
      yield
    # What orbax raises depends on where it failed.
    except Exception as error:
      # Closing would wait for the failed save, and raise it again.
      self._manager = None
      # Orbax's threads may end later than this object, and would be heard.
      self._end_silence = lambda: None
      orbax_noise.silence_what_follows_a_failure()
      raise SaveError(
        f"A checkpoint could not be written to {self._folder}: {_reason(error)}"
      ) from error


class _Policy:
  """Asks a function which checkpoints orbax shall keep."""

  def __init__(
    self, is_kept: Callable[[Sequence[int], Sequence[float]], list[bool]]
  ) -> None:
    self._is_kept = is_kept

  def should_preserve(
    self,
    # Orbax's `PolicyCheckpointInfo`, which cannot be checked at run time.
    checkpoints: Sequence[Any],
    *,
    context: ocp.checkpoint_managers.PreservationContext,
  ) -> Sequence[bool]:
    """Returns the decision of each."""
    del context
    return self._is_kept(
      [info.step for info in checkpoints],
      [info.time.timestamp() for info in checkpoints],
    )


def _agree_on(
  problem: str | None, *, cause: BaseException | None = None
) -> None:
  """Raises on all processes what one of them has found.

  Args:
    problem: Of this process; None without one.
    cause: What it was made from.

  Raises:
    DamagedCheckpointError: The first process's problem that has one.
  """
  for each in agreement.gather(problem):
    if each is not None:
      raise DamagedCheckpointError(each) from cause


def _reason(error: BaseException) -> str:
  """Returns why a write failed: of TensorStore's long story the last clause."""
  story = _first_line(error).partition(" [tensorstore_spec=")[0]
  return story.rpartition('": ')[2]


def _one_copy(x: Any) -> Any:
  """Returns a small array without the copies that further devices have.

  Orbax would have each copy write a slice, and compile a program for every
  shape and device at the first save.

  Args:
    x: A leaf of what is saved. Only arrays of this process alone are changed.
  """
  sharding = getattr(x, "sharding", None)
  if (
    not isinstance(sharding, jax.sharding.NamedSharding)
    or x.nbytes > _ONE_COPY_BYTES
    or not x.is_fully_addressable
  ):
    return x
  mesh, spec = sharding.mesh, sharding.spec
  used = {name for entry in spec for name in jax.tree.leaves(entry)}
  devices = mesh.devices[
    tuple(slice(None if n in used else 1) for n in mesh.axis_names)
  ]
  if devices.size == mesh.size:
    return x
  parts = {shard.device: shard.data for shard in x.addressable_shards}
  return jax.make_array_from_single_device_arrays(
    x.shape,
    jax.sharding.NamedSharding(
      jax.sharding.Mesh(devices, mesh.axis_names),
      spec,
      memory_kind=sharding.memory_kind,
    ),
    [parts[device] for device in devices.flat],
  )


def _first_line(error: BaseException) -> str:
  lines = str(error).splitlines()
  return lines[0] if lines else type(error).__name__
