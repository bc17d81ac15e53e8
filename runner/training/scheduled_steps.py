"""Training steps of models whose stack has a schedule."""

from flax import linen as nn
import jax

from paxon.layers import shared
from paxon.learners import gradients, loss_function, variable_groups
from paxon.pipeline.schedules import (
  branch_permutes,
  scheduled_gradients,
  scheduled_stack,
)
from paxon.runner import job as job_lib
from paxon.runner import user_error
from paxon.runner.training import model_loss


def check(job: job_lib.Job, compiled: jax.stages.Compiled) -> None:
  """Checks the compiled step of a job whose stack has a schedule.

  Args:
    job: The resolved configuration.
    compiled: Its training step.

  Raises:
    UserError: It would hang.
  """
  if not _is_scheduled(job):
    return
  text = compiled.as_text()
  if text is not None and branch_permutes.count(text):
    raise user_error.UserError(
      f"With mesh {job.mesh!r} the compiler moves activations by"
      " collective-permutes inside of what stages run in turns, where they"
      " would wait for each other forever. Split batch or weights by fewer mesh"
      " axes, or train without pipeline_schedule."
    )


def _is_scheduled(job: job_lib.Job) -> bool:
  stack = getattr(job.task.model, "stack", None)
  return isinstance(stack, scheduled_stack.ScheduledStack)


def _check_none_inside(part: nn.Module, path: str = "model") -> None:
  for name, inner in shared.parts_of(part):
    if isinstance(inner, scheduled_stack.ScheduledStack):
      raise user_error.UserError(
        f"{path}.{name} is a ScheduledStack, whose schedule trains a model only"
        " as its own field `stack`; make it a PipelinedStack (leave"
        " pipeline_schedule away)."
      )
    _check_none_inside(inner, f"{path}.{name}")


def gradient_fn(
  job: job_lib.Job, specs: variable_groups.Specs
) -> gradients.GradientFn | None:
  """Returns what computes gradients by the schedule of the model's stack.

  Args:
    job: The resolved configuration.
    specs: A `VariableSpec` for each variable of the model.

  Returns:
    None where the stack of the model has no schedule.

  Raises:
    UserError: The learner, or a variable, does not go with a schedule.
  """
  task = job.task
  if not _is_scheduled(job):
    _check_none_inside(task.model)
    return None
  if task.learner.num_microbatches > 1:
    raise user_error.UserError(
      f"Learner.num_microbatches ({task.learner.num_microbatches}) must be 1"
      " with a pipeline schedule, which accumulates over the microbatches of"
      " its own (ScheduledStack.num_microbatches)."
    )

  def loss_fn_of(model: nn.Module) -> loss_function.LossFn:
    return model_loss.make_loss_fn(model, specs=specs, deterministic=False)

  try:
    return scheduled_gradients.make_gradient_fn(
      task.model,
      loss_fn_of=loss_fn_of,
      metric_fns=task.metrics,
      specs=specs,
    )
  except ValueError as error:
    raise user_error.UserError(str(error)) from error
