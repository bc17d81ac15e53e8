"""The state that a program starts from.

A checkpoint that is damaged is reported in one line, and the one before it is
used. A checkpoint that does not fit the configuration is an error instead: the
one before would not fit either.
"""

from collections.abc import Mapping
import sys
from typing import Any

from etils import epath

from paxon.learners import train_state
from paxon.runner import user_error
from paxon.runner.checkpoints import checkpointer, compatibility
from paxon.runner.hosts import agreement
from paxon.runner.training import data_positions, warm_starting
from paxon.runner.training import session as session_lib


def restore_or_start(
  session: session_lib.Session, checkpoints: checkpointer.Checkpointer
) -> train_state.TrainState:
  """Returns the newest checkpoint's state, or the initial one; says which.

  The initial one has values of another run where the job has a warm start. The
  training input is left at the batch that comes next, and evaluation inputs
  that go on where the evaluation before it ended.

  Args:
    session: The job on its devices.
    checkpoints: Of the run.

  Raises:
    UserError: The checkpoint, or that of the warm start, does not fit the job
      or its data; or all checkpoints are damaged.
  """
  restored = _restore_newest(
    checkpoints, session.state_specs, session.state_shardings
  )
  if restored is None:
    session.job.train_input.reset()
    if session.job.warm_start is not None:
      return warm_starting.start(session, session.job.warm_start)
    return session.initial_state()
  step = restored.step
  position, rolling = data_positions.from_stored(restored.data)
  try:
    session.job.train_input.set_state(position)
  except ValueError as error:
    raise user_error.UserError(
      f"The training data does not fit the checkpoint of step {step}: {error}"
    ) from error
  _restore_rolling(session, rolling)
  _say(step, session.job.num_train_steps)
  return restored.tree


def _restore_rolling(
  session: session_lib.Session, positions: Mapping[str, Any]
) -> None:
  """Has rolling evaluation inputs go on, and says where one cannot."""
  for line in data_positions.restore_rolling(
    session.job.eval_inputs, positions
  ):
    print(f"warning: {line}", flush=True)


def _say(step: int, num_train_steps: int) -> None:
  if step < num_train_steps:
    line = f"continuing from the checkpoint of step {step}"
  else:
    line = f"the checkpoint of step {step} is there already"
    line += f", and num_train_steps is {num_train_steps}: nothing to train"
  print(line, flush=True)


def restore_for_evaluation(
  session: session_lib.Session,
  checkpoints: checkpointer.Checkpointer,
  folder: epath.Path,
) -> train_state.TrainState:
  """Returns the newest checkpoint's state without what only updates need.

  Evaluation inputs that go on are left where the checkpoint says.

  Args:
    session: The job on its devices.
    checkpoints: Of the run.
    folder: Theirs, named in the message.

  Raises:
    UserError: There is no checkpoint, it does not fit the job, or all are
      damaged.
  """
  restored = _restore_newest(
    checkpoints,
    session_lib.for_evaluation(session.state_specs),
    session_lib.for_evaluation(session.state_shardings),
  )
  if restored is None:
    raise user_error.UserError(
      f"There is no checkpoint in {folder}; train first, or give the"
      " --job_log_dir of a run that has one."
    )
  _, rolling = data_positions.from_stored(restored.data)
  _restore_rolling(session, rolling)
  return restored.tree


def _restore_newest(
  checkpoints: checkpointer.Checkpointer, specs: Any, shardings: Any
) -> checkpointer.Restored | None:
  """Returns the newest checkpoint that is not damaged; None without any."""
  damaged: list[str] = []
  # Each process has listed the folder by itself, maybe not at the same time.
  while (step := agreement.from_first(checkpoints.latest_step)) is not None:
    try:
      restored = checkpoints.restore(step, specs=specs, shardings=shardings)
    except compatibility.CheckpointMismatchError as error:
      raise user_error.UserError(str(error)) from error
    except checkpointer.DamagedCheckpointError as error:
      damaged.append(user_error.one_line(error))
      checkpoints.leave_out(step)
      continue
    for line in damaged:
      print(
        f"{line}; the one of step {restored.step} is used instead",
        file=sys.stderr,
        flush=True,
      )
    return restored
  if damaged:
    raise user_error.UserError(
      f"There is no checkpoint left that can be used: {'; '.join(damaged)}."
      " Start anew with another --job_log_dir, or put back a copy of one."
    )
  return None
