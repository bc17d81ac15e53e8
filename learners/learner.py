"""A learner: an optimizer, and what is done to gradients before it."""

import dataclasses
from typing import TypeAlias

import jax
from jax.typing import ArrayLike
import optax

from paxon.learners import optimizer as optimizer_lib
from paxon.learners import (
  optimizer_by_path,
  parameter_average,
  skipping,
  variable_clipping,
  variable_groups,
)
from paxon.sharding import checks

Optimizer: TypeAlias = optimizer_lib.Optimizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Learner:
  """Turns gradients into updates.

  Gradients are clipped variable by variable, then all together, then given to
  the optimizer.

  Attributes:
    optimizer: Such as `adamw.AdamW`.
    max_grad_norm: Gradients are scaled down to this norm, taken over all
      optimized variables together. `None` leaves them alone.
    max_variable_grad_norm: The gradient of each variable of each layer is
      scaled down to this norm. `None` leaves them alone.
    num_microbatches: A batch is computed in so many parts, one after the other,
      which saves memory; the gradient is that of the whole batch.
    skip: Which updates are skipped; `None` skips none.
    average: An average of the parameters for evaluation; `None` keeps none.
    count_tokens: Whether the train state counts the tokens of all updates, and
      the metric `tokens_trained` tells it.
  """

  optimizer: Optimizer
  max_grad_norm: float | None = None
  max_variable_grad_norm: float | None = None
  num_microbatches: int = 1
  skip: skipping.SkipUpdates | None = None
  average: parameter_average.ParameterAverage | None = None
  count_tokens: bool = False

  def __post_init__(self) -> None:
    checks.check_positive(
      self, "max_grad_norm", "max_variable_grad_norm", "num_microbatches"
    )

  def transform(
    self, specs: variable_groups.Specs
  ) -> optax.GradientTransformation:
    """Returns clipping and the optimizer as one optax transformation.

    Args:
      specs: Of all variables of a model. The transformation is for those that
        are optimized, as `variable_groups.select` returns them.
    """
    optimized = variable_groups.select(
      specs, variable_groups.Group.OPTIMIZED, specs=specs
    )
    inner = self.optimizer.transform(optimized)
    if self.max_grad_norm is None and self.max_variable_grad_norm is None:
      return inner

    # Not `optax.chain`, which would add a level to the state: clipping has no
    # state, and turning it on or off must not change names in checkpoints.
    def update(
      updates: optax.Updates,
      state: optax.OptState,
      params: optax.Params | None = None,
    ) -> tuple[optax.Updates, optax.OptState]:
      if self.max_variable_grad_norm is not None:
        updates = variable_clipping.by_norm(
          updates, max_norm=self.max_variable_grad_norm, specs=optimized
        )
      if self.max_grad_norm is not None:
        updates = variable_clipping.by_global_norm(
          updates, max_norm=self.max_grad_norm
        )
      return inner.update(updates, state, params)

    return optax.GradientTransformation(inner.init, update)

  def learning_rate(self, step: ArrayLike) -> jax.Array:
    """Returns the learning rate of the update made at `step`, float32."""
    return jax.numpy.asarray(self.optimizer.schedule(step), jax.numpy.float32)

  def learning_rates(self, step: ArrayLike) -> dict[str, jax.Array]:
    """Returns the learning rates at `step` by the name of their metric.

    With several optimizers each has a `learning_rate/<name>` of its own.
    """
    rates = {"learning_rate": self.learning_rate(step)}
    if isinstance(self.optimizer, optimizer_by_path.OptimizerByPath):
      for name, schedule in self.optimizer.schedules.items():
        rates[f"learning_rate/{name}"] = jax.numpy.asarray(
          schedule(step), jax.numpy.float32
        )
    return rates
