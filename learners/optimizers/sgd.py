"""Stochastic gradient descent, with heavy-ball or Nesterov momentum.

  m <- momentum m + g
  p <- p - rate(t - 1) (d + weight_decay p)

where d is m, or for Nesterov momentum `momentum m + g` with the new m
(Sutskever et al. 2013, https://proceedings.mlr.press/v28/sutskever13.html).
Without momentum, d is g and there is no state. The momentum is float32 and
sharded like its parameter. Weight decay applies to variables with
`VariableSpec.regularized`.
"""

import dataclasses

import jax.numpy as jnp
import optax

from paxon.learners import variable_groups
from paxon.learners.optimizers import optimizer
from paxon.sharding import checks


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sgd:
  """The SGD optimizer.

  Attributes:
    schedule: Maps a step to a learning rate.
    momentum: Decay of the sum of gradients; `None` disables momentum.
    nesterov: Whether to use Nesterov momentum; requires `momentum`.
    weight_decay: Fraction of a parameter that is subtracted at rate 1.
  """

  schedule: optax.Schedule
  momentum: float | None = None
  nesterov: bool = False
  weight_decay: float = 0.0

  def __post_init__(self) -> None:
    checks.check_decay(self, "momentum")
    checks.check_non_negative(self, "weight_decay")
    if self.nesterov and self.momentum is None:
      raise ValueError(
        "Sgd.nesterov needs Sgd.momentum, which is None; set it, such as to"
        " 0.9."
      )

  def transform(
    self, specs: variable_groups.Specs | None = None
  ) -> optax.GradientTransformation:
    """Returns the update rule; `specs` None decays all variables."""
    direction = optax.identity()
    if self.momentum is not None:
      direction = optax.trace(
        self.momentum, nesterov=self.nesterov, accumulator_dtype=jnp.float32
      )
    return optimizer.descent(
      direction,
      schedule=self.schedule,
      weight_decay=self.weight_decay,
      specs=specs,
    )
