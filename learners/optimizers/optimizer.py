"""The optimizer protocol and the update step that optimizers share.

An optimizer computes a direction; `descent` turns it into the update

  p <- p - rate(t) (direction + weight_decay p)

with the decay decoupled from the direction (Loshchilov & Hutter 2019,
https://arxiv.org/abs/1711.05101) and scaled by the learning rate.
"""

from collections.abc import Callable, Iterable
import dataclasses
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
import optax

from paxon.learners import variable_clipping, variable_groups


@runtime_checkable
class Optimizer(Protocol):
  """A learning-rate schedule and an optax transformation."""

  @property
  def schedule(self) -> optax.Schedule:
    """Maps a step to a learning rate."""
    ...

  def transform(
    self, specs: variable_groups.Specs | None = None
  ) -> optax.GradientTransformation:
    """Returns the update rule for variables with these specs."""
    ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerWrapper:
  """Base of optimizers that change another one, their field `optimizer`."""

  optimizer: Optimizer

  @property
  def schedule(self) -> optax.Schedule:
    """The schedule of the optimizer."""
    return self.optimizer.schedule


@runtime_checkable
class Decays(Protocol):
  """An optimizer with decoupled weight decay."""

  @property
  def weight_decay(self) -> float:
    """Fraction of a parameter that is subtracted at rate 1."""
    ...


@runtime_checkable
class UsesHessian(Protocol):
  """An optimizer whose update takes `hessian`, a function without arguments.

  The train step passes it; it returns `estimate_hessian` of the loss.
  """

  def estimate_hessian(
    self,
    loss_fn: Callable[[Any], jax.Array],
    params: Any,
    *,
    key: jax.Array,
  ) -> Any:
    """Returns an estimate of the Hessian's diagonal, float32.

    `loss_fn` maps parameters to a scalar.
    """
    ...


@runtime_checkable
class AfterUpdate(Protocol):
  """A change of the parameters after the optimizer's update."""

  def apply(
    self,
    params: Any,
    collections: Any,
    *,
    specs: variable_groups.Specs,
  ) -> tuple[Any, dict[str, Any]]:
    """Returns the changed parameters, and metrics as (sum, weight) pairs.

    Args:
      params: Optimized variables after their update.
      collections: Collections that the forward pass of the step returned.
      specs: Specs of all variables.
    """
    ...


def descent(
  direction: optax.GradientTransformation,
  *,
  schedule: optax.Schedule,
  weight_decay: float,
  specs: variable_groups.Specs | None,
  max_update_rms: float | None = None,
) -> optax.GradientTransformationExtraArgs:
  """Returns the update rule for a direction.

  For all options, the state holds the states of the direction, of optax's
  masked decay and of the schedule, in this order.

  Args:
    direction: Maps gradients to the update at rate -1.
    schedule: Maps the number of previous updates to a learning rate.
    weight_decay: Fraction of a parameter that is subtracted at rate 1.
    specs: Specs of the variables; only `regularized` ones decay. `None` decays
      all variables.
    max_update_rms: Largest RMS of the direction of one variable, see
      `variable_clipping.clip_by_rms`; `None` disables the clipping.
  """
  if max_update_rms is not None:
    limit = max_update_rms
    direction = append_stateless(
      direction,
      lambda updates, _: variable_clipping.clip_by_rms(
        updates, max_rms=limit, specs=specs
      ),
    )
  return with_standard_promotion(
    optax.chain(
      direction,
      optax.add_decayed_weights(weight_decay, find_regularized(specs)),
      optax.scale_by_learning_rate(schedule),
    )
  )


