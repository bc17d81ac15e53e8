"""What a checkpoint says of the data, in one JSON object.

It is the position of the training input and, under a key of its own, those of
the evaluation inputs that go on where the evaluation before ended. Inputs that
begin anew at each evaluation have nothing to keep.
"""

from collections.abc import Mapping
from typing import Any

from paxon.inputs import base_input

_EVALUATION = "evaluation inputs"


def of_rolling(
  eval_inputs: Mapping[str, base_input.BaseInput],
) -> dict[str, base_input.State]:
  """Returns the positions of the inputs that go on, by split."""
  return {
    split: source.get_state()
    for split, source in eval_inputs.items()
    if not source.reset_for_eval
  }


def to_stored(
  training: Mapping[str, Any], evaluation: Mapping[str, base_input.State]
) -> dict[str, Any]:
  """Returns what is stored.

  Args:
    training: The position of the training input.
    evaluation: The positions of rolling inputs by split.
  """
  if not evaluation:
    return dict(training)
  return {**training, _EVALUATION: dict(evaluation)}


def from_stored(
  stored: Mapping[str, Any],
) -> tuple[base_input.State, dict[str, base_input.State]]:
  """Returns the two arguments of `to_stored`."""
  training = {k: v for k, v in stored.items() if k != _EVALUATION}
  return training, dict(stored.get(_EVALUATION, {}))


def restore_rolling(
  eval_inputs: Mapping[str, base_input.BaseInput],
  positions: Mapping[str, base_input.State],
) -> list[str]:
  """Has rolling inputs go on.

  Args:
    eval_inputs: The inputs by split.
    positions: Some of theirs. A split without one begins at its first batch,
      as one does that was added later or had its data changed: that is no
      reason not to train on.

  Returns:
    A line for each position that does not fit its input.
  """
  lines = []
  for split, source in eval_inputs.items():
    if source.reset_for_eval:
      continue
    source.reset()
    try:
      if split in positions:
        source.set_state(positions[split])
    except ValueError as error:
      lines.append(
        f"the evaluation of {split!r} begins at its first batch: {error}"
      )
  return lines
