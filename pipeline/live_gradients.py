"""Gradients that bubbles have no part in, and those that are values.

A bubble computes on something that is not meant for it, and may make NaN of it.
What it makes is thrown away, so the gradient that reaches it is zero; but zero
times infinity is NaN, and would be added to the gradients of the real work.
"""

from typing import Any

import jax
import jax.numpy as jnp

from paxon.learners import combining
from paxon.sharding import variables


@jax.custom_vjp
def only_if(live: jax.Array, tree: Any) -> Any:
  """Returns `tree`, whose gradient from here on is zero unless `live`.

  Args:
    live: Bool of rank 0.
    tree: Arrays of any dtype.
  """
  del live
  return tree


def _forward(live: jax.Array, tree: Any) -> tuple[Any, jax.Array]:
  return tree, live


def _backward(live: jax.Array, gradients: Any) -> tuple[None, Any]:
  def masked(g: Any) -> Any:
    # The gradient of integers and of keys has a dtype without values.
    if g.dtype == jax.dtypes.float0:
      return g
    return jnp.where(live, g, jnp.zeros_like(g))

  return None, jax.tree.map(masked, gradients)


only_if.defvjp(_forward, _backward)


def fanned_out(values: Any, specs: variables.Specs, *, copies: int) -> Any:
  """Returns a copy of variables for each tick, [copies,...].

  Their gradient, which is their next value, is that of all ticks, combined as
  each variable's `CombineRule` says: summed, which is what a derivative of
  copies is, it would be no value.

  Args:
    values: Nested dicts of variables that are overwritten with their gradient.
    specs: A `VariableSpec` for each of them.
    copies: How many.
  """

  @jax.custom_vjp
  def fan_out(values: Any) -> Any:
    return jax.tree.map(
      lambda x: jnp.broadcast_to(x[None], (copies, *x.shape)), values
    )

  def backward(_: None, gradients: Any) -> tuple[Any]:
    return (combining.overwritten(gradients, specs=specs),)

  fan_out.defvjp(lambda values: (fan_out(values), None), backward)
  return fan_out(values)
