"""Skipping of updates with non-finite or too large gradients.

A batch with a non-finite loss, gradient or next value, or with too large a
gradient norm, changes only two counters of the state: `step`, because the batch
is consumed, and `skipped`. The optimizer and the average of parameters do not
count such a step.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from paxon.sharding import checks


@dataclasses.dataclass(frozen=True, kw_only=True)
class SkipUpdates:
  """The condition for skipping an update.

  Attributes:
    above_grad_norm: Skip if the gradient norm before clipping is larger; `None`
      skips only non-finite values.
  """

  above_grad_norm: float | None = None

  def __post_init__(self) -> None:
    checks.check_positive(self, "above_grad_norm")

  def should_apply(
    self, *, loss: jax.Array, grad_norm: jax.Array, next_values: Any
  ) -> jax.Array:
    """Returns whether to make the update, as a boolean scalar.

    The norm is that of the gradients of all optimized variables; `next_values`
    is a pytree of gradients that are the next values of variables.
    """
    result = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
    if self.above_grad_norm is not None:
      result &= grad_norm <= self.above_grad_norm
    for value in jax.tree.leaves(next_values):
      # In float32, because isfinite does not support fp8.
      result &= jnp.all(jnp.isfinite(value.astype(jnp.float32)))
    return result


def choose(is_update: jax.Array, new: Any, old: Any) -> Any:
  """Returns the pytree `new` if `is_update`, else `old`."""
  return jax.tree.map(
    # An unchanged array needs no select and no copy.
    lambda a, b: b if a is b else jnp.where(is_update, a, b),
    new,
    old,
  )
