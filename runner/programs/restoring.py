"""The state that a program starts from."""

from typing import Any

from etils import epath

from paxon.learners import train_state
from paxon.runner import user_error
from paxon.runner.checkpoints import checkpointer, compatibility
from paxon.runner.programs import session as session_lib


def restore_or_start(
  session: session_lib.Session, checkpoints: checkpointer.Checkpointer
) -> train_state.TrainState:
  """Returns the newest checkpoint's state, or the initial one; says which.

  The training input is left at the batch that comes next.

  Args:
    session: The job on its devices.
    checkpoints: Of the run.

  Raises:
    UserError: The checkpoint does not fit the job or its data.
  """
  step = checkpoints.latest_step()
  if step is None:
    session.job.train_input.reset()
    return session.initial_state()
  restored = _restore(
    checkpoints, step, session.state_specs, session.state_shardings
  )
  try:
    session.job.train_input.set_state(dict(restored.data))
  except ValueError as error:
    raise user_error.UserError(
      f"The training data does not fit the checkpoint of step {step}: {error}"
    ) from error
  _say(step, session.job.num_train_steps)
  return restored.tree


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

  Args:
    session: The job on its devices.
    checkpoints: Of the run.
    folder: Theirs, named in the message.

  Raises:
    UserError: There is no checkpoint, or it does not fit the job.
  """
  step = checkpoints.latest_step()
  if step is None:
    raise user_error.UserError(
      f"There is no checkpoint in {folder}; train first, or give the"
      " --job_log_dir of a run that has one."
    )
  restored = _restore(
    checkpoints,
    step,
    session_lib.for_evaluation(session.state_specs),
    session_lib.for_evaluation(session.state_shardings),
  )
  return restored.tree


def _restore(
  checkpoints: checkpointer.Checkpointer, step: int, specs: Any, shardings: Any
) -> checkpointer.Restored:
  try:
    return checkpoints.restore(step, specs=specs, shardings=shardings)
  except compatibility.CheckpointMismatchError as error:
    raise user_error.UserError(str(error)) from error
  except checkpointer.DamagedCheckpointError as error:
    raise user_error.UserError(
      f"{error}; remove that folder to go on from the checkpoint before."
    ) from error
