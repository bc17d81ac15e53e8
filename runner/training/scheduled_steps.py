"""Training steps of models whose stack has a pipeline schedule.

The executor of schedules is imported only for such models.
"""

from flax import linen as nn
import jax

from paxon.layers import shared
from paxon.learners import gradients, loss_function, variable_groups
from paxon.runner import job as job_lib
from paxon.runner import user_error
from paxon.runner.training import model_loss


def make_gradient_fn(
  job: job_lib.Job, specs: variable_groups.Specs
) -> gradients.GradientFn | None:
  """Returns the gradient function of the schedule of the model's stack.

  Args:
    job: The resolved configuration.
    specs: A `VariableSpec` for each variable of the model.

  Returns:
    None if the stack has no schedule.

  Raises:
    UserError: The learner or a variable does not support schedules.
  """
  task = job.task
  if not _has_schedule(getattr(task.model, "stack", None)):
    _check_submodules(task.model)
    return None
  if task.learner.num_microbatches > 1:
    raise user_error.UserError(
      f"Learner.num_microbatches ({task.learner.num_microbatches}) must be 1"
      " with a pipeline schedule, which accumulates gradients over its own"
      " microbatches (ScheduledStack.num_microbatches)."
    )
  from paxon.pipeline.schedules import scheduled_gradients

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


def check(job: job_lib.Job, compiled: jax.stages.Compiled) -> None:
  """Checks that the compiled step of a schedule cannot deadlock.

  Args:
    job: The resolved configuration.
    compiled: Its training step.

  Raises:
    UserError: The step has a collective that only some stages reach.
  """
  if not _has_schedule(getattr(job.task.model, "stack", None)):
    return
  from paxon.pipeline.schedules import branch_permutes

  text = compiled.as_text()
  if text is not None and branch_permutes.count(text):
    raise user_error.UserError(
      f"With mesh {job.mesh!r} the compiler puts collective-permutes inside"
      " branches that only some stages execute, so the step would deadlock."
      " Split batch or weights over fewer mesh axes, or train without"
      " pipeline_schedule."
    )


def _check_submodules(module: nn.Module, path: str = "model") -> None:
  for name, inner in shared.parts_of(module):
    if _has_schedule(inner):
      raise user_error.UserError(
        f"{path}.{name} is a ScheduledStack, whose schedule works only in the"
        " field `stack` of the model itself; use a PipelinedStack there (leave"
        " pipeline_schedule unset)."
      )
    _check_submodules(inner, f"{path}.{name}")


def _has_schedule(stack: nn.Module | None) -> bool:
  return getattr(stack, "has_schedule", False)
