"""The train step and the evaluation step, as pure functions of plain arrays.

The runner compiles them under a layout; nothing here depends on devices.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
import operator
import re
from typing import Any, TypeAlias

from flax import traverse_util
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
import optax

from paxon.learners import (
  gradients,
  loss_function,
  microbatches,
  optimizer_state,
  privacy,
  private_gradients,
  skipping,
  train_state,
  variable_groups,
  variable_updates,
)
from paxon.learners import learner as learner_lib
from paxon.learners import metrics as metrics_lib
from paxon.learners.optimizers import optimizer as optimizer_lib
from paxon.sharding import checks, host_memory

_Group = variable_groups.Group

# Default names of the random keys passed to a loss function.
STREAMS = ("dropout", "masking")
_NOISE_STREAM = "variational_noise"
_HESSIAN_STREAM = "hessian"

Metrics: TypeAlias = loss_function.Metrics
LossOutput: TypeAlias = loss_function.LossOutput
LossFn: TypeAlias = loss_function.LossFn
# Returns the random key of a stream, as `train_state.make_key`.
_MakeKey: TypeAlias = Callable[..., jax.Array]
TrainStep: TypeAlias = Callable[
  [train_state.TrainState, metrics_lib.Batch],
  tuple[train_state.TrainState, Metrics],
]
EvalStep: TypeAlias = Callable[
  [variable_groups.Tree, metrics_lib.Batch], Metrics
]


def make_train_step(
  loss_fn: LossFn,
  *,
  learner: learner_lib.Learner,
  specs: variable_groups.Specs,
  seed: int,
  metric_fns: Sequence[metrics_lib.MetricFn] = (),
  streams: Sequence[str] = STREAMS,
  norm_groups: Mapping[str, str] | None = None,
  gradient_fn: gradients.GradientFn | None = None,
  may_lack_targets: bool = True,
) -> TrainStep:
  """Returns the train step, `(state, batch) -> (state, metrics)`.

  Its keyword `folds` is that of `train_state.make_key`, by default empty; `at`
  are the variables at which gradients are computed, by default the state's.

  A batch without targets, whose loss has weight zero, changes only the step,
  which random keys depend on, and `skipped`: parameters, the optimizer with its
  schedule and the average stay as they are. With `learner.privacy` it is a
  step like any other, because leaving one out would disclose that the examples
  have no targets.

  The metrics are those of the loss function and of `metric_fns`, and:

    loss, learning_rate
    grad_norm            before clipping
    param_norm           before the update
    skipped              skipped steps so far, if `learner.skip` is set
    tokens_trained       tokens of all updates so far, if they are counted
    gradient_noise_scale if `learner.measure_noise` is set
    privacy/...          if `learner.privacy` is set
    and those of `learner.after_update`
    grad_norm/<group>    for each of `norm_groups`
    param_norm/<group>   for each of `norm_groups`

  Args:
    loss_fn: `(variables, batch, rngs) -> LossOutput`.
    learner: Turns gradients into updates.
    specs: A `VariableSpec` for each variable.
    seed: Seed of the training run; random keys depend on it and the step.
    metric_fns: Evaluated on the batch and the loss function's outputs.
    streams: Names of the random keys passed to `loss_fn`.
    norm_groups: Patterns of variables by group, see `group_by_patterns`.
    gradient_fn: Replaces the gradients of `loss_fn` and `metric_fns`, for
      example by those of a pipeline schedule.
    may_lack_targets: Whether a batch may have no targets. If none does, nothing
      is selected: on CPUs that takes the memory of the optimizer's moments.
  """
  transform = learner.transform(specs)
  groups = group_by_patterns(norm_groups, specs=specs)
  _check_gradient_fn(gradient_fn, learner)

  def step(
    state: train_state.TrainState,
    batch: metrics_lib.Batch,
    *,
    folds: Sequence[ArrayLike] = (),
    at: variable_groups.Tree | None = None,
  ) -> tuple[train_state.TrainState, Metrics]:
    make_key = _bind_key(seed, state.step, folds)
    objective = loss_function.combine(loss_fn, learner.losses, step=state.step)
    compute = gradient_fn or _make_gradient_fn(
      objective, metric_fns, learner, specs
    )
    rngs = _make_rngs(streams, learner=learner, make_key=make_key)
    old = gradients.group_variables(state.variables, specs=specs)
    seen = old if at is None else gradients.group_variables(at, specs=specs)
    seen = _add_noise(seen, state.step, learner, specs, make_key)
    result = compute(seen, batch, rngs)
    if learner.offload_state:
      state = _load_optimizer_state(state, after=result.params)
    params32 = optimizer_state.as_float32(old.params)
    grad_norm = optax.tree.norm(result.params)
    extra_args = _make_extra_args(
      objective, seen, batch, rngs, learner=learner, make_key=make_key
    )
    updates, opt_state = transform.update(
      result.params, state.opt_state, params32, **extra_args
    )
    new_state, more_metrics = _apply_updates(
      updates, opt_state, state, result, learner=learner, specs=specs
    )
    has_targets, own_metrics = loss_function.find_targets(result.metrics)
    metrics = {
      **own_metrics,
      **_rates(learner, state),
      **_measure_norms(grad_norm, result.params, params32, groups),
      **more_metrics,
    }
    conditions = _find_conditions(result, grad_norm, learner)
    if may_lack_targets and learner.privacy is None:
      conditions.append(has_targets)
    new_state = _skip_unless(conditions, new_state, state)
    return new_state, metrics | _count_metrics(new_state)

  return step


def _check_gradient_fn(
  gradient_fn: gradients.GradientFn | None, learner: learner_lib.Learner
) -> None:
  """Raises ValueError if gradients are not made as the learner needs them."""
  if gradient_fn is not None and learner.losses is not None:
    raise ValueError(
      "Learner.losses combines the metrics of the whole model, which"
      " `gradient_fn` (a pipeline schedule) does not have; use one of them."
    )
  if gradient_fn is not None and learner.gradient_rule is not None:
    raise ValueError(
      "Learner.gradient_rule computes gradients of the whole model, which"
      " `gradient_fn` (a pipeline schedule) does not give; use one of them."
    )
  if isinstance(learner.optimizer, optimizer_lib.UsesHessian) and (
    gradient_fn is not None
    or learner.privacy is not None
    or learner.gradient_rule is not None
  ):
    raise ValueError(
      f"Learner.optimizer {type(learner.optimizer).__name__} needs second"
      " derivatives of the loss, which Learner.privacy, Learner.gradient_rule"
      " and pipeline schedules do not give; use another optimizer."
    )
  if gradient_fn is not None and learner.privacy is not None:
    raise ValueError(
      "Learner.privacy clips the gradients of single examples, which"
      " `gradient_fn` (a pipeline schedule) replaces; use only one of them."
    )


def _make_gradient_fn(
  loss_fn: LossFn,
  metric_fns: Sequence[metrics_lib.MetricFn],
  learner: learner_lib.Learner,
  specs: variable_groups.Specs,
) -> gradients.GradientFn:
  """Returns the gradients of `loss_fn`, with privacy if the learner has it."""
  if learner.privacy is not None:
    return private_gradients.make_gradient_fn(
      loss_fn,
      metric_fns=metric_fns,
      privacy=learner.privacy,
      num_microbatches=learner.num_microbatches,
      specs=specs,
    )
  make_default = functools.partial(
    gradients.make_gradient_fn,
    metric_fns=metric_fns,
    num_microbatches=learner.num_microbatches,
    specs=specs,
    measure_noise=learner.measure_noise,
  )
  if learner.gradient_rule is None:
    return make_default(loss_fn)
  return gradients.make_checked(
    learner.gradient_rule.make_gradient_fn(
      loss_fn, make_default=make_default, specs=specs
    )
  )


def _bind_key(
  seed: int, step: jax.Array, folds: Sequence[ArrayLike]
) -> _MakeKey:
  return functools.partial(train_state.make_key, seed, step=step, folds=folds)


def _make_rngs(
  streams: Sequence[str], *, learner: learner_lib.Learner, make_key: _MakeKey
) -> dict[str, jax.Array]:
  """Returns the random keys of a step by stream, with that of privacy."""
  rngs = {
    name: make_key(stream=name, generator=learner.random_generator)
    for name in streams
  }
  if learner.privacy is not None:
    rngs[privacy.STREAM] = make_key(
      stream=privacy.STREAM,
      # The noise of privacy needs a generator of known quality.
      generator=learner_lib.THREEFRY,
    )
  return rngs


def _add_noise(
  variables: gradients.Variables,
  step: jax.Array,
  learner: learner_lib.Learner,
  specs: variable_groups.Specs,
  make_key: _MakeKey,
) -> gradients.Variables:
  """Returns the variables at which to compute gradients."""
  if learner.noise is None:
    return variables
  noisy = learner.noise.add(
    variables.params,
    specs=variable_groups.select(specs, _Group.OPTIMIZED, specs=specs),
    step=step,
    key=make_key(stream=_NOISE_STREAM),
  )
  return dataclasses.replace(variables, params=noisy)


def _load_optimizer_state(
  state: train_state.TrainState, *, after: variable_groups.Tree
) -> train_state.TrainState:
  """Returns the state with that of the optimizer in memory of the devices.

  It is copied once the gradients `after` exist, and activations no more.
  """
  opt_state, _ = jax.lax.optimization_barrier((state.opt_state, after))
  return dataclasses.replace(state, opt_state=host_memory.to_device(opt_state))


def _make_extra_args(
  loss_fn: LossFn,
  variables: gradients.Variables,
  batch: metrics_lib.Batch,
  rngs: dict[str, jax.Array],
  *,
  learner: learner_lib.Learner,
  make_key: _MakeKey,
) -> dict[str, Any]:
  """Returns further arguments of the optimizer."""
  if not isinstance(learner.optimizer, optimizer_lib.UsesHessian):
    return {}
  estimate = learner.optimizer.estimate_hessian
  parts, shared = microbatches.split(
    batch, num_microbatches=learner.num_microbatches
  )
  part = jax.tree.map(lambda x: x[0], parts) | shared

  def objective(params: variable_groups.Tree) -> jax.Array:
    merged = variable_groups.merge(
      params, variables.overwritten, variables.constant
    )
    total, weight = loss_fn(merged, part, rngs).loss
    return total / loss_function.divisor(weight)

  key = make_key(stream=_HESSIAN_STREAM)
  return {"hessian": lambda: estimate(objective, variables.params, key=key)}


def _apply_updates(
  updates: optax.Updates,
  opt_state: optax.OptState,
  state: train_state.TrainState,
  result: gradients.Gradients,
  *,
  learner: learner_lib.Learner,
  specs: variable_groups.Specs,
) -> tuple[train_state.TrainState, Metrics]:
  """Returns the state after an update, and metrics of `after_update`."""
  old = gradients.group_variables(state.variables, specs=specs)
  params, metrics = jax.tree.map(_add, old.params, updates), {}
  if learner.after_update is not None:
    params, metrics = learner.after_update.apply(
      params, result.new_collections, specs=specs
    )
  average = state.average
  if learner.average is not None and average is not None:
    averaged = old.params if learner.average.before_update else params
    average = learner.average.update(average, averaged)
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
  return new_state, metrics


def make_eval_step(
  loss_fn: LossFn, *, metric_fns: Sequence[metrics_lib.MetricFn] = ()
) -> EvalStep:
  """Returns the evaluation step, `(variables, batch) -> metrics`.

  `loss_fn` must be deterministic: it is called without random keys.
  """

  def step(
    variables: variable_groups.Tree, batch: metrics_lib.Batch
  ) -> Metrics:
    result = loss_fn(variables, batch, {})
    found = loss_function.measure(result, metric_fns=metric_fns, batch=batch)
    return loss_function.find_targets(found)[1]

  return step


def _add(param: jax.Array, update: jax.Array) -> jax.Array:
  """Adds in float32 and casts to the parameter's dtype."""
  return (param.astype(jnp.float32) + update).astype(param.dtype)


