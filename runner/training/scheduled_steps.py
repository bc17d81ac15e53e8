"""Training steps of models whose stack computes its own gradients.

A stack with a pipeline schedule (`pipeline.schedules.scheduled_stack`) orders
forward and backward work itself. It is recognized by its methods, so that
training imports no schedule unless the model has one.
"""

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from flax import linen as nn
import jax

from paxon.layers import shared
from paxon.learners import gradients, loss_function, metrics, variable_groups
from paxon.runner import job as job_lib
from paxon.runner import user_error
from paxon.runner.training import model_loss


@runtime_checkable
class ScheduledStack(Protocol):
  """A stack that computes the gradients of its model."""

  def make_gradient_fn(
    self,
    model: nn.Module,
    *,
    loss_fn_of: Callable[[nn.Module], loss_function.LossFn],
    metric_fns: Sequence[metrics.MetricFn],
    specs: variable_groups.Specs,
  ) -> gradients.GradientFn:
    """Returns `(variables, batch, rngs) -> Gradients` of a model."""
    ...

  def check_program(self, text: str) -> None:
    """Raises ValueError if a compiled step, as HLO, would deadlock."""
    ...


def _find_scheduled(job: job_lib.Job) -> ScheduledStack | None:
  stack = getattr(job.task.model, "stack", None)
  return stack if isinstance(stack, ScheduledStack) else None


def check(job: job_lib.Job, compiled: jax.stages.Compiled) -> None:
  """Checks the compiled step of a model whose stack has a schedule.

  Raises:
    UserError: The step would deadlock.
  """
  stack, text = _find_scheduled(job), compiled.as_text()
  if stack is None or text is None:
    return
  try:
    stack.check_program(text)
  except ValueError as error:
    raise user_error.UserError(f"With mesh {job.mesh!r} {error}") from error


def _check_submodules(module: nn.Module, path: str = "model") -> None:
  for name, inner in shared.parts_of(module):
    if isinstance(inner, ScheduledStack):
      raise user_error.UserError(
        f"{path}.{name} is a {type(inner).__name__}, whose schedule works only"
        " in the field `stack` of the model itself; use a PipelinedStack there"
        " (leave pipeline_schedule unset)."
      )
    _check_submodules(inner, f"{path}.{name}")


def make_gradient_fn(
  job: job_lib.Job, specs: variable_groups.Specs
) -> gradients.GradientFn | None:
  """Returns the gradient function of the model's stack, or None.

  Args:
    job: The resolved configuration.
    specs: A `VariableSpec` for each variable of the model.

  Raises:
    UserError: The learner, or a variable, is incompatible with a schedule.
  """
  task, stack = job.task, _find_scheduled(job)
  if stack is None:
    _check_submodules(task.model)
    return None
  if task.learner.num_microbatches > 1:
    raise user_error.UserError(
      f"Learner.num_microbatches ({task.learner.num_microbatches}) must be 1"
      " with a pipeline schedule, which accumulates gradients over"
      " ScheduledStack.num_microbatches."
    )

  def loss_fn_of(model: nn.Module) -> loss_function.LossFn:
    return model_loss.make_loss_fn(model, specs=specs, deterministic=False)

  try:
    return stack.make_gradient_fn(
      task.model, loss_fn_of=loss_fn_of, metric_fns=task.metrics, specs=specs
    )
  except ValueError as error:
    raise user_error.UserError(str(error)) from error
