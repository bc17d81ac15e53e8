"""Training and evaluation steps, compiled ahead of the loops that run them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
from typing import Any, Protocol, runtime_checkable

from flax import linen as nn
import jax

from paxon.layers import contracts, remat
from paxon.layers.stacks import shared
from paxon.learners import (
  gradients,
  loss_function,
  metrics,
  train_program,
  train_state,
  train_step,
  variable_groups,
)
from paxon.runner import job as job_lib
from paxon.runner import user_error
from paxon.runner.session import memory_fit, model_loss, serving
from paxon.runner.session import session as session_lib


def trace_train_step(session: session_lib.Session) -> jax.stages.Traced:
  """Traces the step of `compile_train_step`; computes nothing.

  Raises:
    UserError: A rematerialization policy names a value that does not exist.
  """
  job = session.job
  loss_fn = model_loss.make_loss_fn(
    job.task.model,
    specs=session.specs,
    deterministic=False,
    summary_level=job.observability.summary_level,
  )

  def complete_loss_fn(
    values: variable_groups.Tree, *args: Any
  ) -> train_step.LossOutput:
    return loss_fn(serving.complete(values, session.absent), *args)

  step = train_program.make_train_step(
    complete_loss_fn if session.absent else loss_fn,
    learner=job.task.learner,
    specs=session.specs,
    seed=job.seed,
    streams=model_loss.random_streams(job.task.model),
    metric_fns=job.task.metrics,
    norm_groups=job.observability.norm_groups,
    gradient_fn=scheduled_gradient_fn(job, session.specs),
    # A model may also weigh tokens itself, such as those that it masks.
    may_lack_targets=job.train_input.may_lack_targets
    or not _counts_each_target(job.task.model),
  )
  jitted = session.layout.jit(
    step,
    donate_argnums=0,
    out_shardings=(session.state_shardings, session.layout.replicated),
  )
  state = session.abstract_state()
  traced = jitted.trace(state, dict(session.batch))
  _check_saved_names(job.task.model, traced)
  return traced


def compile_train_step(
  session: session_lib.Session,
  traced: jax.stages.Traced | None = None,
  *,
  more_options: Callable[[jax.stages.Lowered], Mapping[str, Any]] | None = None,
) -> jax.stages.Compiled:
  """Returns `(state, batch) -> (state, metrics)`.

  The state is donated: the returned state uses its memory. Metrics are
  replicated, so that every host can read them.

  `more_options` returns compiler options for the lowered step, in addition to
  those of the session.
  """
  if traced is None:
    traced = trace_train_step(session)
  lowered = session.layout.lower(traced)
  options: dict[str, Any] = dict(session.compiler_options)
  if more_options is not None:
    options |= more_options(lowered)
  compiled = lowered.compile(compiler_options=options)
  check_schedule(session.job, compiled)
  return compiled


def compile_eval_step(
  session: session_lib.Session,
  batch: Mapping[str, jax.Array | jax.ShapeDtypeStruct],
) -> jax.stages.Compiled:
  """Returns `(state, batch) -> metrics`, for states made `for_evaluation`."""
  lowered = session.layout.lower(trace_eval_step(session, batch))
  return lowered.compile(compiler_options=session.compiler_options)


def trace_eval_step(
  session: session_lib.Session,
  batch: Mapping[str, jax.Array | jax.ShapeDtypeStruct],
) -> jax.stages.Traced:
  """Traces the step of `compile_eval_step`; computes nothing."""
  measure = train_step.make_eval_step(
    model_loss.make_loss_fn(
      session.job.task.model, specs=session.specs, deterministic=True
    ),
    metric_fns=session.job.task.metrics,
  )

  def step(
    state: train_state.TrainState, batch: metrics.Batch
  ) -> train_step.Metrics:
    return measure(session.evaluation_variables(state), batch)

  state = session_lib.strip_for_evaluation(session.abstract_state())
  jitted = session.layout.jit(step, out_shardings=session.layout.replicated)
  return jitted.trace(state, dict(batch))


@runtime_checkable
class ScheduledStack(Protocol):
  """A stack that computes the gradients of its model, by a pipeline schedule.

  It is recognized by its methods, so that training imports no schedule unless
  the model has one.
  """

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


def scheduled_gradient_fn(
  job: job_lib.Job, specs: variable_groups.Specs
) -> gradients.GradientFn | None:
  """Returns the gradient function of the model's stack, None without one.

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

  def make_loss_fn(model: nn.Module) -> loss_function.LossFn:
    return model_loss.make_loss_fn(
      model,
      specs=specs,
      deterministic=False,
      summary_level=job.observability.summary_level,
    )

  try:
    return stack.make_gradient_fn(
      task.model, loss_fn_of=make_loss_fn, metric_fns=task.metrics, specs=specs
    )
  except ValueError as error:
    raise user_error.UserError(str(error)) from error


def check_schedule(job: job_lib.Job, compiled: jax.stages.Compiled) -> None:
  """Checks the compiled step of a model whose stack has a schedule.

  Raises:
    UserError: The step would deadlock.
  """
  stack = _find_scheduled(job)
  text = None if stack is None else compiled.as_text()
  if stack is None or text is None:
    return
  try:
    stack.check_program(text)
  except ValueError as error:
    raise user_error.UserError(f"With mesh {job.mesh!r} {error}") from error


def _check_saved_names(model: nn.Module, traced: jax.stages.Traced) -> None:
  """Raises UserError if a policy names a value that no layer has named."""
  # Policies for several models may name values that one of them lacks.
  unknown = [
    (path, name)
    for path, policy in _find_policies(model, "task.model")
    for name in remat.find_names(policy)
    if name not in remat.NAMES
  ]
  if not unknown:
    return
  known = {
    equation.params["name"]
    for equation in memory_fit.iterate_equations(traced.jaxpr)
    if equation.primitive.name == "name"
  }
  for path, name in unknown:
    if name not in known:
      raise user_error.UserError(
        f"{path} names {name!r}, but the layers name no such value; they name"
        f" {', '.join(sorted(known)) or 'none'}."
      )


def _find_policies(
  module: nn.Module, path: str
) -> Iterator[tuple[str, remat.Policy | str | None]]:
  """Yields the path and the value of each policy of a model."""
  for field in dataclasses.fields(module):
    if field.name.endswith("_policy"):
      yield f"{path}.{field.name}", getattr(module, field.name)
  for name, inner in shared.iterate_submodules(module):
    yield from _find_policies(inner, f"{path}.{name}")


def _find_scheduled(job: job_lib.Job) -> ScheduledStack | None:
  model = job.task.model
  stack = model.stack if isinstance(model, contracts.HasStack) else None
  return stack if isinstance(stack, ScheduledStack) else None


def _counts_each_target(model: nn.Module) -> bool:
  return isinstance(model, contracts.CountsTargets) and model.counts_each_target


def _check_submodules(module: nn.Module, path: str = "model") -> None:
  for name, inner in shared.iterate_submodules(module):
    if isinstance(inner, ScheduledStack):
      raise user_error.UserError(
        f"{path}.{name} is a {type(inner).__name__}, whose schedule works only"
        " in the field `stack` of the model itself; use a PipelinedStack there"
        " (leave pipeline_schedule unset)."
      )
    _check_submodules(inner, f"{path}.{name}")
