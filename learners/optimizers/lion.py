"""Lion: the sign of an interpolated momentum.

  p <- p - rate(t - 1) (sign(b1 m + (1 - b1) g) + weight_decay p)
  m <- b2 m + (1 - b2) g

(Chen et al. 2023, https://arxiv.org/abs/2302.06675, algorithm 2.) Each element
moves by the rate itself, so rates are 3 to 10 times smaller than AdamW's and
weight decays larger by the same factor. The momentum is sharded like its
parameter. Weight decay applies to variables with `VariableSpec.regularized`.
"""

import dataclasses

import jax.numpy as jnp
from jax.typing import DTypeLike
import optax

from paxon.learners import variable_groups
from paxon.learners.optimizers import optimizer
from paxon.sharding import checks


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lion:
  """The Lion optimizer.

  Attributes:
    schedule: Maps a step to a learning rate.
    b1: Weight of the momentum in the direction.
    b2: Decay of the momentum.
    weight_decay: Fraction of a parameter that is subtracted at rate 1.
    momentum_dtype: Storage dtype of the momentum. bfloat16 halves its memory;
      the update is computed in float32 from the stored momentum.
  """

  schedule: optax.Schedule
  b1: float = 0.9
  b2: float = 0.99
  weight_decay: float = 0.0
  momentum_dtype: DTypeLike = jnp.float32

  def __post_init__(self) -> None:
    checks.check_decay(self, "b1", "b2")
    checks.check_non_negative(self, "weight_decay")
    checks.check_floating(self, "momentum_dtype")

  def transform(
    self, specs: variable_groups.Specs | None = None
  ) -> optax.GradientTransformation:
    """Returns the update rule; `specs` None decays all variables."""
    return optimizer.descent(
      optimizer.store_mean(
        optax.scale_by_lion(b1=self.b1, b2=self.b2), self.momentum_dtype
      ),
      schedule=self.schedule,
      weight_decay=self.weight_decay,
      specs=specs,
    )
