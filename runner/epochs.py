"""The number of training steps of some epochs (the knob `num_epochs`)."""

from collections.abc import Sequence
from typing import Any

import fiddle as fdl

from paxon.runner import job as job_lib
from paxon.runner import knobs, user_error
from paxon.runner.configuration import overrides


def make_job(experiment: Any, num_epochs: int) -> fdl.Config[job_lib.Job]:
  """Returns the configuration of an experiment that trains for some epochs.

  Args:
    experiment: The experiment; its inputs do not depend on the number of steps.
    num_epochs: Passes over the training data.

  Raises:
    KnobError: The batches cannot be counted.
  """
  where = f"{type(experiment).__name__}.{knobs.EPOCHS}"
  inputs = experiment.replace(**{knobs.STEPS: 1}).datasets()
  source = fdl.build(inputs["train"])
  try:
    count = source.count_batches(num_epochs)
  except (OSError, ValueError) as error:
    raise knobs.KnobError(
      f"{where} is {num_epochs}, and the batches cannot be counted:"
      f" {user_error.sentence(user_error.one_line(error))} Or set"
      f" {knobs.STEPS}."
    ) from error
  finally:
    source.close()
  config = experiment.replace(**{knobs.STEPS: count}).job()
  if config.batch_ramp:
    raise knobs.KnobError(
      f"{where} is for batches of one size, and Job.batch_ramp changes it; set"
      f" {knobs.STEPS}."
    )
  return config


def fix_num_steps(
  given: Sequence[overrides.Override],
  experiment: Any,
  config: fdl.Config[job_lib.Job],
) -> tuple[overrides.Override, ...]:
  """Returns assignments with the steps in place of epochs, to count once."""
  if experiment.num_epochs is None:
    return tuple(given)
  pair = knobs.STEPS, knobs.EPOCHS
  kept = [each for each in given if each.path not in pair]
  return (*kept, overrides.Override(knobs.STEPS, str(config.num_train_steps)))
