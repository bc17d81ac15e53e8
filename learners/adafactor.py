"""Adafactor: squared gradients kept as rows and columns.

  u <- g / sqrt(factored mean of g^2)           see `factored_rms`
  u <- u / max(1, rms(u) / max_update_rms)
  u <- u max(rms(p), min_param_rms)             unless min_param_rms is None
  u <- m <- b1 m + (1 - b1) u                   unless b1 is None
  p <- p - rate(t - 1) (u + weight_decay p)

(Shazeer & Stern 2018, https://arxiv.org/abs/1804.04235.) The mean square of a
matrix takes the memory of one row and one column. All of it applies to each
variable of each layer alone. Statistics are float32 and sharded like their
parameter. Decay applies to the variables whose `VariableSpec` says
`regularized`; as in the other optimizers here it is scaled by the rate, which
it is not in optax's Adafactor.
"""

import dataclasses

import jax.numpy as jnp
import optax

from paxon.learners import (
  factored_rms,
  field_checks,
  optimizer,
  variable_clipping,
  variable_groups,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adafactor:
  """An optimizer: makes an optax transformation for given variables.

  Attributes:
    schedule: From a step to a learning rate, relative to the size of
      parameters unless `min_param_rms` is `None`.
    decay_exponent: The mean of squares decays by 1 - t^(-decay_exponent).
    epsilon: Added to squared gradients.
    min_dim_to_factor: Matrices with a smaller side keep the whole mean square.
    max_update_rms: Limit of a variable's update at rate one; `None` is none.
    min_param_rms: Updates are multiplied by the RMS of their parameter, or by
      this where it is more. `None` does not multiply.
    b1: Decay of the momentum; `None` has none.
    weight_decay: Share of a parameter that is subtracted at rate one.
  """

  schedule: optax.Schedule
  decay_exponent: float = 0.8
  epsilon: float = 1e-30
  min_dim_to_factor: int = 128
  max_update_rms: float | None = 1.0
  min_param_rms: float | None = 1e-3
  b1: float | None = None
  weight_decay: float = 0.0

  def __post_init__(self) -> None:
    field_checks.positive(
      self,
      "decay_exponent",
      "epsilon",
      "min_dim_to_factor",
      "max_update_rms",
      "min_param_rms",
    )
    field_checks.decay(self, "b1")
    field_checks.not_negative(self, "weight_decay")

  def transform(
    self, specs: variable_groups.Specs | None = None
  ) -> optax.GradientTransformation:
    """Returns the update rule as an optax transformation.

    Args:
      specs: Of the variables that are optimized. `None` decays all of them,
        and takes none for stacked.
    """

    def clip_and_scale(
      updates: optax.Updates, params: optax.Params | None
    ) -> optax.Updates:
      if self.max_update_rms is not None:
        updates = variable_clipping.by_rms(
          updates, max_rms=self.max_update_rms, specs=specs
        )
      if self.min_param_rms is not None:
        updates = variable_clipping.scale_by_rms(
          updates, params, min_rms=self.min_param_rms, specs=specs
        )
      return updates

    direction = optimizer.then(
      factored_rms.scale_by_factored_rms(
        decay_exponent=self.decay_exponent,
        epsilon=self.epsilon,
        min_dim_to_factor=self.min_dim_to_factor,
        specs=specs,
      ),
      clip_and_scale,
    )
    if self.b1 is not None:
      direction = optax.chain(
        direction,
        optax.ema(self.b1, debias=False, accumulator_dtype=jnp.float32),
      )
    return optimizer.descent(
      direction,
      schedule=self.schedule,
      weight_decay=self.weight_decay,
      specs=specs,
    )
