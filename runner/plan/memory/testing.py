"""Graphs of small functions, for tests."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from paxon.runner.plan.memory import graph as graphs
from paxon.runner.plan.memory import propagation

FLOAT = 4


def mesh(**axes: int) -> dict[str, int]:
  """Returns the sizes of the axes `fsdp` and `tensor`."""
  return {"fsdp": 1, "tensor": 1} | axes


def array(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
  """Returns an abstract array."""
  return jax.ShapeDtypeStruct(shape, dtype)


def graph(
  fn: Callable[..., Any],
  *arguments: Any,
  specs: Mapping[int, jax.P] | None = None,
  sizes: Mapping[str, int] | None = None,
) -> graphs.Graph:
  """Returns the graph of a function with settled shardings.

  Args:
    fn: It is only traced.
    *arguments: Abstract arrays.
    specs: Of the inputs that are split, by position.
    sizes: Of the mesh axes.
  """
  sizes = mesh() if sizes is None else sizes
  abstract = jax.sharding.AbstractMesh(tuple(sizes.values()), tuple(sizes))
  found = graphs.of(jax.jit(fn).trace(*arguments).jaxpr)
  inputs = [
    None
    if specs is None or i not in specs
    else jax.NamedSharding(abstract, specs[i])
    for i in range(len(found.inputs))
  ]
  propagation.propagate(
    found,
    inputs=inputs,
    outputs=[None] * len(found.outputs),
    mesh=dict(sizes),
  )
  return found
