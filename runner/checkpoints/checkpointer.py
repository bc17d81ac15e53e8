"""Saves and restores the state of a run with orbax.

A checkpoint of step s is the folder `s/` with three items:

  state      the arrays, by logical names
  data       the position of the training data after s steps, JSON
  metadata   format version, step, and each array's shape, dtype and axes, JSON

Saving copies the arrays to the host and returns; writing goes on in the
background. A folder gets its final name only when it is complete, so a killed
process leaves the checkpoint before as the latest one.
"""

from collections.abc import Iterator, Mapping
import contextlib
import dataclasses
import logging
from types import TracebackType
from typing import Any

from etils import epath
import jax
import orbax.checkpoint as ocp

from paxon.runner.checkpoints import compatibility, named_tree

_STATE, _DATA, _METADATA = "state", "data", "metadata"


class DamagedCheckpointError(Exception):
  """A checkpoint cannot be read; the message names its folder."""


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
    max_checkpoints: int | None = None,
    read_only: bool = False,
  ) -> None:
    """Opens a folder.

    Args:
      folder: Made when missing, unless read only.
      max_checkpoints: How many of the newest are kept; `None` for all.
      read_only: Never changes the folder, which another process may write to.
    """
    self._folder = folder
    self._read_only = read_only
    self._manager: ocp.CheckpointManager | None = None
    if folder.exists() or not read_only:
      if read_only:
        # Other defaults do not go with it, and orbax warns of each.
        options = ocp.CheckpointManagerOptions(
          read_only=True, create=False, save_interval_steps=0
        )
      else:
        # Cleans up what a killed process left unfinished.
        options = ocp.CheckpointManagerOptions(
          cleanup_tmp_directories=True,
          max_to_keep=max_checkpoints,
          # Where folders are made in the background and that fails, orbax's
          # writing threads wait for them, and the process cannot exit.
          async_options=ocp.AsyncOptions(
            create_directories_asynchronously=False
          ),
        )
      with _told_already():
        self._manager = ocp.CheckpointManager(
          folder, options=options, item_names=(_STATE, _DATA, _METADATA)
        )

  def __enter__(self) -> "Checkpointer":
    return self

  def __exit__(
    self,
    exception_type: type[BaseException] | None,
    exception: BaseException | None,
    traceback: TracebackType | None,
  ) -> None:
    self.close()

  def latest_step(self) -> int | None:
    """Returns the step of the newest complete checkpoint, `None` without."""
    return self._manager.latest_step() if self._manager else None

  def save(
    self, step: int, tree: Any, *, specs: Any, data: Mapping[str, Any]
  ) -> None:
    """Starts saving; the arrays may be donated as soon as it returns.

    Waits for the save before, if that is still under way. Does nothing if this
    step is already saved.

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
    if step in self._manager.all_steps():
      return
    args = ocp.args.Composite(
      **{
        _STATE: ocp.args.PyTreeSave(named_tree.to_named(tree, specs=specs)),
        _DATA: ocp.args.JsonSave(dict(data)),
        _METADATA: ocp.args.JsonSave(
          {
            "format_version": compatibility.FORMAT_VERSION,
            "step": step,
            "arrays": compatibility.describe(specs),
          }
        ),
      }
    )
    with self._saving():
      self._manager.save(step, args=args)

  def restore(self, step: int, *, specs: Any, shardings: Any) -> Restored:
    """Reads a checkpoint, placed for the mesh at hand.

    Args:
      step: Of the checkpoint.
      specs: A pytree of `VariableSpec`; it may leave out whole collections.
      shardings: The same pytree of shardings.

    Raises:
      CheckpointMismatchError: The checkpoint does not fit the specs.
      DamagedCheckpointError: Its files are incomplete or changed.
    """
    if self._manager is None:
      raise ValueError(f"{self._folder} does not exist.")
    try:
      return self._read(self._manager, step, specs, shardings)
    except compatibility.CheckpointMismatchError:
      raise
    # What orbax raises depends on the file; its other causes are tested here.
    except Exception as error:
      raise DamagedCheckpointError(
        f"The checkpoint {self._folder / str(step)} cannot be read"
        f" ({type(error).__name__}: {_first_line(error)})"
      ) from error

  def _read(
    self, manager: ocp.CheckpointManager, step: int, specs: Any, shardings: Any
  ) -> Restored:
    described = manager.restore(
      step,
      args=ocp.args.Composite(
        **{_DATA: ocp.args.JsonRestore(), _METADATA: ocp.args.JsonRestore()}
      ),
    )
    metadata = described[_METADATA]
    compatibility.check(
      metadata["arrays"],
      specs=specs,
      version=metadata["format_version"],
      where=f"The checkpoint {self._folder / str(step)}",
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
    arrays = manager.restore(
      step,
      args=ocp.args.Composite(
        **{
          _STATE: ocp.args.PyTreeRestore(
            item=wanted,
            restore_args=ocp.checkpoint_utils.construct_restore_args(wanted),
            partial_restore=True,
          )
        }
      ),
    )[_STATE]
    return Restored(
      tree=named_tree.from_named(arrays, specs=specs),
      data=described[_DATA],
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
    if self._manager:
      self._manager.close()
      self._manager = None

  @contextlib.contextmanager
  def _saving(self) -> Iterator[None]:
    try:
      yield
    # What orbax raises depends on where it failed.
    except Exception as error:
      # Closing would wait for the failed save, and raise it again.
      self._manager = None
      raise SaveError(
        f"A checkpoint could not be written to {self._folder}:"
        f" {_first_line(error)}"
      ) from error


@contextlib.contextmanager
def _told_already() -> Iterator[None]:
  """Drops orbax's warning that what is opened for reading is read only."""

  def keep(record: logging.LogRecord) -> bool:
    return "read only" not in str(record.msg)

  logger = logging.getLogger("absl")
  logger.addFilter(keep)
  try:
    yield
  finally:
    logger.removeFilter(keep)


def _first_line(error: BaseException) -> str:
  lines = str(error).splitlines()
  return lines[0][:300] if lines else "no message"
