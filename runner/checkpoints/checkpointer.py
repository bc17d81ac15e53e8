"""Saving and restoring the state of a run with orbax.

A checkpoint of step s is the directory `s/` with four items:

  state      the arrays, by logical names
  data       the position of the training data after s steps, JSON
  metadata   format version, step, time, and each array's shape, dtype and
             axes, JSON
  manifest   the size and checksum of each file of the other three, JSON

Saving copies the arrays to the host and returns; files are written in the
background. A directory gets its final name when it is complete, including the
manifest, so a killed process leaves the previous checkpoint as the latest one.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import json
import os
import time
from typing import Any
import uuid

from etils import epath
import jax
import orbax.checkpoint as ocp

from paxon.runner import files, user_error
from paxon.runner.checkpoints import (
  lazy_array,
  manifest,
  named_tree,
  orbax_output,
  unreadable,
)
from paxon.runner.checkpoints import retention as retention_lib
from paxon.runner.hosts import agreement, process_failures
from paxon.runner.settings import training
from paxon.runner.stores import drivers
from paxon.sharding import variables

_STATE, _DATA, _METADATA = "state", "data", "metadata"
_MANIFEST = "manifest"
# Orbax's own metadata of a checkpoint.
_TIMES = "_CHECKPOINT_METADATA"
# Orbax's file name of a JSON item.
_JSON_FILE = "metadata"
# Larger arrays are copied to the host per shard.
_ONE_REPLICA_BYTES = 2**20
# Errors of files that are missing, or hold other JSON values.
_UNREADABLE = (OSError, ValueError, KeyError, TypeError, RecursionError)


DamagedCheckpointError = unreadable.DamagedCheckpointError


class SaveError(Exception):
  """A checkpoint cannot be written; the message gives the reason."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Restored:
  """The content of a checkpoint.

  Attributes:
    tree: Arrays, in the structure of the requested specs.
    data: The position of the training data.
    step: Number of completed training steps.
  """

  tree: Any
  data: Mapping[str, Any]
  step: int


