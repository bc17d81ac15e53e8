"""The steps of a session, compiled ahead of the loops that run them."""

from collections.abc import Mapping
from typing import Any

import jax

from paxon.learners import metric_functions, train_state, train_step
from paxon.runner.programs import model_loss
from paxon.runner.programs import session as session_lib


def compile_train_step(session: session_lib.Session) -> jax.stages.Compiled:
  """Returns `(state, batch) -> (state, metrics)`.

  The state is donated: its memory is that of the state returned. Metrics are
  replicated, so that every host can read them.
  """
  job = session.job
  step = train_step.make_train_step(
    model_loss.make_loss_fn(
      job.task.model, specs=session.specs, deterministic=False
    ),
    learner=job.task.learner,
    specs=session.specs,
    seed=job.seed,
    metric_fns=job.task.metrics,
  )
  jitted = session.layout.jit(
    step,
    donate_argnums=0,
    out_shardings=(session.state_shardings, session.layout.replicated),
  )
  state = abstract(session.state_specs, session.state_shardings)
  return jitted.lower(state, dict(session.batch)).compile()


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
    state: train_state.TrainState, batch: metric_functions.Batch
  ) -> train_step.Metrics:
    return measure(session.evaluation_variables(state), batch)

  state = abstract(
    session_lib.for_evaluation(session.state_specs),
    session_lib.for_evaluation(session.state_shardings),
  )
  jitted = session.layout.jit(step, out_shardings=session.layout.replicated)
  return jitted.lower(state, dict(batch)).compile()


def abstract(specs: Any, shardings: Any) -> Any:
  """Returns a placed `jax.ShapeDtypeStruct` for each spec."""
  return jax.tree.map(
    lambda spec, sharding: jax.ShapeDtypeStruct(
      spec.shape, spec.dtype, sharding=sharding
    ),
    specs,
    shardings,
  )
