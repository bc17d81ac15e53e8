"""Table of the checkpoints of a run."""

from collections.abc import Mapping
import dataclasses
import datetime
import os

from etils import epath

from paxon.runner import units, user_error
from paxon.runner.checkpoints import (
  retention,
  stored_checkpoint,
  text_table,
)
from paxon.runner.monitoring import metrics_file
from paxon.runner.settings import training

_COLUMNS = (
  "step",
  "saved",
  "on disk",
  "arrays",
  "values",
  "kept as",
  "metrics",
)
_NUMBERS = (0, 2, 3, 4)
# The metrics of quality of a split.
_METRICS = ("loss", "bits_per_byte", "accuracy")


def lines(path: epath.Path) -> list[str]:
  """Returns the lines to print.

  Args:
    path: A run directory, or its checkpoints folder.

  Raises:
    user_error.UserError: There is no checkpoint.
  """
  folder, steps = stored_checkpoint.find_steps(path)
  results = _results(folder.parent)
  found = {step: _read(folder, step) for step in steps}
  times = {step: _time(folder, step, found[step]) for step in steps}
  reasons = _reasons(folder.parent, times, results)
  rows, total = [_COLUMNS], 0
  for step, checkpoint in found.items():
    num_bytes = _size_on_disk(folder / str(step))
    total += num_bytes
    rows.append(
      (
        str(step),
        f"{datetime.datetime.fromtimestamp(times[step]):%Y-%m-%d %H:%M:%S}",
        units.size(num_bytes),
        *_counts(checkpoint),
        ", ".join(reasons.get(step, ())) or "-",
        "its metadata is damaged"
        if checkpoint is None
        else _metrics(results.get(step, {})),
      )
    )
  word = "checkpoint" if len(steps) == 1 else "checkpoints"
  head = (
    f"{os.fspath(folder)}: {len(steps)} {word}, {units.size(total)} on disk"
  )
  return [head, "", *text_table.format_lines(rows, right=_NUMBERS)]


def _read(
  folder: epath.Path, step: int
) -> stored_checkpoint.StoredCheckpoint | None:
  try:
    return stored_checkpoint.read_metadata(folder, step)
  except user_error.UserError:
    return None


def _time(
  folder: epath.Path,
  step: int,
  checkpoint: stored_checkpoint.StoredCheckpoint | None,
) -> float:
  """Returns the time of a save, in seconds since the epoch."""
  if checkpoint is None:
    return float((folder / str(step)).stat().mtime)
  return checkpoint.time


def _counts(
  checkpoint: stored_checkpoint.StoredCheckpoint | None,
) -> tuple[str, str]:
  if checkpoint is None:
    return "-", "-"
  values = sum(array.size for array in checkpoint.arrays.values())
  return f"{len(checkpoint.arrays):,}", f"{values:,}"


def _reasons(
  run: epath.Path,
  times: Mapping[int, float],
  results: Mapping[int, Mapping[str, Mapping[str, float]]],
) -> Mapping[int, list[str]]:
  """Returns why each is kept, by the retention rules of the run."""
  config = stored_checkpoint.read_config(run) or {}
  try:
    fields = {
      field.name: config["retention"][field.name]
      for field in dataclasses.fields(training.Retention)
    }
    goal = fields.pop("goal")["@enum"].rpartition(".")[2]
    rules = training.Retention(goal=training.Goal[goal], **fields)
    saved = [
      retention.Saved(step=step, time=time) for step, time in times.items()
    ]
    return retention.reasons_to_keep(
      rules,
      saved,
      value=lambda step: retention.metric_value(rules, results.get(step, {})),
    )
  # A copy without its configuration, or of another version.
  except (KeyError, TypeError, ValueError, AttributeError):
    return {}


def _size_on_disk(path: epath.Path) -> int:
  return sum(
    _size_on_disk(child) if child.is_dir() else child.stat().length
    for child in path.iterdir()
  )


def _results(
  run: epath.Path,
) -> Mapping[int, Mapping[str, Mapping[str, float]]]:
  """Returns the evaluation metrics of the run, by step and split."""
  try:
    records = metrics_file.read_run(run)
  except (OSError, metrics_file.DamagedFileError):
    return {}
  results: dict[int, dict[str, Mapping[str, float]]] = {}
  for record in records:
    if record.split != "train" and not record.split.startswith("baseline/"):
      results.setdefault(record.step, {})[record.split] = record.values
  return results


def _metrics(results: Mapping[str, Mapping[str, float]]) -> str:
  shown = []
  for split, values in results.items():
    found = [f"{n} {values[n]:.4f}" for n in _METRICS if n in values]
    if found:
      shown.append(f"{split}: {', '.join(found)}")
  return "; ".join(shown)
