"""Initial state of a program: a checkpoint, a warm start, or new values.

A damaged checkpoint is reported in one line, and the one before it is used. A
checkpoint that does not fit the configuration is an error instead: the one
before would not fit either.

A checkpoint's data is one JSON object: the position of the training input and,
under a separate key, those of the rolling evaluation inputs, which continue
where the evaluation before ended. Inputs that are reset for each evaluation
store nothing.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
import dataclasses
import functools
import os
import sys
from typing import Any

from etils import epath
import jax

from paxon.inputs import base_input
from paxon.learners import train_state
from paxon.quantization import stored_kernels
from paxon.runner import files, user_error
from paxon.runner import job as job_lib
from paxon.runner import run_dir as run_dirs
from paxon.runner.checkpoints import (
  checkpointer,
  named_tree,
  stored_checkpoint,
  unreadable,
  warm_start_plan,
)
from paxon.runner.checkpoints import warm_start as warm_start_lib
from paxon.runner.hosts import agreement
from paxon.runner.session import run_files, serving
from paxon.runner.session import session as session_lib
from paxon.runner.settings import training
from paxon.sharding import variables

_EVALUATION = "evaluation inputs"
# Deleted checkpoints after which a reader says so.
_MANY = 10


def restore_or_start(
  session: session_lib.Session,
  checkpoints: checkpointer.Checkpointer,
  *,
  record: epath.Path | None = None,
) -> train_state.TrainState:
  """Returns the newest checkpoint's state, or the initial one; prints which.

  The training input is left at the next batch, and rolling evaluation inputs
  where the last evaluation ended.

  Args:
    session: The job on its devices.
    checkpoints: The checkpoints of its run.
    record: A warm start writes the source of each variable into this file.

  Raises:
    UserError: The checkpoint, or that of the warm start, does not fit the job
      or its data; or all checkpoints are damaged.
  """
  job = session.job
  restored = _restore_newest(
    checkpoints,
    lambda step: checkpoints.restore(
      step, specs=session.state_specs, shardings=session.state_shardings
    ),
  )
  if restored is None:
    job.train_input.reset()
    if job.warm_start is not None:
      return warm_start(session, job.warm_start, record=record)
    return session.initial_state()
  step = restored.step
  position, rolling = from_stored_positions(restored.data)
  line = f"resuming from the checkpoint of step {step}"
  try:
    if position:
      job.train_input.set_state(position)
    else:
      # The checkpoint was imported from another framework.
      job.train_input.reset()
      line += ", which has no position of the data: it starts at its beginning"
  except ValueError as error:
    raise user_error.UserError(
      f"The training data does not fit the checkpoint of step {step}: {error}"
    ) from error
  _restore_rolling(session, rolling)
  if step >= job.num_train_steps:
    line = (
      f"the checkpoint of step {step} already exists, and num_train_steps is"
      f" {job.num_train_steps}: nothing to train"
    )
  print(line, flush=True)
  return restored.tree


def restore_for_evaluation(
  session: session_lib.Session,
  checkpoints: checkpointer.Checkpointer,
  folder: epath.Path,
  *,
  step: int | None = None,
  stored_dtypes: bool = False,
) -> train_state.TrainState:
  """Returns a checkpoint's state without what only updates need.

  Rolling evaluation inputs are set to the positions in the checkpoint.

  Args:
    session: The job on its devices.
    checkpoints: The checkpoints of its run.
    folder: Their directory, for errors.
    step: Of the checkpoint; None for the newest that is not damaged.
    stored_dtypes: Arrays keep the checkpoint's dtypes instead of the model's.

  Raises:
    UserError: There is no checkpoint, it does not fit the job, or all are
      damaged.
  """

  def read(step: int) -> checkpointer.Restored:
    return checkpoints.restore(
      step,
      specs=session_lib.strip_for_evaluation(session.state_specs),
      shardings=session_lib.strip_for_evaluation(session.state_shardings),
      stored_dtypes=stored_dtypes,
    )

  if step is None:
    restored = _restore_newest(checkpoints, read, folder=folder)
  else:
    restored = _restore_step(checkpoints, read, step)
  if restored is None:
    raise user_error.UserError(
      f"There is no checkpoint in {folder}; train first, or give the"
      " --job_log_dir of a run that has one."
    )
  _, rolling = from_stored_positions(restored.data)
  _restore_rolling(session, rolling)
  return restored.tree


def open_trained(
  job: job_lib.Job,
  run_dir: epath.Path,
  *,
  step: int | None = None,
  splits: Collection[str] = (),
) -> tuple[session_lib.Session, train_state.TrainState]:
  """Opens a job with a checkpoint of its run, see `read_for_evaluation`.

  Args:
    job: Its tokenizer must be that of the run.
    run_dir: The directory of the run.
    step: Step of the checkpoint; None for the newest that is not damaged.
    splits: Splits whose data is read; the others need not exist.

  Raises:
    UserError: The job does not fit the run, or there is no such checkpoint.
  """
  run_files.check_tokenizer(job, run_dir)
  session = session_lib.open_session(job, splits=splits)
  folder = serving.checkpoints(job, run_dir)
  return read_for_evaluation(session, folder, step=step)


def read_for_evaluation(
  session: session_lib.Session, folder: epath.Path, *, step: int | None = None
) -> tuple[session_lib.Session, train_state.TrainState]:
  """Reads a checkpoint from a directory as evaluation and decoding use it.

  Only training needs the model's own dtypes: imported bfloat16 weights are
  evaluated as they are, in half the memory. The run may be training meanwhile:
  a checkpoint that it deletes while it is read is not damaged.

  Args:
    session: The job on its devices.
    folder: The directory of the checkpoints.
    step: Of the checkpoint; None for the newest that is not damaged.

  Returns:
    The session with the stored dtypes, and the state.

  Raises:
    UserError: See `restore_for_evaluation`.
  """
  with checkpointer.Checkpointer(folder, read_only=True) as checkpoints:
    state = restore_for_evaluation(
      session, checkpoints, folder, step=step, stored_dtypes=True
    )
  specs = session_lib.strip_for_evaluation(session.state_specs)
  pairs = zip(jax.tree.leaves(specs), jax.tree.leaves(state), strict=True)
  dtypes = {spec.name: array.dtype for spec, array in pairs}

  def with_stored_dtype(spec: variables.VariableSpec) -> variables.VariableSpec:
    return dataclasses.replace(spec, dtype=dtypes.get(spec.name, spec.dtype))

  session = dataclasses.replace(
    session,
    specs=jax.tree.map(with_stored_dtype, session.specs),
    state_specs=jax.tree.map(with_stored_dtype, session.state_specs),
  )
  return session, state


def _restore_step(
  checkpoints: checkpointer.Checkpointer,
  read: Callable[[int], checkpointer.Restored],
  step: int,
) -> checkpointer.Restored | None:
  """Returns the checkpoint of a step; None if there are no checkpoints."""
  steps = agreement.from_first(checkpoints.steps)
  if steps and step not in steps:
    raise user_error.UserError(
      f"There is no checkpoint of step {step}; this run has"
      f" {', '.join(map(str, steps))}."
    )
  if not steps:
    return None
  try:
    return read(step)
  except named_tree.CheckpointMismatchError as error:
    raise user_error.UserError(str(error)) from error
  except checkpointer.DamagedCheckpointError as error:
    checkpoints.refresh()
    if step in agreement.from_first(checkpoints.steps):
      raise user_error.UserError(str(error)) from error
    raise user_error.UserError(
      f"The run deleted its checkpoint of step {step} while it was read; choose"
      " a newer one, or keep more of them (Retention)."
    ) from error


def _restore_newest(
  checkpoints: checkpointer.Checkpointer,
  read: Callable[[int], checkpointer.Restored],
  *,
  folder: epath.Path | None = None,
) -> checkpointer.Restored | None:
  """Returns the newest undamaged checkpoint; None if there are none.

  Another process may save and delete checkpoints meanwhile: after one that
  cannot be read the directory is listed again.

  Args:
    checkpoints: The checkpoints of a run.
    read: Reads that of a step.
    folder: Their directory, if another process may write to it.

  Raises:
    UserError: One does not fit, all are damaged, or the run has deleted all
      that it had.
  """
  failed: dict[int, str] = {}
  deleted: list[int] = []

  def find_latest() -> int | None:
    step = checkpoints.latest_step()
    if step is not None or folder is None:
      return step
    steps = stored_checkpoint.wait_for_steps(
      checkpoints, folder, was_deleted=bool(deleted)
    )
    return steps[-1] if steps else None

  # Each process has listed the directory itself, maybe not at the same time.
  while (step := agreement.from_first(find_latest)) is not None:
    try:
      restored = read(step)
    except named_tree.CheckpointMismatchError as error:
      raise user_error.UserError(str(error)) from error
    except checkpointer.DamagedCheckpointError as error:
      failed[step] = user_error.one_line(error)
      checkpoints.skip(step)
      checkpoints.refresh()
      if not agreement.from_first(functools.partial(checkpoints.exists, step)):
        deleted.append(step)
        if len(deleted) == _MANY:
          print(
            f"the run deletes its checkpoints before they are read, {_MANY}"
            " until now; keep more of them (Retention.newest)",
            file=sys.stderr,
            flush=True,
          )
      continue
    for step, line in failed.items():
      # An older one does not matter, and is being deleted, if not damaged.
      if step > restored.step:
        print(
          f"{line}; using the one of step {restored.step} instead",
          file=sys.stderr,
          flush=True,
        )
    return restored
  _check_none_existed(checkpoints, failed, deleted)
  return None


def _check_none_existed(
  checkpoints: checkpointer.Checkpointer,
  failed: Mapping[int, str],
  deleted: Sequence[int],
) -> None:
  """Raises UserError if there were checkpoints, and none could be read."""
  damaged = [
    line
    for step, line in failed.items()
    if agreement.from_first(functools.partial(checkpoints.exists, step))
  ]
  if damaged:
    raise checkpointer.DamagedCheckpointError(
      f"All checkpoints are damaged: {'; '.join(damaged)}. Start again with"
      " another --job_log_dir, or restore a backup of one."
    )
  if deleted:
    raise user_error.UserError(
      f"The run has deleted its checkpoint of step {deleted[-1]} while it was"
      " read, and has no other yet; try again later, or keep more of them"
      " (Retention.newest)."
    )


def make_warm_start_plans(
  session: session_lib.Session, start: training.WarmStart
) -> list[warm_start_plan.Plan]:
  """Finds the checkpoints of a warm start and decides what is read from them.

  Raises:
    user_error.UserError: There is no such checkpoint, or it does not fit.
  """
  return [
    warm_start_plan.make(
      each,
      checkpoint=stored_checkpoint.find_checkpoint(
        run_dirs.resolve(each.checkpoint, os.environ), step=each.step
      ),
      targets=targets,
    )
    for each, targets in warm_start_plan.split(start, _read_specs(session))
  ]


def _read_specs(session: session_lib.Session) -> list[variables.VariableSpec]:
  """Returns the state's specs, with kernels in place of stored arrays."""
  found = [
    spec
    for spec in jax.tree.leaves(session.state_specs)
    if stored_kernels.find_parameter(spec.name) is None
  ]
  return [*found, *session.absent.values()]


