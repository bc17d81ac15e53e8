"""The optimizer protocol, and update steps that optimizers share.

An optimizer gives a direction; `descent` turns it into the update

  p <- p - rate(t) (direction + weight_decay p)

with the decay decoupled from the direction (Loshchilov & Hutter 2019,
https://arxiv.org/abs/1711.05101) and scaled by the learning rate.
"""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import jax
import optax

from paxon.learners import variable_clipping, variable_groups


@runtime_checkable
class Optimizer(Protocol):
  """What a learner needs of an optimizer."""

  @property
  def schedule(self) -> optax.Schedule:
    """From a step to a learning rate."""
    ...

  def transform(
    self, specs: variable_groups.Specs | None = None
  ) -> optax.GradientTransformation:
    """Returns the update rule for variables with these specs."""
    ...


def descent(
  direction: optax.GradientTransformation,
  *,
  schedule: optax.Schedule,
  weight_decay: float,
  specs: variable_groups.Specs | None,
  max_update_rms: float | None = None,
) -> optax.GradientTransformation:
  """Returns the update rule of a direction.

  Its state is that of the direction, of optax's masked decay, and the count of
  the schedule, in this order, whatever the options are.

  Args:
    direction: From gradients to what is subtracted at rate one.
    schedule: From the number of updates made to a learning rate.
    weight_decay: Share of a parameter that is subtracted at rate one.
    specs: Of the variables; those `regularized` decay, with `None` all do.
    max_update_rms: Clips the direction of each variable; see
      `variable_clipping.by_rms`.
  """
  if max_update_rms is not None:
    limit = max_update_rms
    direction = then(
      direction,
      lambda updates, _: variable_clipping.by_rms(
        updates, max_rms=limit, specs=specs
      ),
    )
  regularized = None
  if specs is not None:
    regularized = jax.tree.map(lambda spec: spec.regularized, specs)
  return allow(
    optax.chain(
      direction,
      optax.add_decayed_weights(weight_decay, regularized),
      optax.scale_by_learning_rate(schedule),
    )
  )


def then(
  transform: optax.GradientTransformation,
  fn: Callable[[optax.Updates, optax.Params | None], optax.Updates],
) -> optax.GradientTransformation:
  """Returns `transform` followed by a function without state.

  Not `optax.chain`, which would add a level to the state: turning the function
  on or off must not change names in checkpoints.

  Args:
    transform: Any.
    fn: `(updates, params) -> updates`.
  """

  def update(
    updates: optax.Updates,
    state: optax.OptState,
    params: optax.Params | None = None,
  ) -> tuple[optax.Updates, optax.OptState]:
    updates, state = transform.update(updates, state, params)
    return fn(updates, params), state

  return optax.GradientTransformation(transform.init, update)


def allow(
  transform: optax.GradientTransformation,
) -> optax.GradientTransformation:
  """Returns `transform`, whose updates are traced with standard promotion."""

  def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
    with jax.numpy_dtype_promotion("standard"):
      return transform.update(updates, state, params)

  return optax.GradientTransformation(transform.init, update)