def _tokens(state: train_state.TrainState, metrics: Metrics) -> Any:
  """Returns the token count including this update."""
  if state.tokens is None:
    return None
  # The weight of the whole batch, summed over its microbatches.
  return train_state.add_tokens(state.tokens, metrics["loss"][1])


def _rates(
  learner: learner_lib.Learner, state: train_state.TrainState
) -> Metrics:
  """Returns the learning rates of this step's update."""
  # The optimizer's count: a skipped step does not advance a schedule.
  updates_made = _count_updates(state.opt_state)
  if updates_made is None:
    skipped = 0 if state.skipped is None else state.skipped
    updates_made = state.step - skipped
  rates = learner.learning_rates(updates_made)
  return {name: metrics_lib.scalar(rate) for name, rate in rates.items()}


def _count_updates(opt_state: optax.OptState) -> jax.Array | None:
  """Returns the optimizer's count of updates; None if it is not known."""
  kind = optax.ScaleByScheduleState
  for node in jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, kind)):
    if isinstance(node, kind):
      # Equal for all layers of a stack.
      return jnp.ravel(node.count)[0]
  return None


def _find_conditions(
  result: gradients.Gradients,
  grad_norm: jax.Array,
  learner: learner_lib.Learner,
) -> list[jax.Array]:
  """Returns the conditions of `learner.skip` for making the update."""
  if learner.skip is None:
    return []
  should_apply = learner.skip.should_apply(
    loss=result.metrics["loss"][0],
    grad_norm=grad_norm,
    next_values=result.overwritten,
  )
  return [should_apply]


