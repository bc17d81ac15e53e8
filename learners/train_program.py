"""The train step of a task with one learner or several.

With several learners, a step is that of their `TrainProgram`, and each of its
updates is the train step of one learner, to which the variables of the others
are frozen.
"""

from collections.abc import Callable, Mapping
import dataclasses
import functools
from typing import Any, TypeAlias
import zlib

from flax import traverse_util
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from paxon.learners import (
  gradients,
  learner_groups,
  loss_function,
  train_state,
  train_step,
  variable_groups,
)
from paxon.learners import learner as learner_lib
from paxon.learners import metrics as metrics_lib

_Group = variable_groups.Group
_Outputs: TypeAlias = tuple[train_state.TrainState, loss_function.Metrics]
# Fields of a state that belong to a learner.
_FIELDS = ("opt_state", "skipped", "average", "tokens")


def make_train_step(
  loss_fn: loss_function.LossFn,
  *,
  learner: learner_groups.AnyLearner,
  specs: variable_groups.Specs,
  norm_groups: Mapping[str, str] | None = None,
  gradient_fn: gradients.GradientFn | None = None,
  **options: Any,
) -> train_step.TrainStep:
  """Returns the train step, `(state, batch) -> (state, metrics)`.

  Arguments are those of `train_step.make_train_step`. With several learners,
  metrics begin with the name of a learner, such as `generator/loss`, and

    loss         the sum of the learners' mean losses
    grad_norm    the norm of all their gradients

  Raises:
    ValueError: The learners do not fit the variables, or their options each
      other.
  """
  if isinstance(learner, learner_lib.Learner):
    return train_step.make_train_step(
      loss_fn,
      learner=learner,
      specs=specs,
      norm_groups=norm_groups,
      gradient_fn=gradient_fn,
      **options,
    )
  if gradient_fn is not None:
    raise ValueError(
      "Task.learner must be a single Learner with a pipeline schedule, which"
      " computes the gradients of one loss."
    )
  paths = train_step.group_by_patterns(norm_groups, specs=specs)
  updates = {}
  for group, part in zip(
    learner.groups, learner_groups.split(learner, specs), strict=True
  ):
    step = train_step.make_train_step(
      loss_fn,
      learner=part.learner,
      specs=part.specs,
      norm_groups=_select_patterns(norm_groups, paths, part),
      **options,
    )
    updates[group.name] = _make_update(step, group=group, part=part)

  def run(state: train_state.TrainState, batch: metrics_lib.Batch) -> _Outputs:
    new, metrics = learner.program.run_step(updates, state, batch)
    _check_state(new, state, learner.program)
    new = dataclasses.replace(new, step=state.step + 1)
    return new, _flatten(metrics, updates, learner.program)

  return run


def _select_patterns(
  patterns: Mapping[str, str] | None,
  paths: train_step.Groups,
  part: learner_groups.Part,
) -> Mapping[str, str] | None:
  """Returns the norm groups with variables of one learner."""
  if not patterns:
    return patterns
  optimized = variable_groups.select(
    part.specs, _Group.OPTIMIZED, specs=part.specs
  )
  own = traverse_util.flatten_dict(optimized).keys()
  found = {name: p for name, p in patterns.items() if own & set(paths[name])}
  return found or None


