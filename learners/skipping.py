"""Skipped updates: batches with non-finite or too large gradients.

A batch with a loss, a gradient or a next value that is not finite, or with a
gradient of too large a norm, leaves the state as it was, but for two counters:
`step`, because the batch is used up, and `skipped`. The optimizer and the
average of parameters do not count such a step.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from paxon.sharding import checks


@dataclasses.dataclass(frozen=True, kw_only=True)
class SkipUpdates:
  """Which updates are skipped.

  Attributes:
    above_grad_norm: Gradients of a larger norm, before clipping, are skipped;
      `None` skips only what is not finite.
  """

  above_grad_norm: float | None = None

  def __post_init__(self) -> None:
    checks.check_positive(self, "above_grad_norm")

  def is_harmless(
    self, *, loss: jax.Array, grad_norm: jax.Array, next_values: Any
  ) -> jax.Array:
    """Returns whether to make an update, a boolean scalar.

    Args:
      loss: Scalar.
      grad_norm: Norm of the gradients of all optimized variables.
      next_values: Gradients that are to become values, a pytree.
    """
    result = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
    if self.above_grad_norm is not None:
      result &= grad_norm <= self.above_grad_norm
    for value in jax.tree.leaves(next_values):
      # In float32, because isfinite knows no fp8.
      result &= jnp.all(jnp.isfinite(value.astype(jnp.float32)))
    return result


def choose(harmless: jax.Array, new: Any, old: Any) -> Any:
  """Returns `new` if `harmless` and else `old`, two pytrees."""
  return jax.tree.map(
    # What is passed on unchanged needs no choice, and no copy.
    lambda a, b: b if a is b else jnp.where(harmless, a, b),
    new,
    old,
  )