def _skip_unless(
  conditions: Sequence[jax.Array],
  new: train_state.TrainState,
  old: train_state.TrainState,
) -> train_state.TrainState:
  """Returns `new`, or `old` with its counters advanced if a condition fails."""
  if not conditions:
    return new
  is_update = functools.reduce(operator.and_, conditions)
  chosen: Any = skipping.choose(
    is_update,
    (new.variables, new.opt_state, new.average, new.tokens),
    (old.variables, old.opt_state, old.average, old.tokens),
  )
  variables, opt_state, average, tokens = chosen
  skipped = old.skipped
  if skipped is not None:
    skipped += (~is_update).astype(jnp.int32)
  return train_state.TrainState(
    step=new.step,
    variables=variables,
    opt_state=opt_state,
    skipped=skipped,
    average=average,
    tokens=tokens,
  )


def _count_metrics(state: train_state.TrainState) -> Metrics:
  """Returns the counters of the state as metrics."""
  metrics = {}
  if state.skipped is not None:
    metrics["skipped"] = metrics_lib.scalar(state.skipped)
  if state.tokens is not None:
    count = train_state.tokens_as_float(state.tokens)
    metrics["tokens_trained"] = metrics_lib.scalar(count)
  return metrics


# Paths in a tree of variables, by group name.
Groups: TypeAlias = Mapping[str, Sequence[tuple[str, ...]]]


