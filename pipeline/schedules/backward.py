"""The operations of a table, each on one piece of the model.

Those of a table that recomputes run a piece from its stored input; those of one
that saves are the parts of a split piece. Gradients come out in float32, in
which they are added up.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from paxon.pipeline.schedules import backward_split, model_functions, operation

_Kind = operation.Kind
_Tree = model_functions.Tree


class Given(NamedTuple):
  """What operations of one piece have in common.

  Attributes:
    functions: The model.
    outer: Variables of `first` and `last`.
    piece: Which one.
    is_first: Whether it is the model's first, bool.
    residuals: What its forward operation kept, where it kept anything.
    pairs: What its gradient of the input kept, likewise.
  """

  functions: model_functions.ModelFunctions
  outer: _Tree
  piece: model_functions.Piece
  is_first: jax.Array
  residuals: Sequence[jax.Array] = ()
  pairs: Sequence[jax.Array] = ()


class Made(NamedTuple):
  """What an operation makes; zeros where it makes none.

  Attributes:
    message: For another piece, like x.
    auxiliary: To be added to the loss, float32.
    chunk: Gradients of the piece's variables, float32.
    residuals: To be kept.
    pairs: To be kept.
  """

  message: _Tree
  auxiliary: jax.Array
  chunk: _Tree
  residuals: Sequence[jax.Array] = ()
  pairs: Sequence[jax.Array] = ()


Run = Callable[[Given, _Tree, _Tree, _Tree], Made]


def nothing(given: Given, chunk: _Tree, x: _Tree, dy: _Tree) -> Made:
  """An empty place of the table."""
  del dy
  return Made(
    _zeros(x),
    jnp.float32(0),
    _zeros_float32(chunk),
    _zeros(given.residuals),
    _zeros(given.pairs),
  )


def forward(given: Given, chunk: _Tree, x: _Tree, dy: _Tree) -> Made:
  """F: the piece's output."""
  del dy
  x = _input(given, x)
  y, auxiliary = given.functions.chunk(chunk, x, given.piece)
  return Made(y, auxiliary.astype(jnp.float32), _zeros_float32(chunk))


def both(given: Given, chunk: _Tree, x: _Tree, dy: _Tree) -> Made:
  """X: the gradients of input and variables."""

  def run(chunk: _Tree, x: _Tree) -> tuple[_Tree, jax.Array]:
    return given.functions.chunk(chunk, x, given.piece)

  (_, auxiliary), pull = jax.vjp(run, chunk, _input(given, x))
  gradients, dx = pull((dy, jnp.ones_like(auxiliary)))
  return Made(dx, jnp.float32(0), as_float32(gradients))


def of_input(given: Given, chunk: _Tree, x: _Tree, dy: _Tree) -> Made:
  """B: the gradient of the input."""

  def run(x: _Tree) -> tuple[_Tree, jax.Array]:
    return given.functions.chunk(chunk, x, given.piece)

  (_, auxiliary), pull = jax.vjp(run, _input(given, x))
  (dx,) = pull((dy, jnp.ones_like(auxiliary)))
  return Made(dx, jnp.float32(0), _zeros_float32(chunk))


def of_weights(given: Given, chunk: _Tree, x: _Tree, dy: _Tree) -> Made:
  """W: the gradients of the variables."""
  x = _input(given, x)

  def run(chunk: _Tree) -> tuple[_Tree, jax.Array]:
    return given.functions.chunk(chunk, x, given.piece)

  (_, auxiliary), pull = jax.vjp(run, chunk)
  (gradients,) = pull((dy, jnp.ones_like(auxiliary)))
  return Made(_zeros(x), jnp.float32(0), as_float32(gradients))


# Run a piece forward again; nothing is kept but its input.
RECOMPUTING: Mapping[operation.Kind, Run] = {
  _Kind.FORWARD: forward,
  _Kind.BACKWARD: both,
  _Kind.INPUT_GRADIENT: of_input,
  _Kind.WEIGHT_GRADIENT: of_weights,
}


