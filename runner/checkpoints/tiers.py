"""Two tiers of checkpoints: the run directory, and local disks of the hosts.

The newest complete checkpoint of either tier is restored. One that is due in
both is saved to the run directory.
"""

import os
from typing import Any, TypeAlias

from etils import epath

from paxon.runner import files, user_error
from paxon.runner import job as job_lib
from paxon.runner import run_dir as run_dirs
from paxon.runner.checkpoints import checkpointer, local_tier
from paxon.runner.hosts import agreement
from paxon.runner.settings import training

_KNOB = "local_checkpoint_every_steps"


# What saves states after steps.
Saver: TypeAlias = checkpointer.Checkpointer | local_tier.LocalTier


class TieredCheckpointer(checkpointer.Checkpointer):
  """The checkpoints of a run directory, and newer ones on local disks.

  Attributes:
    local: The local tier.
  """

  def __init__(
    self,
    folder: epath.Path,
    *,
    retention: training.Retention,
    local: local_tier.LocalTier,
  ) -> None:
    """Opens a directory of checkpoints, see `checkpointer.Checkpointer`."""
    super().__init__(folder, retention=retention)
    self.local = local

  def latest_step(self) -> int | None:
    """Returns the newest step of both tiers, None if there is none."""
    found = (super().latest_step(), self.local.step)
    return max((step for step in found if step is not None), default=None)

  def restore(
    self, step: int, *, specs: Any, shardings: Any, stored_dtypes: bool = False
  ) -> checkpointer.Restored:
    """Reads a checkpoint, from the local disks if it is there."""
    if step == self.local.step and not stored_dtypes:
      return self.local.restore(specs=specs, shardings=shardings)
    return super().restore(
      step, specs=specs, shardings=shardings, stored_dtypes=stored_dtypes
    )

  def wait(self) -> None:
    """Waits until all saves are complete; raises SaveError if one failed."""
    super().wait()
    self.local.wait()

  def close(self) -> None:
    """Closes both tiers; deletes local checkpoints that are not newer."""
    steps = self.steps()
    try:
      super().close()
      if steps:
        self.local.clear(until=steps[-1])
    finally:
      self.local.close()


def open_tiers(
  run_dir: epath.Path, local_dir: str | None, *, retention: training.Retention
) -> checkpointer.Checkpointer:
  """Opens the checkpoints of a run, with a local tier if it has a directory."""
  folder = run_dir / run_dirs.CHECKPOINTS
  if local_dir is None:
    # This start repeats their steps, maybe with other settings.
    if agreement.is_first():
      local_tier.forget_run(run_dir)
    return checkpointer.Checkpointer(folder, retention=retention)
  return TieredCheckpointer(
    folder, retention=retention, local=local_tier.LocalTier(local_dir, run_dir)
  )


def list_savers(
  checkpoints: checkpointer.Checkpointer, job: job_lib.Job
) -> list[tuple[Saver, int]]:
  """Returns the tiers besides the run directory, each with its interval."""
  every_steps = job.local_checkpoint_every_steps
  if every_steps is None or not isinstance(checkpoints, TieredCheckpointer):
    return []
  return [(checkpoints.local, every_steps)]


def check(
  job: job_lib.Job, local_dir: str | None, *, run_dir: epath.Path
) -> None:
  """Checks the flag and the knob, on all processes.

  Raises:
    user_error.UserError: Only one of them is set, or the directory is in an
      object store or in the run directory.
  """
  problem, every_steps = None, job.local_checkpoint_every_steps
  if local_dir is None and every_steps is not None:
    problem = (
      f"{_KNOB}={every_steps} requires {local_tier.FLAG}, a directory on a disk"
      " of each host."
    )
  elif local_dir is not None and every_steps is None:
    problem = (
      f"{local_tier.FLAG}={local_dir} requires --fdl.{_KNOB}=N, the interval of"
      " local checkpoints."
    )
  elif local_dir is not None:
    problem = _find_misplacement(local_dir, run_dir)
  for each in agreement.gather(problem):
    if each is not None:
      raise user_error.UserError(each)


def _find_misplacement(local_dir: str, run_dir: epath.Path) -> str | None:
  flag = f"{local_tier.FLAG}={local_dir}"
  if not local_dir.strip():
    return (
      f"{local_tier.FLAG} is empty; set a directory on a disk of each host."
    )
  if not files.is_local(local_dir):
    return (
      f"{flag} must be a directory on a disk of each host, such as"
      " /dev/shm/checkpoints; the run directory may be in an object store."
    )
  if files.is_local(run_dir):
    inner, outer = os.path.realpath(local_dir), os.path.realpath(run_dir)
    if os.path.commonpath([inner, outer]) == outer:
      return (
        f"{flag} must be outside of the run directory {os.fspath(run_dir)}: on"
        " a disk of each host."
      )
  return None
