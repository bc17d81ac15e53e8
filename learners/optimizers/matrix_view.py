"""Variables as batches of matrices [..., inputs, outputs], for optimizers.

A matrix is a regularized variable with at least two dimensions in one layer.
Heads and their features are one side of it; each layer and each expert has its
own.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from paxon.learners import variable_groups
from paxon.sharding import axes as axis_names
from paxon.sharding import variables


class Sides(NamedTuple):
  """The dimensions of inputs and of outputs of a matrix."""

  inputs: tuple[int, ...]
  outputs: tuple[int, ...]


def find_all_sides(
  tree: Any, specs: variable_groups.Specs | None
) -> list[Sides | None]:
  """Returns the sides of each leaf of a tree, None for one without matrices.

  `specs` None takes arrays of two dimensions for matrices.
  """
  leaves, treedef = jax.tree.flatten(tree)
  if specs is None:
    return [Sides((0,), (1,)) if x.ndim == 2 else None for x in leaves]
  return [find_sides(spec) for spec in treedef.flatten_up_to(specs)]


def find_sides(spec: variables.VariableSpec) -> Sides | None:
  """Returns the sides of the matrices of a variable; None if it has none."""
  dims = [
    i
    for i in range(len(spec.stacked), len(spec.shape))
    if spec.axes[i] != axis_names.EXPERTS
  ]
  names = [spec.axes[i] for i in dims]
  if not spec.regularized or len(dims) < 2:
    return None
  # Inputs come first. What is more than a matrix is a kernel of heads, with the
  # width of the model first or last, or of a convolution, with outputs last.
  first = 1 if names[0] == axis_names.EMBED else len(dims) - 1
  return Sides(tuple(dims[:first]), tuple(dims[first:]))


def has_vocab(spec: variables.VariableSpec) -> bool:
  """Returns whether a variable is a table of the vocabulary."""
  return axis_names.VOCAB in spec.axes[len(spec.stacked) :]


def sizes(shape: tuple[int, ...], sides: Sides) -> tuple[int, int]:
  """Returns the numbers of inputs and outputs."""
  inputs, outputs = (math.prod(shape[i] for i in side) for side in sides)
  return inputs, outputs


def batch_shape(shape: tuple[int, ...], sides: Sides) -> tuple[int, ...]:
  """Returns the leading dimensions of `to_matrices`."""
  return tuple(shape[i] for i in _batch(len(shape), sides))


def to_matrices(x: jax.Array, sides: Sides) -> jax.Array:
  """Returns a variable as [*batch, inputs, outputs]."""
  order = (*_batch(x.ndim, sides), *sides.inputs, *sides.outputs)
  shape = (*batch_shape(x.shape, sides), *sizes(x.shape, sides))
  return jnp.transpose(x, order).reshape(shape)


def from_matrices(
  matrices: jax.Array, shape: tuple[int, ...], sides: Sides
) -> jax.Array:
  """Returns the variable of the given shape, the inverse of `to_matrices`."""
  order = (*_batch(len(shape), sides), *sides.inputs, *sides.outputs)
  inverse = sorted(range(len(shape)), key=order.__getitem__)
  x = matrices.reshape([shape[i] for i in order])
  return jnp.transpose(x, inverse)


def _batch(ndim: int, sides: Sides) -> tuple[int, ...]:
  return tuple(i for i in range(ndim) if i not in sides[0] + sides[1])
