"""The operations of a table, each on one piece of the model.

All run a piece from its stored input; gradients come out in float32, in which
they are added up.
"""

from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from paxon.pipeline.schedules import model_functions

_Tree = model_functions.Tree


class Given(NamedTuple):
  """What operations of one piece have in common.

  Attributes:
    functions: The model.
    outer: Variables of `first` and `last`.
    piece: Which one.
    is_first: Whether it is the model's first, bool.
  """

  functions: model_functions.ModelFunctions
  outer: _Tree
  piece: model_functions.Piece
  is_first: jax.Array


class Made(NamedTuple):
  """What an operation makes; zeros where it makes none.

  Attributes:
    message: For another piece, like x.
    auxiliary: To be added to the loss, float32.
    chunk: Gradients of the piece's variables, float32.
  """

  message: _Tree
  auxiliary: jax.Array
  chunk: _Tree


def nothing(given: Given, chunk: _Tree, x: _Tree, dy: _Tree) -> Made:
  """An empty place of the table."""
  del given, dy
  return Made(_zeros(x), jnp.float32(0), _zeros_float32(chunk))


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
