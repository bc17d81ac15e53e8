"""A model as the three functions that a schedule runs: first, chunk and last.

The objective is a sum over microbatches of the losses of `last` and of what
chunks add to them. The caller divides by the total weight, as a learner does.

Variables of layers [L,...] are stored in the model's order and split into
virtual stages [K,...] of L/K layers; only `to_stages` depends on the schedule.
"""

from collections.abc import Callable, Mapping
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from paxon.pipeline.schedules import table as table_lib

# Nested containers of arrays.
Tree = Any


class Context(NamedTuple):
  """The microbatch and virtual stage that a function is called for.

  Random keys are made of `inputs` and `virtual_stage`, so that a recomputed
  forward pass draws the same numbers. `first` and the first chunk have the same
  context, and so have the last chunk and `last`.

  Attributes:
    microbatch: Index of the microbatch, int32.
    virtual_stage: Index of the virtual stage, int32.
    inputs: The microbatch of the batch.
  """

  microbatch: jax.Array
  virtual_stage: jax.Array
  inputs: Mapping[str, jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelFunctions:
  """A model as equal chunks, with functions before and after them.

  Attributes:
    first: `(outer, context) -> x`, such as an embedding; x is an array or a
      tree of arrays, all floating.
    chunk: `(variables, x, context) -> (y, auxiliary)`: one virtual stage. `y`
      is like `x`; `auxiliary` is a scalar that is added to the loss.
    last: `(outer, y, context) -> (loss, metrics)`: head and loss, summed over
      the microbatch; metrics are combined by `learners.metrics.add`.
  """

  first: Callable[[Tree, Context], Tree]
  chunk: Callable[[Tree, Tree, Context], tuple[Tree, jax.Array]]
  last: Callable[[Tree, Tree, Context], tuple[jax.Array, Tree]]


class Gradients(NamedTuple):
  """Sums over all microbatches.

  Attributes:
    loss: Of `last`, float32.
    auxiliary: Sum of the chunks' auxiliary losses, float32.
    metrics: Of `last`.
    chunks: Gradients of the virtual stages' variables [K,...], float32.
    outer: Gradients of the variables of `first` and `last`, float32.
  """

  loss: jax.Array
  auxiliary: jax.Array
  metrics: Tree
  chunks: Tree
  outer: Tree


GradientFn = Callable[..., Gradients]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shapes:
  """Shapes of the values that pass between the functions.

  Attributes:
    x: Input and output of a chunk.
    metrics: Of one microbatch.
  """

  x: Tree
  metrics: Tree


def check_shapes(
  functions: ModelFunctions, *, chunk: Tree, outer: Tree, context: Context
) -> Shapes:
  """Returns the shapes of activations and metrics.

  Raises:
    ValueError: The functions do not fit together.
  """
  x = jax.eval_shape(functions.first, outer, context)
  for leaf in jax.tree.leaves(x):
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
      raise ValueError(
        "ModelFunctions.first must return floating arrays, which have"
        f" gradients, got {leaf.dtype}{list(leaf.shape)}. Chunks can read"
        " integers from Context.inputs."
      )
  y, auxiliary = jax.eval_shape(functions.chunk, chunk, x, context)
  if _format(y) != _format(x):
    raise ValueError(
      "ModelFunctions.chunk must return an output like its input, with shapes"
      f" {_format(x)}, got {_format(y)}."
    )
  loss, metrics = jax.eval_shape(functions.last, outer, y, context)
  for name, scalar in (("chunk", auxiliary), ("last", loss)):
    if scalar.shape or not jnp.issubdtype(scalar.dtype, jnp.floating):
      raise ValueError(
        f"ModelFunctions.{name} must return a floating scalar to be added to"
        f" the loss, got {scalar.dtype}{list(scalar.shape)}."
      )
  return Shapes(x=x, metrics=metrics)


def _format(tree: Tree) -> str:
  return str(jax.tree.map(lambda x: f"{x.dtype}{list(x.shape)}", tree))


def split_layers(layers: Tree, *, num_virtual_stages: int) -> Tree:
  """Returns [L,...] as [K,L/K,...], the layers of each virtual stage.

  Raises:
    ValueError: K does not divide L.
  """

  def split(x: jax.Array) -> jax.Array:
    if x.shape[0] % num_virtual_stages:
      raise ValueError(
        f"The number of layers ({x.shape[0]}) must be a multiple of the"
        f" {num_virtual_stages} virtual stages (stages times chunks)."
      )
    return x.reshape(num_virtual_stages, -1, *x.shape[1:])

  return jax.tree.map(split, layers)


def merge_layers(tree: Tree) -> Tree:
  """Returns [K,L/K,...] as [L,...]."""
  return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), tree)


def to_stages(tree: Tree, *, table: table_lib.Table) -> Tree:
  """Returns [K,...] as [P,v,...], by stage and chunk."""

  def one(x: jax.Array) -> jax.Array:
    x = x.reshape(table.num_chunks, table.num_stages, *x.shape[1:])
    return jnp.moveaxis(x, 0, 1)

  return jax.tree.map(one, tree)


def from_stages(tree: Tree) -> Tree:
  """Returns [P,v,...] as [K,...]."""
  return jax.tree.map(
    lambda x: jnp.moveaxis(x, 1, 0).reshape(-1, *x.shape[2:]), tree
  )