def saving(split: backward_split.Split) -> Mapping[operation.Kind, Run]:
  """Returns the operations that are parts of a split piece.

  Args:
    split: Of the model's chunk; its others are a `Piece`.
  """
  no_residuals, no_pairs = _blank(split.residuals), _blank(split.pairs)

  def free(given: Given, chunk: _Tree) -> _Tree:
    return chunk, given.piece

  def keeping_forward(given: Given, chunk: _Tree, x: _Tree, dy: _Tree) -> Made:
    del dy
    made = split.forward(free(given, chunk), _input(given, x))
    (y, auxiliary), residuals = made
    auxiliary = auxiliary.astype(jnp.float32)
    zeros = _zeros_float32(chunk)
    return Made(y, auxiliary, zeros, residuals, no_pairs())

  def keeping_input(given: Given, chunk: _Tree, x: _Tree, dy: _Tree) -> Made:
    del x
    dx, pairs = split.of_input(free(given, chunk), given.residuals, dy)
    zeros = _zeros_float32(chunk)
    return Made(dx, jnp.float32(0), zeros, no_residuals(), pairs)

  def kept_weights(given: Given, chunk: _Tree, x: _Tree, dy: _Tree) -> Made:
    del dy
    dw = as_float32(split.of_weights(free(given, chunk), given.pairs))
    return Made(_zeros(x), jnp.float32(0), dw, no_residuals(), no_pairs())

  def kept_both(given: Given, chunk: _Tree, x: _Tree, dy: _Tree) -> Made:
    made = keeping_input(given, chunk, x, dy)
    own = given._replace(pairs=made.pairs)
    dw = kept_weights(own, chunk, x, dy).chunk
    return made._replace(chunk=dw, pairs=no_pairs())

  return {
    _Kind.FORWARD: keeping_forward,
    _Kind.BACKWARD: kept_both,
    _Kind.INPUT_GRADIENT: keeping_input,
    _Kind.WEIGHT_GRADIENT: kept_weights,
  }


def _blank(
  shapes: Sequence[jax.ShapeDtypeStruct],
) -> Callable[[], list[jax.Array]]:
  return lambda: [jnp.zeros(s.shape, s.dtype) for s in shapes]


def head(
  given: Given, y: _Tree
) -> tuple[tuple[jax.Array, _Tree], _Tree, _Tree]:
  """Returns (loss, metrics), and gradients of `y` and of `outer`."""

  def run(y: _Tree, outer: _Tree) -> tuple[jax.Array, _Tree]:
    return given.functions.last(outer, y, given.piece)

  loss, pull, metrics = jax.vjp(run, y, given.outer, has_aux=True)
  dy, outer = pull(jnp.ones_like(loss))
  return (loss.astype(jnp.float32), metrics), dy, as_float32(outer)


def first(given: Given, dx: _Tree) -> _Tree:
  """Returns gradients of `outer` by the input of the model's first piece."""

  def run(outer: _Tree) -> _Tree:
    return given.functions.first(outer, given.piece)

  _, pull = jax.vjp(run, given.outer)
  (outer,) = pull(dx)
  return as_float32(outer)


def as_float32(tree: _Tree) -> _Tree:
  """Returns gradients in the dtype of their sums."""
  return jax.tree.map(lambda x: x.astype(jnp.float32), tree)


def _input(given: Given, x: _Tree) -> _Tree:
  """Returns the input of the piece: stored, or made by `first`."""
  return lax.cond(
    given.is_first,
    lambda: given.functions.first(given.outer, given.piece),
    lambda: x,
  )


def _zeros(tree: _Tree) -> _Tree:
  return jax.tree.map(jnp.zeros_like, tree)


def _zeros_float32(tree: _Tree) -> _Tree:
  return jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), tree)