def warm_start(
  session: session_lib.Session,
  start: training.WarmStart,
  *,
  record: epath.Path | None = None,
) -> train_state.TrainState:
  """Returns an initial state with values of another run; prints which.

  Args:
    session: The job on its devices.
    start: The source.
    record: Where the source of each variable is written; None for nowhere.

  Raises:
    user_error.UserError: There is no such checkpoint, it does not fit, cannot
      be read, or leaves no step to train.
  """
  plans = make_warm_start_plans(session, start)
  plan = plans[0]
  steps = session.job.num_train_steps
  if start.training_state and plan.checkpoint.step >= steps:
    raise user_error.UserError(
      f"WarmStart.training_state starts at step {plan.checkpoint.step} of"
      f" {os.fspath(plan.checkpoint.folder)}, but num_train_steps is {steps};"
      " make it larger, or leave training_state out."
    )
  specs = jax.tree.leaves(session.state_specs)
  shardings = dict(
    zip(
      (spec.name for spec in specs),
      jax.tree.leaves(session.state_shardings),
      strict=True,
    )
  )
  absent = dict(session.absent)
  shardings |= session.layout.shardings(absent)
  convert = {
    name: session.layout.jit(
      functools.partial(session.quantize, name),
      out_shardings={
        key: shardings[key] for key in _stored_names(session, name)
      },
    )
    for name in absent
  }
  values: dict[str, jax.Array] = {}
  text: list[str] = []
  for each in plans:
    summary = warm_start_lib.summarize(each)
    print("\n".join(summary), flush=True)
    try:
      values |= warm_start_lib.read(each, shardings=shardings, convert=convert)
    except unreadable.DeletedCheckpointError as error:
      if start.step is not None:
        raise
      # The source is a run that trains; it has a newer one.
      print(f"{user_error.one_line(error)}; starting again", file=sys.stderr)
      return warm_start(session, start, record=record)
    text += [*summary, "", *warm_start_lib.format_table(each), ""]
  if record is not None:
    files.write_text(record, "\n".join(text))
  return session.initial_state(values)


