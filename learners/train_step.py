"""The pure functions of a training run: one update, one evaluation.

Both take plain arrays and return plain arrays, know nothing of devices, and are
compiled by the runner under a layout.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax

from paxon.learners import (
  gradients,
  loss_function,
  metric_functions,
  optimizer_state,
  random_keys,
  skipping,
  token_count,
  train_state,
  variable_groups,
  variable_updates,
  weighted,
)
from paxon.learners import learner as learner_lib
from paxon.learners import norm_groups as norm_groups_lib

_Group = variable_groups.Group
_GROUPS = {
  "params": (_Group.OPTIMIZED,),
  "overwritten": (_Group.OVERWRITTEN,),
  "constant": (_Group.REPLACED, _Group.FROZEN),
}

# The random keys that every loss function gets.
STREAMS = ("dropout", "masking")

Metrics: TypeAlias = loss_function.Metrics
LossOutput: TypeAlias = loss_function.LossOutput
LossFn: TypeAlias = loss_function.LossFn
TrainStep: TypeAlias = Callable[
  [train_state.TrainState, metric_functions.Batch],
  tuple[train_state.TrainState, Metrics],
]
EvalStep: TypeAlias = Callable[
  [variable_groups.Tree, metric_functions.Batch], Metrics
]


def make_train_step(
  loss_fn: LossFn,
  *,
  learner: learner_lib.Learner,
  specs: variable_groups.Specs,
  seed: int,
  metric_fns: Sequence[metric_functions.MetricFn] = (),
  streams: Sequence[str] = STREAMS,
  norm_groups: Mapping[str, str] | None = None,
  gradient_fn: gradients.GradientFn | None = None,
) -> TrainStep:
  """Returns the function that makes one update.

  Args:
    loss_fn: `(variables, batch, rngs) -> LossOutput`.
    learner: Turns gradients into updates.
    specs: A `VariableSpec` for each variable.
    seed: Of the run; random keys follow from it and the step.
    metric_fns: Evaluated on the batch and the loss function's outputs.
    streams: Names of the random keys that `loss_fn` gets.
    norm_groups: Groups whose norms are told too, see `norm_groups.of_patterns`.
    gradient_fn: Computes gradients and metrics instead of `loss_fn` and
      `metric_fns`, such as a schedule of a pipeline does.

  Returns:
    `(state, batch) -> (state, metrics)`. Metrics are those of the loss function
    and of `metric_fns`, and `loss`, `learning_rate`, `grad_norm` (before
    clipping) and `param_norm` (before the update); `skipped`, the number of
    steps so far that made no update, if the learner skips; `tokens_trained` of
    all updates so far, if it counts; `grad_norm/<group>` and
    `param_norm/<group>` of the groups.
  """
  transform = learner.transform(specs)
  groups = {}
  if norm_groups is not None:
    groups = norm_groups_lib.of_patterns(norm_groups, specs=specs)
  if gradient_fn is None:
    gradient_fn = gradients.make_gradient_fn(
      loss_fn,
      metric_fns=metric_fns,
      num_microbatches=learner.num_microbatches,
      specs=specs,
    )

  def step(
    state: train_state.TrainState, batch: metric_functions.Batch
  ) -> tuple[train_state.TrainState, Metrics]:
    rngs = {
      name: random_keys.key_for(seed, step=state.step, stream=name)
      for name in streams
    }
    old = gradients.Variables(
      **{
        name: variable_groups.select(state.variables, *groups, specs=specs)
        for name, groups in _GROUPS.items()
      }
    )
    result = gradient_fn(old, batch, rngs)
    params32 = optimizer_state.as_float32(old.params)
    grad_norm = optax.tree.norm(result.params)
    updates, opt_state = transform.update(
      result.params, state.opt_state, params32
    )
    params = jax.tree.map(_add, old.params, updates)
    average = state.average
    if learner.average is not None and average is not None:
      average = learner.average.update(average, params)
    new_state = train_state.TrainState(
      step=state.step + 1,
      variables=variable_groups.merge(
        params,
        variable_updates.overwrite(
          old.overwritten, result.overwritten, specs=specs
        ),
        variable_updates.replace(
          old.constant, result.new_collections, specs=specs
        ),
      ),
      opt_state=opt_state,
      skipped=state.skipped,
      average=average,
      tokens=_tokens(state, result.metrics),
    )
    metrics = {
      **result.metrics,
      **_rates(learner, state),
      "grad_norm": weighted.scalar(grad_norm),
      "param_norm": weighted.scalar(optax.tree.norm(params32)),
      **norm_groups_lib.norms(result.params, groups=groups, prefix="grad_norm"),
      **norm_groups_lib.norms(params32, groups=groups, prefix="param_norm"),
    }
    if learner.skip is not None:
      harmless = learner.skip.is_harmless(
        loss=result.metrics["loss"][0],
        grad_norm=grad_norm,
        next_values=result.overwritten,
      )
      new_state = _skip_unless(harmless, new_state, state)
      metrics["skipped"] = weighted.scalar(new_state.skipped)
    if new_state.tokens is not None:
      count = token_count.as_float(new_state.tokens)
      metrics["tokens_trained"] = weighted.scalar(count)
    return new_state, metrics

  return step


def make_eval_step(
  loss_fn: LossFn, *, metric_fns: Sequence[metric_functions.MetricFn] = ()
) -> EvalStep:
  """Returns the function that measures one batch.

  Args:
    loss_fn: Gets no random keys, so it must be deterministic.
    metric_fns: Evaluated on the batch and the loss function's outputs.

  Returns:
    `(variables, batch) -> metrics`, as those of the train step without what
    belongs to an update.
  """

  def step(
    variables: variable_groups.Tree, batch: metric_functions.Batch
  ) -> Metrics:
    result = loss_fn(variables, batch, {})
    return loss_function.measure(result, metric_fns=metric_fns, batch=batch)

  return step


def _add(param: jax.Array, update: jax.Array) -> jax.Array:
  """The sum in float32, stored in the parameter's dtype."""
  return (param.astype(jnp.float32) + update).astype(param.dtype)


def _tokens(state: train_state.TrainState, metrics: Metrics) -> Any:
  """The tokens of all updates, this one's included."""
  if state.tokens is None:
    return None
  # The weight of the whole batch, of all its microbatches.
  return token_count.added(state.tokens, metrics["loss"][1])


def _rates(
  learner: learner_lib.Learner, state: train_state.TrainState
) -> Metrics:
  """The rates of this step's update."""
  updates_made = state.step
  if learner.skip is not None:
    # The optimizer's own count: a skipped step does not advance a schedule.
    updates_made = state.step - state.skipped
  rates = learner.learning_rates(updates_made)
  return {name: weighted.scalar(rate) for name, rate in rates.items()}


def _skip_unless(
  harmless: jax.Array,
  new: train_state.TrainState,
  old: train_state.TrainState,
) -> train_state.TrainState:
  """Returns `new`, or `old` with its counters advanced."""
  chosen: Any = skipping.choose(
    harmless,
    (new.variables, new.opt_state, new.average, new.tokens),
    (old.variables, old.opt_state, old.average, old.tokens),
  )
  variables, opt_state, average, tokens = chosen
  return train_state.TrainState(
    step=new.step,
    variables=variables,
    opt_state=opt_state,
    skipped=old.skipped + (~harmless).astype(jnp.int32),
    average=average,
    tokens=tokens,
  )
