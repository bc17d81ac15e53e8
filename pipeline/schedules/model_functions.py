"""A model as the three functions that a schedule runs: first, chunk and last.

The objective is a sum over microbatches, of the losses of `last` and of what
chunks add to them. Sums, not means: the caller divides by a weight that is
known when all microbatches have been seen, as a learner does.
"""

from collections.abc import Callable, Mapping
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

# Nested containers of arrays.
Tree = Any


class Piece(NamedTuple):
  """What a function is told besides variables and activations.

  Nothing in it depends on the schedule: a random key follows from the
  microbatch and the virtual stage, so whatever runs again repeats itself.

  Attributes:
    microbatch: Its number, int32.
    virtual_stage: The number of the piece in the model, int32.
    inputs: The microbatch of the batch.
    key: Of this microbatch, virtual stage and function; None where no key was
      given.
  """

  microbatch: jax.Array
  virtual_stage: jax.Array
  inputs: Mapping[str, jax.Array]
  key: jax.Array | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelFunctions:
  """A model in equal pieces, and what is before and after them.

  Attributes:
    first: `(outer, piece) -> x`, such as an embedding; x is an array or a tree
      of arrays, all floating.
    chunk: `(variables, x, piece) -> (y, auxiliary)`: one virtual stage. `y` is
      like `x`; `auxiliary` is a scalar that is added to the loss.
    last: `(outer, y, piece) -> (loss, metrics)`: head and loss, summed over the
      microbatch; metrics are arrays that are added up.
  """

  first: Callable[[Tree, Piece], Tree]
  chunk: Callable[[Tree, Tree, Piece], tuple[Tree, jax.Array]]
  last: Callable[[Tree, Tree, Piece], tuple[jax.Array, Tree]]


def with_own_keys(functions: ModelFunctions) -> ModelFunctions:
  """Returns functions that fold their number into the key of their piece.

  `first`, the first chunk, `last` and the last chunk have pieces in common, and
  must not draw the same numbers.

  Args:
    functions: The model.
  """

  def own(number: int, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
      *rest, piece = args
      if piece.key is not None:
        piece = piece._replace(key=jax.random.fold_in(piece.key, number))
      return function(*rest, piece)

    return call

  return ModelFunctions(
    first=own(0, functions.first),
    chunk=own(1, functions.chunk),
    last=own(2, functions.last),
  )


class Gradients(NamedTuple):
  """What all microbatches say, summed.

  Attributes:
    loss: Of `last`, float32.
    auxiliary: What chunks add to it, float32.
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
  """What passes between the functions, as shapes.

  Attributes:
    x: Between pieces.
    metrics: Of one microbatch.
  """

  x: Tree
  metrics: Tree


def shapes_of(
  functions: ModelFunctions, *, chunk: Tree, outer: Tree, piece: Piece
) -> Shapes:
  """Returns the shapes, checked.

  Args:
    functions: The model.
    chunk: Variables of one virtual stage.
    outer: Variables of `first` and `last`.
    piece: Any.

  Raises:
    ValueError: The functions do not go with each other.
  """
  x = jax.eval_shape(functions.first, outer, piece)
  for leaf in jax.tree.leaves(x):
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
      raise ValueError(
        "ModelFunctions.first must return floating arrays, which have"
        f" gradients, got {leaf.dtype}{list(leaf.shape)}; chunks find others in"
        " Piece.inputs."
      )
  y, auxiliary = jax.eval_shape(functions.chunk, chunk, x, piece)
  if _described(y) != _described(x):
    raise ValueError(
      "ModelFunctions.chunk must return what it is given, of shapes"
      f" {_described(x)}, got {_described(y)}."
    )
  loss, metrics = jax.eval_shape(functions.last, outer, y, piece)
  for name, scalar in (("chunk", auxiliary), ("last", loss)):
    if scalar.shape or not jnp.issubdtype(scalar.dtype, jnp.floating):
      raise ValueError(
        f"ModelFunctions.{name} must return a floating scalar to be added to"
        f" the loss, got {scalar.dtype}{list(scalar.shape)}."
      )
  return Shapes(x=x, metrics=metrics)


def _described(tree: Tree) -> str:
  return str(jax.tree.map(lambda x: f"{x.dtype}{list(x.shape)}", tree))
