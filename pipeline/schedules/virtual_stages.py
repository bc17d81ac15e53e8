"""Variables by virtual stage, in the model's order, and by stage and chunk.

What is stored never depends on a schedule: a stack's layers [L,...] in the
model's order are virtual stages [K,...] of L/K layers. Which of them lie on one
stage is decided here and nowhere else.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paxon.pipeline.schedules import dependencies

# Nested containers of arrays.
Tree = Any


def from_layers(layers: Tree, *, pieces: dependencies.Pieces) -> Tree:
  """Returns [L,...] as [K,L/K,...], the layers of each virtual stage.

  Args:
    layers: Arrays with a leading axis of layers.
    pieces: K virtual stages.

  Raises:
    ValueError: Layers do not divide by the virtual stages.
  """
  number = pieces.num_stages * pieces.num_chunks

  def split(x: jax.Array) -> jax.Array:
    if x.shape[0] % number:
      raise ValueError(
        f"{x.shape[0]} layers must be a multiple of the {number} virtual stages"
        f" ({pieces.num_stages} stages of {pieces.num_chunks} chunks)."
      )
    return x.reshape(number, x.shape[0] // number, *x.shape[1:])

  return jax.tree.map(split, layers)


def to_layers(tree: Tree) -> Tree:
  """Returns [K,L/K,...] as [L,...]."""
  return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), tree)


def to_stages(tree: Tree, *, pieces: dependencies.Pieces) -> Tree:
  """Returns [K,...] as [P,v,...]: what each stage has, chunk by chunk.

  Args:
    tree: In the model's order.
    pieces: Of P stages with v chunks each.
  """
  index = _index(pieces)
  if pieces.num_chunks == 1:
    return jax.tree.map(lambda x: x[:, None], tree)
  return jax.tree.map(lambda x: jnp.take(x, index, axis=0), tree)


def from_stages(tree: Tree, *, pieces: dependencies.Pieces) -> Tree:
  """Returns [P,v,...] as [K,...]; undoes `to_stages`.

  Args:
    tree: By stage and chunk.
    pieces: Of P stages with v chunks each.
  """
  order = np.argsort(_index(pieces).reshape(-1))

  def back(x: jax.Array) -> jax.Array:
    flat = x.reshape(-1, *x.shape[2:])
    return flat if pieces.num_chunks == 1 else jnp.take(flat, order, axis=0)

  return jax.tree.map(back, tree)


def _index(pieces: dependencies.Pieces) -> np.ndarray:
  """Returns the virtual stage of each stage and chunk, [P,v]."""
  return np.array(
    [
      [pieces.virtual_stage(s, chunk=c) for c in range(pieces.num_chunks)]
      for s in range(pieces.num_stages)
    ]
  )