def _stored_names(session: session_lib.Session, parameter: str) -> set[str]:
  return {spec.name for spec in session.find_stored(parameter)}


def to_stored_positions(
  training: Mapping[str, Any], evaluation: Mapping[str, base_input.State]
) -> dict[str, Any]:
  """Returns a checkpoint's data from the positions of its inputs."""
  if not evaluation:
    return dict(training)
  return {**training, _EVALUATION: dict(evaluation)}


def from_stored_positions(
  stored: Mapping[str, Any],
) -> tuple[base_input.State, dict[str, base_input.State]]:
  """Returns the two arguments of `to_stored_positions`."""
  training = {k: v for k, v in stored.items() if k != _EVALUATION}
  return training, dict(stored.get(_EVALUATION, {}))


def rolling_positions(
  eval_inputs: Mapping[str, base_input.BaseInput],
) -> dict[str, base_input.State]:
  """Returns the positions of the rolling inputs, by split."""
  return {
    split: source.get_state()
    for split, source in eval_inputs.items()
    if not source.reset_for_eval
  }


def restore_rolling_positions(
  eval_inputs: Mapping[str, base_input.BaseInput],
  positions: Mapping[str, base_input.State],
) -> list[str]:
  """Sets the positions of the rolling inputs, by split.

  A split without a valid position starts at its first batch; that is no reason
  to stop training.

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
        f"the evaluation of {split!r} starts at its first batch: {error}"
      )
  return lines


def _restore_rolling(
  session: session_lib.Session, positions: Mapping[str, Any]
) -> None:
  for line in restore_rolling_positions(session.job.eval_inputs, positions):
    print(f"warning: {line}", flush=True)