class Checkpointer:
  """The checkpoints of one directory; a context, or call `close`."""

  def __init__(
    self,
    folder: epath.Path,
    *,
    retention: training.Retention | None = None,
    read_only: bool = False,
    lazy: bool = False,
  ) -> None:
    """Opens a directory.

    Args:
      folder: The directory; created if missing, unless `read_only`.
      retention: The checkpoints to keep; None for all.
      read_only: Never changes the directory; another process may write to it.
      lazy: Saved trees have leaves of `lazy_array.LazyArray`, which are written
        one by one before `save` returns.
    """
    self._folder = folder
    self._lazy = lazy
    self._read_only = read_only
    self._retention = retention or training.Retention(newest=None)
    self._value: Callable[[int], float | None] = lambda step: None
    self._values: dict[int, float | None] = {}
    self._times: dict[int, float] = {}
    self._run = uuid.uuid4().hex
    self._skipped = set[int]()
    self._manager: ocp.CheckpointManager | None = None
    self._restore_output = orbax_output.filter_output()
    # Orbax would wait for a pipe.
    files.check_regular(folder)
    if folder.exists() or not read_only:
      try:
        self._manager = unreadable.list_again(self._open, read_only)
      except Exception as error:
        self._restore_output()
        if getattr(error, "filename", None) or _is_lost_peer(error):
          raise
        raise user_error.UserError(_unreadable(folder, error)) from error

  def _open(self) -> ocp.CheckpointManager:
    atomicity = None
    if not files.is_local(self._folder):
      drivers.install()
      # Stores cannot rename: a file that is written last marks the end.
      atomicity = ocp.options.AtomicityOptions(
        mode=ocp.options.AtomicityMode.COMMIT_FILE
      )
    if self._read_only:
      # Orbax warns about other defaults with `read_only`.
      options = ocp.CheckpointManagerOptions(
        read_only=True,
        create=False,
        save_interval_steps=0,
        atomicity_options=atomicity,
      )
    else:
      options = ocp.CheckpointManagerOptions(
        # Removes incomplete checkpoints of killed processes.
        cleanup_tmp_directories=True,
        atomicity_options=atomicity,
        preservation_policy=_Policy(self._select_kept),
        # If creating directories in the background fails, orbax's threads wait
        # for them and the process cannot exit.
        async_options=ocp.AsyncOptions(create_directories_asynchronously=False),
      )
    return ocp.CheckpointManager(
      self._folder,
      options=options,
      item_handlers={
        _STATE: lazy_array.make_handler()
        if self._lazy
        else ocp.PyTreeCheckpointHandler(),
        _DATA: ocp.JsonCheckpointHandler(),
        _METADATA: ocp.JsonCheckpointHandler(),
        # Last, because items are finalized in this order.
        _MANIFEST: manifest.ManifestHandler((_STATE, _DATA, _METADATA)),
      },
    )

  def __enter__(self) -> "Checkpointer":
    return self

  def __exit__(self, *exception: object) -> None:
    if exception[0] is not None and not agreement.is_alone():
      # A pending save would wait for a process that may be lost.
      self._manager = None
    if exception[0] is not None:
      self._keep_filter()
    # If a pending save fails, too, the first error is the one to report.
    with contextlib.suppress(*([SaveError] if exception[0] else [])):
      self.close()

  def steps(self) -> list[int]:
    """Returns the steps of all complete checkpoints not skipped, in order."""
    steps = self._manager.all_steps() if self._manager else ()
    return sorted(set(steps) - self._skipped)

  def latest_step(self) -> int | None:
    """Returns the step of the latest complete checkpoint, or None."""
    steps = self.steps()
    return steps[-1] if steps else None

  def exists(self, step: int) -> bool:
    """Whether a checkpoint is in the directory at this moment."""
    return not unreadable.is_gone(self._folder / str(step))

  def refresh(self) -> None:
    """Lists a read-only directory again, which another process writes to."""
    if self._manager and self._read_only:
      unreadable.list_again(self._manager.reload)

  def skip(self, step: int) -> None:
    """Ignores a checkpoint from now on, because it is damaged.

    Its files stay until its step is saved again. Retention does not count it.
    """
    self._skipped.add(step)

  def rank_by(self, value: Callable[[int], float | None]) -> None:
    """Sets the metric that ranks checkpoints: a function of the step.

    It returns None where the metric is unknown, and is called at each save.
    """
    self._value = value

  def save(
    self, step: int, tree: Any, *, specs: Any, data: Mapping[str, Any]
  ) -> None:
    """Starts saving; the arrays may be donated when it returns.

    Waits for a pending save. Does nothing if this step is already saved. When
    the save is complete, checkpoints outside of the retention are deleted.

    Args:
      step: Number of completed training steps.
      tree: A pytree of arrays.
      specs: The same pytree of `VariableSpec`.
      data: The position of the training data after these steps; JSON values.

    Raises:
      SaveError: This save or the previous one failed.
      jax.errors.JaxRuntimeError, ValueError: Another process was lost.
    """
    if self._manager is None or self._read_only:
      raise ValueError(f"{self._folder} is closed or read-only.")
    if step in self.steps():
      return
    self._values = {each: self._value(each) for each in self.steps()}
    # Retention depends on the time, and must be the same on all processes.
    self._times[step] = agreement.from_first(time.time)
    metadata = {
      "format_version": named_tree.FORMAT_VERSION,
      "run": agreement.from_first(self._run_id),
      "step": step,
      "time": self._times[step],
      "arrays": named_tree.describe(specs),
    }
    args = ocp.args.Composite(
      **{
        _STATE: ocp.args.PyTreeSave(
          jax.tree.map(_one_replica, named_tree.to_named(tree, specs=specs))
        ),
        _DATA: ocp.args.JsonSave(dict(data)),
        _METADATA: ocp.args.JsonSave(metadata),
        _MANIFEST: manifest.ManifestArgs(),
      }
    )
    with self._saving():
      if step in self._skipped:
        self._manager.delete(step)
        self._skipped.remove(step)
      # Forced, because a later, damaged checkpoint may exist.
      self._manager.save(step, args=args, force=True)

  def _select_kept(
    self, steps: Sequence[int], times: Sequence[float]
  ) -> list[bool]:
    """Applies the retention; the last step is being saved."""
    saved = [
      retention_lib.Saved(step=step, time=self._time(step, otherwise=time))
      for step, time in zip(steps, times, strict=True)
      if step not in self._skipped
    ]
    reasons = retention_lib.reasons_to_keep(
      self._retention, saved, value=self._values.get
    )
    return [step in self._skipped or bool(reasons[step]) for step in steps]

  def _time(self, step: int, *, otherwise: float) -> float:
    """Returns when a checkpoint was saved, in seconds since the epoch."""
    if step not in self._times:
      try:
        self._times[step] = float(self._metadata(step)["time"])
      # Damage is reported when the checkpoint is read.
      except (DamagedCheckpointError, KeyError, TypeError, ValueError):
        self._times[step] = otherwise
    return self._times[step]

  def _run_id(self) -> str:
    """Returns the ID shared by the checkpoints of this directory."""
    for step in self.steps():
      with contextlib.suppress(DamagedCheckpointError):
        self._run = self._metadata(step).get("run", self._run)
        break
    return self._run

  def verify(self, step: int) -> dict[str, Any]:
    """Compares the checksums of all files; returns the metadata.

    Each process reads its share of the files, and all raise what one finds.

    Raises:
      DamagedCheckpointError: Files are missing, incomplete or changed; the
        message names them.
      CheckpointMismatchError: Another version of this program wrote it.
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
    try:
      entries = self._entries(step)
    except DamagedCheckpointError:
      # Another format version may have no manifest, or a different one.
      with contextlib.suppress(DamagedCheckpointError):
        self._check_version(step)
      raise
    # First, because the rest depends on the version in it.
    own = {n: e for n, e in entries.items() if n.startswith(f"{_METADATA}/")}
    self._check_files(step, own)
    metadata = self._check_version(step)
    share = agreement.share(sorted(entries))
    self._check_files(step, {n: entries[n] for n in share})
    return metadata

  def _check_version(self, step: int) -> dict[str, Any]:
    """Checks the format version of a checkpoint and returns its metadata."""
    metadata = self._metadata(step)
    named_tree.check_version(
      metadata["format_version"],
      where=f"The checkpoint {self._folder / str(step)}",
    )
    if metadata["step"] != step:
      raise self._make_damaged_error(
        step, f"it is a copy of the checkpoint of step {metadata['step']}"
      )
    oldest = min(self.steps(), default=step)
    if oldest != step and metadata.get("run") != self._run_id():
      raise self._make_damaged_error(
        step, f"it belongs to another run than the checkpoint of step {oldest}"
      )
    return metadata

  def _check_files(
    self, step: int, entries: Mapping[str, manifest.Entry]
  ) -> None:
    problems = manifest.find_problems(self._folder / str(step), entries)
    if problems:
      more = len(problems) - 1
      also = f" (and {more} more)" if more else ""
      raise self._make_damaged_error(step, f"{problems[0]}{also}")

  def _entries(self, step: int) -> dict[str, manifest.Entry]:
    name = f"{_MANIFEST}/{manifest.FILE_NAME}"
    try:
      return manifest.from_text(
        files.read_text(self._folder / str(step) / name)
      )
    except FileNotFoundError as error:
      raise self._make_damaged_error(step, f"{name} is missing") from error
    except (OSError, ValueError, RecursionError) as error:
      raise self._make_damaged_error(
        step, f"{name}: {_first_line(error)}"
      ) from error

  def _metadata(self, step: int) -> dict[str, Any]:
    name = f"{_METADATA}/{_JSON_FILE}"
    try:
      metadata = json.loads(files.read_text(self._folder / str(step) / name))
      for key in ("format_version", "step"):
        if not isinstance(metadata[key], int):
          raise ValueError(f"its {key} is not an integer")
    except _UNREADABLE as error:
      raise self._make_damaged_error(
        step, f"{name}: {_first_line(error)}"
      ) from error
    return metadata

  def _make_damaged_error(self, step: int, what: str) -> DamagedCheckpointError:
    path = self._folder / str(step)
    if self._read_only and unreadable.is_missing(what):
      unreadable.check_not_deleted(path)
    return DamagedCheckpointError(f"The checkpoint {path} is damaged: {what}")

  def restore(
    self, step: int, *, specs: Any, shardings: Any, stored_dtypes: bool = False
  ) -> Restored:
    """Verifies and reads a checkpoint onto any mesh.

    Args:
      step: Its number of completed training steps.
      specs: A pytree of `VariableSpec`; it may omit whole collections.
      shardings: The same pytree of shardings.
      stored_dtypes: Whether floating-point arrays have the dtypes in which they
        are stored, instead of those of the specs.

    Raises:
      CheckpointMismatchError: The checkpoint does not fit the specs.
      DamagedCheckpointError: Its files are incomplete or changed, on any
        process.
    """
    if self._manager is None:
      raise ValueError(f"{self._folder} does not exist.")
    metadata = self.verify(step)
    if stored_dtypes:
      specs = named_tree.use_stored_dtypes(metadata["arrays"], specs=specs)
    restored, problem, cause = None, None, None
    try:
      restored = self._read(metadata, step, specs, shardings)
    # The metadata are the same on all processes.
    except named_tree.CheckpointMismatchError:
      raise
    # The type of orbax's exception depends on the file.
    except Exception as error:
      orbax_output.drop_reads(error)
      what = f"{type(error).__name__}: {_first_line(error)}"
      try:
        problem = str(
          self._make_damaged_error(step, f"it cannot be read ({what})")
        )
      except unreadable.DeletedCheckpointError as deleted:
        problem = str(deleted)
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
    named_tree.check(
      metadata["arrays"],
      specs=specs,
      where=f"The checkpoint {path}",
    )
    wanted = named_tree.to_named(
      variables.abstract(specs, shardings), specs=specs
    )
    # Not by the manager, which ends with a barrier of all devices: if one
    # process fails, the others' barrier would match its next collective.
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
      data=json.loads(files.read_text(path / _DATA / _JSON_FILE)),
      step=metadata["step"],
    )

  def wait(self) -> None:
    """Waits until all saves are complete; raises SaveError if one failed."""
    if self._manager:
      with self._saving():
        self._manager.wait_until_finished()

  def close(self) -> None:
    """Waits for pending saves and ends the background threads.

    Raises:
      SaveError: A pending save failed.
    """
    try:
      if self._manager:
        with self._saving():
          self._manager.close()
    finally:
      self._manager = None
      self._restore_output()

  @contextlib.contextmanager
  def _saving(self) -> Iterator[None]:
    try:
      yield
    # The type of orbax's exception depends on where it failed.
    except Exception as error:
      # Closing would wait for the failed save and raise again.
      self._manager = None
      self._keep_filter()
      # Saving synchronizes the processes. If one is lost, the store has not
      # failed, and a supervisor restarts the others.
      if _is_lost_peer(error):
        raise
      raise SaveError(
        f"Writing a checkpoint to {self._folder} failed: {_reason(error)}"
      ) from error

  def _keep_filter(self) -> None:
    # Orbax's threads may log and fail after this object is closed.
    self._restore_output = lambda: None


class _Policy:
  """Orbax's preservation policy from a function."""

  def __init__(
    self, select: Callable[[Sequence[int], Sequence[float]], list[bool]]
  ) -> None:
    self._select = select

  def should_preserve(
    self,
    # Orbax's `PolicyCheckpointInfo`, which cannot be checked at run time.
    checkpoints: Sequence[Any],
    *,
    context: ocp.checkpoint_managers.PreservationContext,
  ) -> Sequence[bool]:
    """Returns whether to keep each checkpoint."""
    del context
    return self._select(
      [info.step for info in checkpoints],
      [info.time.timestamp() for info in checkpoints],
    )


