"""The steps of a session, compiled ahead of the loops that run them."""

from collections.abc import Callable, Mapping
from typing import Any

import jax

from paxon.learners import metrics, train_state, train_step
from paxon.runner.training import model_loss, scheduled_steps
from paxon.runner.training import session as session_lib


def compile_train_step(
  session: session_lib.Session,
  traced: jax.stages.Traced | None = None,
  *,
  more_options: Callable[[jax.stages.Lowered], Mapping[str, Any]] | None = None,
) -> jax.stages.Compiled:
  """Returns `(state, batch) -> (state, metrics)`.

  The state is donated: its memory is that of the state returned. Metrics are
  replicated, so that every host can read them.

  Args:
    session: The job on its devices.
    traced: What `trace_train_step` returned for it, to save doing it again.
    more_options: Returns compiler options for what was lowered, beside those of
      the session.
  """
  if traced is None:
    traced = trace_train_step(session)
  lowered = session.layout.lower(traced)
  options: dict[str, Any] = dict(session.compiler_options)
  if more_options is not None:
    options |= more_options(lowered)
  compiled = lowered.compile(compiler_options=options)
  scheduled_steps.check(session.job, compiled)
  return compiled


def trace_train_step(session: session_lib.Session) -> jax.stages.Traced:
  """Returns the step of `compile_train_step`, traced; nothing is computed."""
  job = session.job
  step = train_step.make_train_step(
    model_loss.make_loss_fn(
      job.task.model, specs=session.specs, deterministic=False
    ),
    learner=job.task.learner,
    specs=session.specs,
    seed=job.seed,
    streams=model_loss.random_streams(job.task.model),
    metric_fns=job.task.metrics,
    norm_groups=job.observability.norm_groups,
    gradient_fn=scheduled_steps.make_gradient_fn(job, session.specs),
  )
  jitted = session.layout.jit(
    step,
    donate_argnums=0,
    out_shardings=(session.state_shardings, session.layout.replicated),
  )
  state = session.abstract_state()
  return jitted.trace(state, dict(session.batch))


def compile_eval_step(
  session: session_lib.Session, batch: Mapping[str, jax.Array]
) -> jax.stages.Compiled:
  """Returns `(state, batch) -> metrics`, for states made `for_evaluation`.

  Args:
    session: The job on its devices.
    batch: Placed arrays, of which only shapes and shardings are used.
  """
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

  state = session_lib.for_evaluation(session.abstract_state())
  jitted = session.layout.jit(step, out_shardings=session.layout.replicated)
  lowered = jitted.lower(state, dict(batch))
  return lowered.compile(compiler_options=session.compiler_options)
