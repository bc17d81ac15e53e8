"""The train step and the evaluation step, as pure functions of plain arrays.

The runner compiles them under a layout; nothing here depends on devices.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import re
from typing import Any, TypeAlias

from flax import traverse_util
import jax
import jax.numpy as jnp
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
_GROUPS = {
  "params": (_Group.OPTIMIZED,),
  "overwritten": (_Group.OVERWRITTEN,),
  "constant": (_Group.REPLACED, _Group.FROZEN),
}

# Default names of the random keys passed to a loss function.
STREAMS = ("dropout", "masking")
_NOISE_STREAM = "variational_noise"
_HESSIAN_STREAM = "hessian"

Metrics: TypeAlias = loss_function.Metrics
LossOutput: TypeAlias = loss_function.LossOutput
LossFn: TypeAlias = loss_function.LossFn
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
  optimized = variable_groups.select(specs, _Group.OPTIMIZED, specs=specs)
  groups = {}
  if norm_groups is not None:
    groups = group_by_patterns(norm_groups, specs=specs)
  if learner.losses is not None:
    if gradient_fn is not None:
      raise ValueError(
        "Learner.losses combines the metrics of the whole model, which"
        " `gradient_fn` (a pipeline schedule) does not have; use one of them."
      )
    loss_fn = loss_function.combine(loss_fn, learner.losses)
  extra_fn = _make_extra_fn(
    loss_fn,
    learner=learner,
    seed=seed,
    has_loss=gradient_fn is None and learner.privacy is None,
  )
  if learner.privacy is not None:
    if gradient_fn is not None:
      raise ValueError(
        "Learner.privacy clips the gradients of single examples, which"
        " `gradient_fn` (a pipeline schedule) replaces; use only one of them."
      )
    streams = (*streams, privacy.STREAM)
    gradient_fn = private_gradients.make_gradient_fn(
      loss_fn,
      metric_fns=metric_fns,
      privacy=learner.privacy,
      num_microbatches=learner.num_microbatches,
      specs=specs,
    )
  if gradient_fn is None:
    gradient_fn = gradients.make_gradient_fn(
      loss_fn,
      metric_fns=metric_fns,
      num_microbatches=learner.num_microbatches,
      specs=specs,
      measure_noise=learner.measure_noise,
    )

  def step(
    state: train_state.TrainState, batch: metrics_lib.Batch
  ) -> tuple[train_state.TrainState, Metrics]:
    rngs = {
      name: train_state.make_key(
        seed,
        step=state.step,
        stream=name,
        # The noise of privacy needs a generator of known quality.
        generator=(
          learner_lib.THREEFRY
          if name == privacy.STREAM
          else learner.random_generator
        ),
      )
      for name in streams
    }
    old = gradients.Variables(
      **{
        name: variable_groups.select(state.variables, *groups, specs=specs)
        for name, groups in _GROUPS.items()
      }
    )
    seen = old
    if learner.noise is not None:
      noisy = learner.noise.add(
        old.params,
        specs=optimized,
        step=state.step,
        key=train_state.make_key(seed, step=state.step, stream=_NOISE_STREAM),
      )
      seen = dataclasses.replace(old, params=noisy)
    result = gradient_fn(seen, batch, rngs)
    if learner.offload_state:
      state = _load_optimizer_state(state, after=result.params)
    params32 = optimizer_state.as_float32(old.params)
    grad_norm = optax.tree.norm(result.params)
    updates, opt_state = transform.update(
      result.params,
      state.opt_state,
      params32,
      **extra_fn(seen, batch, rngs, state.step),
    )
    params, more_metrics = jax.tree.map(_add, old.params, updates), {}
    if learner.after_update is not None:
      params, more_metrics = learner.after_update.apply(
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
    has_targets, own_metrics = loss_function.find_targets(result.metrics)
    metrics = {
      **own_metrics,
      **_rates(learner, state),
      "grad_norm": metrics_lib.scalar(grad_norm),
      "param_norm": metrics_lib.scalar(optax.tree.norm(params32)),
      **norms(result.params, groups=groups, prefix="grad_norm"),
      **norms(params32, groups=groups, prefix="param_norm"),
      **more_metrics,
    }
    is_update = None
    if may_lack_targets and learner.privacy is None:
      is_update = has_targets
    if learner.skip is not None:
      should_apply = learner.skip.should_apply(
        loss=result.metrics["loss"][0],
        grad_norm=grad_norm,
        next_values=result.overwritten,
      )
      is_update = (
        should_apply if is_update is None else should_apply & is_update
      )
    if is_update is not None:
      new_state = _skip_unless(is_update, new_state, state)
    if new_state.skipped is not None:
      metrics["skipped"] = metrics_lib.scalar(new_state.skipped)
    if new_state.tokens is not None:
      count = train_state.tokens_as_float(new_state.tokens)
      metrics["tokens_trained"] = metrics_lib.scalar(count)
    return new_state, metrics

  return step


def _load_optimizer_state(
  state: train_state.TrainState, *, after: variable_groups.Tree
) -> train_state.TrainState:
  """Returns the state with that of the optimizer in memory of the devices.

  It is copied once the gradients `after` exist, and activations no more.
  """
  opt_state, _ = jax.lax.optimization_barrier((state.opt_state, after))
  return dataclasses.replace(state, opt_state=host_memory.to_device(opt_state))


def _make_extra_fn(
  loss_fn: LossFn,
  *,
  learner: learner_lib.Learner,
  seed: int,
  has_loss: bool,
) -> Callable[..., dict[str, Any]]:
  """Returns `(variables, batch, rngs, step) -> arguments of the optimizer`."""
  optimizer = learner.optimizer
  if not isinstance(optimizer, optimizer_lib.UsesHessian):
    return lambda *_: {}
  if not has_loss:
    raise ValueError(
      f"Learner.optimizer {type(optimizer).__name__} needs second derivatives"
      " of the loss, which Learner.privacy and pipeline schedules do not give;"
      " use another optimizer."
    )

  estimate = optimizer.estimate_hessian

  def extra_fn(
    variables: gradients.Variables,
    batch: metrics_lib.Batch,
    rngs: dict[str, jax.Array],
    step: jax.Array,
  ) -> dict[str, Any]:
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

    key = train_state.make_key(seed, step=step, stream=_HESSIAN_STREAM)
    return {"hessian": lambda: estimate(objective, variables.params, key=key)}

  return extra_fn


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


def _skip_unless(
  is_update: jax.Array,
  new: train_state.TrainState,
  old: train_state.TrainState,
) -> train_state.TrainState:
  """Returns `new`, or `old` with its counters advanced."""
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


# Paths in a tree of variables, by group name.
Groups: TypeAlias = Mapping[str, Sequence[tuple[str, ...]]]


def group_by_patterns(
  patterns: Mapping[str, str], *, specs: variable_groups.Specs
) -> Groups:
  """Returns the paths of the optimized variables by group.

  Args:
    patterns: Regular expressions by group name. Each must match the whole
      logical name, such as "params/stack/layers/blocks_0/attention/query"; a
      variable may match several or none. An empty mapping makes one group for
      each top-level module, such as `embedding` and `stack`.
    specs: Specs of all variables.

  Raises:
    ValueError: A pattern is not a regular expression or matches no variable.
  """
  optimized = variable_groups.select(
    specs, variable_groups.Group.OPTIMIZED, specs=specs
  )
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
