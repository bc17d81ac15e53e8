"""The first state of a run that begins with another run's values."""

import os

import jax

from paxon.learners import train_state
from paxon.runner import run_dir, user_error
from paxon.runner.checkpoints import (
  stored_checkpoint,
  warm_start_plan,
  warm_start_preview,
  warm_start_values,
)
from paxon.runner.settings import training
from paxon.runner.training import session as session_lib


def make_plan(
  session: session_lib.Session, start: training.WarmStart
) -> warm_start_plan.Plan:
  """Finds the checkpoint and decides what is read from it.

  Args:
    session: The job on its devices; nothing is computed.
    start: What is asked for.

  Raises:
    user_error.UserError: There is no such checkpoint, or it does not fit.
  """
  path = run_dir.resolve(start.checkpoint, os.environ)
  return warm_start_plan.make(
    start,
    checkpoint=stored_checkpoint.find(path, step=start.step),
    targets=jax.tree.leaves(session.state_specs),
  )


def start(
  session: session_lib.Session, start: training.WarmStart
) -> train_state.TrainState:
  """Returns the state to train from, and prints what was read.

  Args:
    session: The job on its devices.
    start: What is asked for.

  Raises:
    user_error.UserError: There is no such checkpoint, it does not fit, cannot
      be read, or leaves no step to train.
  """
  plan = make_plan(session, start)
  steps = session.job.num_train_steps
  if start.training_state and plan.checkpoint.step >= steps:
    raise user_error.UserError(
      f"WarmStart.training_state goes on from step {plan.checkpoint.step} of"
      f" {os.fspath(plan.checkpoint.folder)}, but num_train_steps is {steps};"
      " make it larger, or leave training_state out."
    )
  print("\n".join(warm_start_preview.summary(plan)), flush=True)
  specs = jax.tree.leaves(session.state_specs)
  shardings = jax.tree.leaves(session.state_shardings)
  values = warm_start_values.read(
    plan,
    shardings={
      spec.name: sharding
      for spec, sharding in zip(specs, shardings, strict=True)
    },
  )
  return session.initial_state(values)
