"""AdamW: Adam with decoupled weight decay.

  m <- b1 m + (1 - b1) g          m' = m / (1 - b1^t)
  v <- b2 v + (1 - b2) g^2        v' = v / (1 - b2^t)
  p <- p - rate(t - 1) (m' / (sqrt(v' + epsilon_root) + epsilon)
                        + weight_decay p)

with t counted from 1 (Loshchilov & Hutter 2019,
https://arxiv.org/abs/1711.05101; as in most libraries, the decay is scaled by
the learning rate). Moments are float32, except m with `momentum_dtype`, and
sharded like their parameters. Weight decay applies to variables with
`VariableSpec.regularized`.
"""

import dataclasses
import types

import jax.numpy as jnp
from jax.typing import DTypeLike
import optax

from paxon.learners import variable_groups
from paxon.learners.optimizers import optimizer
from paxon.sharding import checks

# Adam's presets of Pax, such as `AdamW(schedule=schedule, **HPARAMS_A)`. Pax
# also sets `max_update_rms=1.0` by default.
HPARAMS_A = types.MappingProxyType({"b1": 0.9, "b2": 0.997, "epsilon": 1e-9})
HPARAMS_B = types.MappingProxyType({"b1": 0.9, "b2": 0.98, "epsilon": 1e-9})


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdamW:
  """The AdamW optimizer.

  Attributes:
    schedule: Maps a step to a learning rate.
    b1: Decay of the mean of gradients.
    b2: Decay of the mean of squared gradients.
    epsilon: Added to the root of the mean of squared gradients.
    epsilon_root: Added to the mean of squared gradients before the root, so
      that the derivative of the update by gradients of zero is finite.
    weight_decay: Fraction of a parameter that is subtracted at rate 1.
    max_update_rms: Largest RMS of the update at rate 1 without decay, of one
      variable of one layer; `None` disables the clipping.
    momentum_dtype: Storage dtype of m. bfloat16 halves its memory; gradients
      are added in float32 and the sum is rounded, so m loses changes below
      2^-9 of itself. v is always float32: with b2 near one, rounding would
      remove its changes.
  """

  schedule: optax.Schedule
  b1: float = 0.9
  b2: float = 0.999
  epsilon: float = 1e-8
  epsilon_root: float = 0.0
  weight_decay: float = 0.0
  max_update_rms: float | None = None
  momentum_dtype: DTypeLike = jnp.float32

  def __post_init__(self) -> None:
    checks.check_decay(self, "b1", "b2")
    checks.check_positive(self, "epsilon", "max_update_rms")
    checks.check_non_negative(self, "epsilon_root", "weight_decay")
    checks.check_floating(self, "momentum_dtype")

  def transform(
    self, specs: variable_groups.Specs | None = None
  ) -> optax.GradientTransformation:
    """Returns the update rule; `specs` None decays all variables."""
    return optimizer.descent(
      optimizer.store_mean(
        optax.scale_by_adam(
          b1=self.b1,
          b2=self.b2,
          eps=self.epsilon,
          eps_root=self.epsilon_root,
        ),
        self.momentum_dtype,
      ),
      schedule=self.schedule,
      weight_decay=self.weight_decay,
      specs=specs,
      max_update_rms=self.max_update_rms,
    )
