"""A small training step, for tests of plans of functions."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from paxon.runner.plan import target as targets
from paxon.runner.plan.functions import tracing

WIDTH, ROWS, LAYERS = 64, 32, 3
WEIGHTS = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * LAYERS
BATCH = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
# Forward, and two in the backward pass but for the gradient of the batch.
FLOPS = (3 * LAYERS - 1) * 2 * ROWS * WIDTH**2


def step(weights: Any, batch: Any) -> Any:
  """Returns the weights after a step of gradient descent."""

  def loss(weights: Any) -> jax.Array:
    x = batch
    for weight in weights:
      x = jnp.tanh(x @ weight)
    return jnp.sum(x**2)

  gradients = jax.grad(loss)(weights)
  return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients)


def trace(
  function: Callable[..., Any],
  *arguments: Any,
  target: str = "cpu:8",
  **options: Any,
) -> tracing.Request:
  """Returns a traced function.

  Args:
    function: The function.
    *arguments: Its arguments.
    target: The devices.
    **options: Keywords of `tracing.trace`.
  """
  given: dict[str, Any] = {
    "mesh": None,
    "in_shardings": None,
    "donate": (),
    "batch_shape": None,
    "options": {},
  }
  return tracing.trace(
    function, arguments, target=targets.parse(target), **given | options
  )
