"""Inspects, compares, verifies, averages and imports checkpoints.

  tools/ckpt list RUN                  list the checkpoints of a run
  tools/ckpt explain RUN[@STEP]        list the arrays of a checkpoint
  tools/ckpt diff A[@STEP] B[@STEP]    compare two; status 1 if they differ
  tools/ckpt verify RUN[@STEP]         read every array; status 1 if damaged
  tools/ckpt average RUN NEW_RUN --last=3
                                       average checkpoints, for evaluation
  tools/ckpt preview RUN[@STEP] --exp=a.b.C
                                       show what a warm start would load
  tools/ckpt import-pax SRC[@STEP] --exp=a.b.C --to=RUN
                                       convert a checkpoint of Pax

RUN is a run directory, its checkpoints folder, or a checkpoint, local or in a
store (`gs://...`). Without @STEP, the newest checkpoint is used; `verify` reads
all of them. Usage errors print one line to stderr and exit with status 2.
"""

from collections.abc import Mapping, Sequence
import datetime
import os
import typing
from typing import Final

from etils import epath
import jax
import numpy as np

from paxon.runner import files, units, user_error
from paxon.runner.checkpoints import (
  checkpointer,
  inspection,
  retention,
  stored_checkpoint,
  text_table,
  unreadable,
)
from paxon.runner.configuration import text_values
from paxon.runner.monitoring import metrics_file
from paxon.runner.settings import training
from paxon.sharding import suggestions
from paxon.tools import command_line
from paxon.tools.checkpoints import ckpt_average, ckpt_preview
from paxon.tools.pax_checkpoints import import_pax

_SAME, _DIFFERENT = 0, 1
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
# Number of values that are checked at a time.
_CHUNK = 1 << 20


def main(argv: Sequence[str]) -> int:
  """Runs one command and returns its exit status."""
  return command_line.dispatch(argv, COMMANDS, help_text=lambda: __doc__ or "")


def _list(argv: list[str]) -> int:
  parser = command_line.Parser("list", "Lists the checkpoints of a run.")
  parser.add_argument("run", metavar="RUN", help="run directory")
  path, step = command_line.parse_place(parser.parse_args(argv).run)
  if step is not None:
    raise user_error.UserError(
      f"list shows all checkpoints of {os.fspath(path)}; remove @{step}, or use"
      " `explain`."
    )
  print("\n".join(unreadable.list_again(lambda: _list_lines(path))))
  return _SAME


def _explain(argv: list[str]) -> int:
  parser = command_line.Parser(
    "explain", "Lists the arrays of a checkpoint with their sizes."
  )
  parser.add_argument("run", metavar="RUN[@STEP]", help="a checkpoint")
  parser.add_argument(
    "prefix", nargs="?", default="", help="only names below this prefix"
  )
  arguments = parser.parse_args(argv)
  checkpoint = command_line.find_checkpoint(arguments.run)
  _check_prefix(arguments.prefix, checkpoint)
  print("\n".join(inspection.explain(checkpoint, prefix=arguments.prefix)))
  return _SAME


def _diff(argv: list[str]) -> int:
  parser = command_line.Parser("diff", "Compares two checkpoints.")
  parser.add_argument("a", metavar="A[@STEP]", help="a checkpoint")
  parser.add_argument("b", metavar="B[@STEP]", help="another checkpoint")
  parser.add_argument(
    "prefix", nargs="?", default="", help="only names below this prefix"
  )
  arguments = parser.parse_args(argv)
  a, b = (
    command_line.find_checkpoint(arguments.a),
    command_line.find_checkpoint(arguments.b),
  )
  _check_prefix(arguments.prefix, a, b)
  found = inspection.compare(a, b, prefix=arguments.prefix)
  print("\n".join(inspection.format_comparison(found)))
  return _SAME if found.is_same else _DIFFERENT


def _verify(argv: list[str]) -> int:
  parser = command_line.Parser(
    "verify", "Reads all arrays and reports damaged checkpoints."
  )
  parser.add_argument(
    "run", metavar="RUN[@STEP]", help="one checkpoint, or all of a run"
  )
  path, step = command_line.parse_place(parser.parse_args(argv).run)
  folder, steps = stored_checkpoint.find_steps(path)
  if step is not None:
    stored_checkpoint.find_checkpoint(path, step=step)
    steps = [step]
  status = _SAME
  for each in steps:
    try:
      line = _verify_one(folder, each)
    except unreadable.DeletedCheckpointError:
      if step is not None:
        raise
      line = "deleted by its run"
    except user_error.UserError as error:
      line, status = f"DAMAGED. {user_error.one_line(error)}", _DIFFERENT
    print(f"step {each}: {line}", flush=True)
  return status


def _check_prefix(
  prefix: str, *checkpoints: stored_checkpoint.StoredCheckpoint
) -> None:
  if any(inspection.select(c.arrays, prefix) for c in checkpoints):
    return
  folders = {
    "/".join(parts[:end])
    for checkpoint in checkpoints
    for parts in (name.split("/") for name in checkpoint.arrays)
    for end in range(1, len(parts) + 1)
  }
  raise user_error.UserError(
    f"No name begins with {prefix!r} in"
    f" {os.fspath(checkpoints[0].path)}{suggestions.suggest(prefix, folders)}"
  )