def group_by_patterns(
  patterns: Mapping[str, str] | None, *, specs: variable_groups.Specs
) -> Groups:
  """Returns the paths of the optimized variables by group.

  Args:
    patterns: Regular expressions by group name. Each must match the whole
      logical name, such as "params/stack/layers/blocks_0/attention/query"; a
      variable may match several or none. An empty mapping makes one group for
      each top-level module, such as `embedding` and `stack`; `None` makes none.
    specs: Specs of all variables.

  Raises:
    ValueError: A pattern is not a regular expression or matches no variable.
  """
  if patterns is None:
    return {}
  optimized = variable_groups.select(specs, _Group.OPTIMIZED, specs=specs)
  flat: dict[Any, Any] = traverse_util.flatten_dict(optimized)
  groups: dict[str, list[Any]] = {}
  if not patterns:
    for path in flat:
      groups.setdefault(path[1], []).append(path)
    return groups
  for name, pattern in patterns.items():
    checks.check_pattern(f"The pattern of the norm group {name!r}", pattern)
    paths = [p for p, s in flat.items() if re.fullmatch(pattern, s.name)]
    if not paths:
      raise ValueError(
        f"The pattern {pattern!r} of the norm group {name!r} matches no"
        " variable; it must match a whole name, such as"
        f" {next(iter(flat.values())).name!r}."
      )
    groups[name] = paths
  return groups


def _measure_norms(
  grad_norm: jax.Array,
  gradient: variable_groups.Tree,
  params: variable_groups.Tree,
  groups: Groups,
) -> Metrics:
  """Returns the norms of a gradient and of parameters, all and by group."""
  return {
    "grad_norm": metrics_lib.scalar(grad_norm),
    "param_norm": metrics_lib.scalar(optax.tree.norm(params)),
    **norms(gradient, groups=groups, prefix="grad_norm"),
    **norms(params, groups=groups, prefix="param_norm"),
  }


def norms(
  tree: variable_groups.Tree, *, groups: Groups, prefix: str
) -> dict[str, metrics_lib.Weighted]:
  """Returns the norm of each group as the metric `<prefix>/<group>`.

  `tree` has gradients or parameters in float32 with the paths of the groups.
  """
  flat: Any = traverse_util.flatten_dict(tree)
  return {
    f"{prefix}/{name}": metrics_lib.scalar(
      optax.tree.norm([flat[path] for path in paths])
    )
    for name, paths in groups.items()
  }