def make_per_variable(
  state_class: type[Any],
  *,
  find: Callable[[Any], Iterable[Any]],
  init: Callable[[jax.Array, Any], Iterable[jax.Array]],
  update: Callable[[jax.Array, Any, Any], tuple[jax.Array, Any]],
) -> optax.GradientTransformation:
  """Returns a transformation of each variable by itself.

  Args:
    state_class: A named tuple: `count`, the number of updates, and trees with
      the structure of the parameters.
    find: Maps a tree to the facts about each of its leaves.
    init: Maps a variable and its facts to its arrays in these trees.
    update: Maps a gradient, `state_class` with the previous count and the
      arrays of one variable, and its facts to the direction and such a state.
  """

  def to_state(count: Any, treedef: Any, parts: Iterable[Any]) -> Any:
    # Empty columns if there are no variables.
    columns = list(zip(*parts, strict=True)) or [()] * len(state_class._fields)
    return state_class(count, *map(treedef.unflatten, columns[1:]))

  def init_all(params: Any) -> Any:
    leaves, treedef = jax.tree.flatten(params)
    count = jnp.zeros((), jnp.int32)
    parts = [
      (count, *init(p, facts))
      for p, facts in zip(leaves, find(params), strict=True)
    ]
    return to_state(count, treedef, parts)

  def update_all(
    updates: Any, state: Any, params: Any = None
  ) -> tuple[Any, Any]:
    del params
    leaves, treedef = jax.tree.flatten(updates)
    kept = map(treedef.flatten_up_to, state[1:])
    directions, parts = [], []
    for g, facts, *old in zip(leaves, find(updates), *kept, strict=True):
      direction, part = update(g, state_class(state.count, *old), facts)
      directions.append(direction)
      parts.append(part)
    count = optax.safe_increment(state.count)
    return treedef.unflatten(directions), to_state(count, treedef, parts)

  return optax.GradientTransformation(init_all, update_all)


def find_regularized(specs: variable_groups.Specs | None) -> Any:
  """Returns whether each variable decays; None, for all, without specs."""
  if specs is None:
    return None
  return jax.tree.map(lambda spec: spec.regularized, specs)


def find_depths(tree: Any, specs: variable_groups.Specs | None) -> list[int]:
  """Returns the number of stacked axes of each leaf; zeros without specs."""
  leaves, treedef = jax.tree.flatten(tree)
  if specs is None:
    return [0] * len(leaves)
  return [len(spec.stacked) for spec in treedef.flatten_up_to(specs)]


def append_stateless(
  transform: optax.GradientTransformation,
  fn: Callable[[optax.Updates, optax.Params | None], optax.Updates],
) -> optax.GradientTransformation:
  """Returns `transform` followed by a stateless function.

  Unlike `optax.chain`, this adds no level to the state, so adding or removing
  `fn(updates, params) -> updates` does not change names in checkpoints.
  """

  def update(
    updates: optax.Updates,
    state: optax.OptState,
    params: optax.Params | None = None,
  ) -> tuple[optax.Updates, optax.OptState]:
    updates, state = transform.update(updates, state, params)
    return fn(updates, params), state

  return optax.GradientTransformation(transform.init, update)


def store_mean(
  transform: optax.GradientTransformation, dtype: DTypeLike
) -> optax.GradientTransformation:
  """Returns `transform` with the field `mu` of its state stored in `dtype`.

  The update uses the float32 mean; only the stored one is rounded. With optax's
  own `mu_dtype`, the decayed mean is rounded before the gradient is added.
  """

  def store(state: Any) -> Any:
    return state._replace(mu=optax.tree.cast(state.mu, dtype))

  def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
    mean = optax.tree.cast(state.mu, jnp.float32)
    updates = optax.tree.cast(updates, jnp.float32)
    updates, state = transform.update(updates, state._replace(mu=mean), params)
    return updates, store(state)

  return optax.GradientTransformation(
    lambda params: store(transform.init(params)), update
  )


def with_standard_promotion(
  transform: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
  """Returns `transform` with updates under standard dtype promotion.

  Keyword arguments of an update, such as Sophia's `hessian`, are passed on.
  """
  inner = optax.with_extra_args_support(transform)

  def update(
    updates: Any, state: Any, params: Any = None, **extra: Any
  ) -> tuple[Any, Any]:
    with jax.numpy_dtype_promotion("standard"):
      return inner.update(updates, state, params, **extra)

  return optax.GradientTransformationExtraArgs(inner.init, update)
