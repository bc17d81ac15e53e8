"""Optax transformations under strict dtype promotion.

Optax raises Python floats to the power of integer counters, which JAX refuses
while `jax_numpy_dtype_promotion` is "strict", as it is in our tests.
"""

from typing import Any

import jax
import optax


def allow(
  transform: optax.GradientTransformation,
) -> optax.GradientTransformation:
  """Returns `transform`, whose updates are traced with standard promotion."""

  def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
    with jax.numpy_dtype_promotion("standard"):
      return transform.update(updates, state, params)

  return optax.GradientTransformation(transform.init, update)