def _agree_on(
  problem: str | None, *, cause: BaseException | None = None
) -> None:
  """Raises DamagedCheckpointError on all processes for a problem of any."""
  for each in agreement.gather(problem):
    if each is not None:
      raise DamagedCheckpointError(each) from cause


def _unreadable(folder: epath.Path, error: BaseException) -> str:
  """Returns why orbax cannot list a directory: a file of times is damaged."""
  broken = f"a file {_TIMES} in it"
  names = ocp.path.step.standard_name_format()
  for path in sorted(folder.glob(f"*/{_TIMES}")):
    try:
      _ = names.find_step(folder, int(path.parent.name)).commit_timestamp
    # The type of the exception depends on the content.
    except Exception:
      broken = os.fspath(path)
      break
  return (
    f"The checkpoints in {os.fspath(folder)} cannot be listed: {broken} is"
    f" damaged ({_first_line(error)}); remove that file, which only holds"
    " times."
  )


def _is_lost_peer(error: BaseException) -> bool:
  """Whether a collective or a barrier failed, not an operation on files."""
  if isinstance(error, jax.errors.JaxRuntimeError):
    return True
  # A blocked jitted call raises a plain ValueError when a peer dies.
  several = jax.process_count() > 1
  return several and process_failures.is_peer_failure(str(error))


def _reason(error: BaseException) -> str:
  """Returns the last clause of TensorStore's long message."""
  message = _first_line(error).partition(" [tensorstore_spec=")[0]
  return message.rpartition('": ')[2]


def _one_replica(x: Any) -> Any:
  """Returns a small replicated array on the devices of one replica.

  Otherwise orbax writes a slice per replica, and compiles a program for every
  shape and device at the first save.

  Arrays that are not fully addressable are returned unchanged.
  """
  sharding = x.sharding if isinstance(x, jax.Array) else None
  if (
    not isinstance(sharding, jax.sharding.NamedSharding)
    or x.nbytes > _ONE_REPLICA_BYTES
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
  shards = {shard.device: shard.data for shard in x.addressable_shards}
  return jax.make_array_from_single_device_arrays(
    x.shape,
    jax.sharding.NamedSharding(
      jax.sharding.Mesh(devices, mesh.axis_names),
      spec,
      memory_kind=sharding.memory_kind,
    ),
    [shards[device] for device in devices.flat],
  )


def _first_line(error: BaseException) -> str:
  lines = str(error).splitlines()
  return lines[0] if lines else type(error).__name__
