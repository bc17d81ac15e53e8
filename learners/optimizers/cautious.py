"""Cautious optimizers: no update against the sign of the gradient.

Around any optimizer with the direction u (Liang et al. 2024,
https://arxiv.org/abs/2411.16085, algorithm 1), for each variable of one layer
with d elements,

  c = 1 where u * g > 0, else 0
  u <- u c d / (sum(c) + 1)

Weight decay is not masked.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from paxon.learners import schedules, variable_clipping, variable_groups
from paxon.learners.optimizers import optimizer as optimizer_lib


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cautious(optimizer_lib.OptimizerWrapper):
  """The cautious variant of an optimizer.

  Attributes:
    optimizer: The optimizer, such as `adamw.AdamW` or `lion.Lion`; its schedule
      and weight decay apply.
  """

  optimizer: Any

  def __post_init__(self) -> None:
    names = {field.name for field in dataclasses.fields(self.optimizer)}
    if missing := sorted({"schedule", "weight_decay"} - names):
      raise ValueError(
        "Cautious.optimizer must have the fields schedule and weight_decay, but"
        f" {type(self.optimizer).__name__} has no {missing[0]}."
      )

  def transform(
    self, specs: variable_groups.Specs | None = None
  ) -> optax.GradientTransformation:
    """Returns the update rule; `specs` None decays all variables."""
    inner = dataclasses.replace(
      self.optimizer, schedule=schedules.Constant(value=1.0), weight_decay=0.0
    ).transform(specs)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
      gradients = updates
      updates, state = inner.update(gradients, state, params)
      # The inner update has the sign of a step, not of a direction.
      directions = jax.tree.map(jnp.negative, updates)
      return variable_clipping.map_layers(
        _mask, directions, specs, gradients
      ), state

    return optimizer_lib.descent(
      optax.GradientTransformation(inner.init, update),
      schedule=self.schedule,
      weight_decay=self.optimizer.weight_decay,
      specs=specs,
    )


def _mask(
  direction: jax.Array, axes: tuple[int, ...], gradient: jax.Array
) -> jax.Array:
  kept = (direction * gradient > 0).astype(direction.dtype)
  size = 1
  for axis in axes:
    size *= direction.shape[axis]
  count = jnp.sum(kept, axis=axes, keepdims=True)
  return direction * kept * (size / (count + 1))
