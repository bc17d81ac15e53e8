"""Figures sent to Weights & Biases, where the package is installed.

The package is no dependency of ours: it is imported when an experiment asks for
it. A run that goes on is the same run there, by an id that lies in its folder.
What an attempt that died had sent of steps that are made again is there twice;
the curves' axis is the step, so the later values lie over the earlier ones.
"""

from collections.abc import Mapping
import importlib
import json
import os
from typing import Any
import uuid

from etils import epath

from paxon.runner import files, user_error
from paxon.runner.monitoring import summary_writer

# Optional: `pip install paxon[wandb]`.
_PACKAGE = "wandb"
_STEP = "step"
_ID_FILE = "wandb.json"


def check_installed() -> None:
  """Checks that the package can be imported.

  Raises:
    UserError: It cannot.
  """
  _import()


class WandbWriter(summary_writer.SummaryWriter):
  """Sends `<split>/<figure>` of each step; baselines go to the summary."""

  def __init__(
    self,
    run_dir: epath.Path,
    *,
    project: str,
    entity: str | None = None,
    config: Mapping[str, Any] | None = None,
  ) -> None:
    """Begins a run, or goes on with that of the folder.

    Args:
      run_dir: Of the run; its name is the run's name there.
      project: Where it is listed.
      entity: The user or team; None is the account's default.
      config: The resolved configuration, shown beside the curves.

    Raises:
      UserError: The package is not installed.
    """
    self._run = _import().init(
      project=project,
      entity=entity,
      name=run_dir.name,
      id=_run_id(run_dir),
      resume="allow",
      config=dict(config or {}),
      # Its own files are large and belong to this machine.
      dir=os.fspath(run_dir) if files.is_local(run_dir) else None,
    )
    # Its own count of steps cannot go back, and a run that goes on does.
    self._run.define_metric(_STEP)
    self._run.define_metric("*", step_metric=_STEP)

  def write(self, step: int, split: str, values: Mapping[str, float]) -> None:
    """Sends figures; the package does so in the background."""
    named = {f"{split}/{name}": float(value) for name, value in values.items()}
    if split.startswith(summary_writer.BASELINE_PREFIX):
      self._run.summary.update(named)
    else:
      self._run.log({_STEP: step, **named})

  def close(self) -> None:
    """Sends what is left, and ends the run."""
    self._run.finish()


def _import() -> Any:
  try:
    return importlib.import_module(_PACKAGE)
  except ImportError as error:
    raise user_error.UserError(
      "observability.wandb_project is set, but the package wandb cannot be"
      f" imported ({error}); install it with 'pip install wandb', or leave"
      " wandb_project out."
    ) from error


def _run_id(run_dir: epath.Path) -> str:
  path = run_dir / _ID_FILE
  if path.exists():
    return str(json.loads(path.read_text())["id"])
  new = uuid.uuid4().hex[:16]
  files.write_text(path, json.dumps({"id": new}) + "\n")
  return new