def _make_update(
  step: Callable[..., _Outputs],
  *,
  group: learner_groups.LearnerGroup,
  part: learner_groups.Part,
) -> learner_groups.Update:
  """Returns the update of one learner."""
  # Learners draw different numbers in the same step.
  name_fold = zlib.crc32(group.name.encode())

  def update(
    state: train_state.TrainState,
    batch: metrics_lib.Batch,
    *,
    index: ArrayLike = 0,
    at: train_state.TrainState | None = None,
  ) -> _Outputs:
    seen = None if at is None else at.variables

    def apply(
      state: train_state.TrainState,
    ) -> _Outputs:
      own = train_state.TrainState(
        step=state.step,
        variables=state.variables,
        **{f: learner_groups.pick(getattr(state, f), part) for f in _FIELDS},
      )
      new, metrics = step(own, batch, folds=(name_fold, index), at=seen)
      variables = _merge(new.variables, state.variables, part, seen=seen)
      fields = {
        f: {**getattr(state, f), group.name: getattr(new, f)}
        for f in _FIELDS
        if getattr(new, f) is not None
      }
      return dataclasses.replace(state, variables=variables, **fields), metrics

    if group.every_steps == 1:
      return apply(state)
    _, shapes = jax.eval_shape(apply, state)
    return jax.lax.cond(
      (state.step + 1) % group.every_steps == 0,
      apply,
      # Metrics of weight 0 are not reported.
      lambda state: (
        state,
        jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes),
      ),
      state,
    )

  return update


def _merge(
  new: variable_groups.Tree,
  old: variable_groups.Tree,
  part: learner_groups.Part,
  *,
  seen: variable_groups.Tree | None,
) -> variable_groups.Tree:
  """Returns the variables after an update of one learner.

  `seen` are those at which the gradients were computed; None if they are `old`.
  """

  def select(
    tree: variable_groups.Tree, *groups: variable_groups.Group
  ) -> variable_groups.Tree:
    return variable_groups.select(tree, *groups, specs=part.specs)

  shared = select(new, _Group.OVERWRITTEN, _Group.REPLACED)
  if seen is not None:
    # Other learners' changes stay where this one made none.
    shared = variable_groups.map_paths(
      lambda new, seen, old: jnp.where(new == seen, old, new), shared, seen, old
    )
  return variable_groups.merge(
    select(new, _Group.OPTIMIZED), shared, select(old, _Group.FROZEN)
  )


def _check_state(new: Any, old: Any, program: Any) -> None:
  """Raises TypeError if a program returned another kind of state."""
  name = f"LearnerGroups.program: {type(program).__name__}.run_step"
  if jax.tree.structure(new) != jax.tree.structure(old):
    raise TypeError(
      f"{name} must return a state with the same arrays as it gets, got"
      f" {type(new).__name__} of {len(jax.tree.leaves(new))} arrays instead of"
      f" {len(jax.tree.leaves(old))}."
    )
  leaves = jax.tree_util.tree_leaves_with_path(new)
  for (path, x), before in zip(leaves, jax.tree.leaves(old), strict=True):
    if (x.shape, x.dtype) != (before.shape, before.dtype):
      key = jax.tree_util.keystr(path, simple=True, separator="/")
      raise TypeError(
        f"{name} must not change shapes or dtypes, got {x.dtype}"
        f" {list(x.shape)} for {key}, which was {before.dtype}"
        f" {list(before.shape)}."
      )


def _flatten(
  metrics: Any,
  updates: Mapping[str, Any],
  program: Any,
) -> loss_function.Metrics:
  """Returns the metrics of a step by name, with those of all learners."""
  losses = {n: m["loss"] for n, m in metrics.items() if n in updates}
  if not losses:
    raise ValueError(
      f"LearnerGroups.program: {type(program).__name__}.run_step must return"
      " the metrics of a learner, by its name:"
      f" {', '.join(updates)}; got {', '.join(metrics) or 'none'}."
    )
  weight = functools.reduce(jnp.maximum, (w for _, w in losses.values()))
  loss = sum(
    (total / loss_function.divisor(w) for total, w in losses.values()),
    start=jnp.zeros_like(weight),
  )
  norms = jnp.stack(
    [
      metrics[n]["grad_norm"][0]
      / loss_function.divisor(metrics[n]["grad_norm"][1])
      for n in losses
    ]
  )
  return {
    "loss": (loss * weight, weight),
    "grad_norm": metrics_lib.scalar(jnp.sqrt(jnp.sum(jnp.square(norms)))),
    **{
      f"{heading}/{name}": metric
      for heading, found in metrics.items()
      for name, metric in found.items()
    },
  }
