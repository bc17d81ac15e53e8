"""Where a follower's rolling evaluations are, in a file beside its figures.

A run's checkpoints hold the positions of its own evaluations, which it may not
even make. A follower evaluates other steps, in another order; it goes on where
its own evaluation before ended, also where that was another process.
"""

from collections.abc import Collection, Mapping
import json
import os
from typing import Any

from etils import epath

from paxon.inputs import base_input
from paxon.runner import files, user_error
from paxon.runner.hosts import agreement
from paxon.runner.training import data_positions

_KEYS = {"step", "before", "after"}


def restore(
  path: epath.Path,
  eval_inputs: Mapping[str, base_input.BaseInput],
  *,
  done: Collection[int],
) -> list[str]:
  """Has rolling inputs go on where the newest evaluation ended.

  Args:
    path: What `store` has written, if it has.
    eval_inputs: The inputs by split.
    done: The steps whose figures are written. The newest evaluation is made
      anew, on the same batches, if its step is not among them.

  Returns:
    A line for each position that does not fit its input.

  Raises:
    UserError: The file is damaged.
  """
  stored = agreement.from_first(lambda: _read(path))
  if stored is None:
    return []
  positions = stored["after" if stored["step"] in done else "before"]
  return data_positions.restore_rolling(eval_inputs, positions)


def store(
  path: epath.Path,
  eval_inputs: Mapping[str, base_input.BaseInput],
  *,
  step: int,
  before: Mapping[str, base_input.State],
) -> None:
  """Writes where rolling inputs are, before the figures are written.

  Args:
    path: The file.
    eval_inputs: The inputs by split, after an evaluation.
    step: Of the evaluation.
    before: Where they were before it.
  """
  if before:
    after = data_positions.of_rolling(eval_inputs)
    text = json.dumps({"step": step, "before": before, "after": after})
    files.write_text(path, text)


def _read(path: epath.Path) -> dict[str, Any] | None:
  if not path.exists():
    return None
  try:
    stored = json.loads(path.read_text())
  except ValueError as error:
    stored = error
  if not isinstance(stored, dict) or stored.keys() != _KEYS:
    raise user_error.UserError(
      f"{os.fspath(path)} does not say where rolling evaluations are; remove it"
      " to have them begin at their first batches."
    )
  return stored