def _list_lines(path: epath.Path) -> list[str]:
  """Returns the table of a run's checkpoints.

  Raises:
    FileNotFoundError: The run has deleted all of them meanwhile.
  """
  folder, steps = stored_checkpoint.find_steps(path)
  results = _read_results(folder.parent)
  found, times, sizes = {}, {}, {}
  for step in steps:
    try:
      checkpoint = _read(folder, step)
      time = _time(folder, step, checkpoint)
      size = _size_on_disk(folder / str(step))
    except FileNotFoundError:
      continue  # Its run has deleted it meanwhile.
    found[step], times[step], sizes[step] = checkpoint, time, size
  if steps and not found:
    raise FileNotFoundError(folder)
  reasons = _reasons_to_keep(folder.parent, times, results)
  rows, total = [_COLUMNS], 0
  for step, checkpoint in found.items():
    total += sizes[step]
    rows.append(
      (
        str(step),
        f"{datetime.datetime.fromtimestamp(times[step]):%Y-%m-%d %H:%M:%S}",
        units.size(sizes[step]),
        *_counts(checkpoint),
        ", ".join(reasons.get(step, ())) or "-",
        "its metadata is damaged"
        if checkpoint is None
        else _format_metrics(results.get(step, {})),
      )
    )
  word = "checkpoint" if len(found) == 1 else "checkpoints"
  head = (
    f"{os.fspath(folder)}: {len(found)} {word}, {units.size(total)} on disk"
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


def _reasons_to_keep(
  run: epath.Path,
  times: Mapping[int, float],
  results: Mapping[int, Mapping[str, Mapping[str, float]]],
) -> Mapping[int, list[str]]:
  """Returns why each is kept, by the retention rules of the run."""
  config = stored_checkpoint.read_config(run) or {}
  try:
    values = {}
    for name, kind in typing.get_type_hints(training.Retention).items():
      text = config[f"retention.{name}"]
      # An enum is stored with the path of its class.
      text = text.rpartition(".")[2] if kind is training.Goal else text
      values[name] = text_values.parse(text, kind)
    rules = training.Retention(**values)
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


def _read_results(
  run: epath.Path,
) -> Mapping[int, Mapping[str, Mapping[str, float]]]:
  """Returns the evaluation metrics of the run, by step and split."""
  try:
    records = metrics_file.read_run(run)
  except (OSError, files.DamagedFileError):
    return {}
  results: dict[int, dict[str, Mapping[str, float]]] = {}
  for record in records:
    if record.split != "train" and not record.split.startswith("baseline/"):
      results.setdefault(record.step, {})[record.split] = record.values
  return results


def _format_metrics(results: Mapping[str, Mapping[str, float]]) -> str:
  shown = []
  for split, values in results.items():
    found = [f"{n} {values[n]:.4f}" for n in _METRICS if n in values]
    if found:
      shown.append(f"{split}: {', '.join(found)}")
  return "; ".join(shown)


def _verify_one(folder: epath.Path, step: int) -> str:
  """Returns a line about a sound checkpoint: readable, and as written.

  Raises:
    checkpointer.DamagedCheckpointError: It is damaged.
    user_error.UserError: Its metadata is damaged.
  """
  checkpoint = stored_checkpoint.read_metadata(folder, step)
  with checkpointer.Checkpointer(folder, read_only=True) as checkpoints:
    checkpoints.verify(step)
  counts = {
    name: _count_not_finite(checkpoint, stored)
    for name, stored in checkpoint.arrays.items()
  }
  found = [name for name, count in counts.items() if count]
  arrays = checkpoint.arrays.values()
  size = units.size(stored_checkpoint.total_bytes(arrays))
  line = f"sound, {len(arrays)} arrays of {size} read"
  if found:
    more = f" and {len(found) - 3} more" if len(found) > 3 else ""
    line += (
      f"; {sum(counts.values()):,} values are not finite, in"
      f" {', '.join(found[:3])}{more}"
    )
  return line


def _count_not_finite(
  checkpoint: stored_checkpoint.StoredCheckpoint,
  stored: stored_checkpoint.StoredArray,
) -> int:
  """Reads an array, which is freed before the next one is read."""
  (array,) = stored_checkpoint.read_numpy(checkpoint, [stored.name]).values()
  if (array.shape, array.dtype.name) != (stored.shape, stored.dtype):
    raise checkpointer.DamagedCheckpointError(
      f"The checkpoint {checkpoint.path} holds {stored.name} as"
      f" {array.dtype.name}{text_table.format_shape(array.shape)}, but its"
      f" metadata has {stored.dtype}{text_table.format_shape(stored.shape)}"
    )
  flat = array.reshape(-1)
  return sum(
    int((~np.isfinite(flat[i : i + _CHUNK].astype(np.float64))).sum())
    for i in range(0, flat.size, _CHUNK)
  )


COMMANDS: Final[command_line.Commands] = {
  "list": _list,
  "explain": _explain,
  "diff": _diff,
  "verify": _verify,
  "average": ckpt_average.main,
  "preview": ckpt_preview.main,
  "import-pax": import_pax.main,
}


if __name__ == "__main__":
  # Accelerators may be in use by a training run.
  jax.config.update("jax_platforms", "cpu")
  command_line.run(main)
