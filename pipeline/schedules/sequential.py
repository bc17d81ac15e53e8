"""What the executor computes, without stages: one piece after the other.

The yardstick of tests and measurements, of the same functions and arrays.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from paxon.pipeline.schedules import dependencies, model_functions

_Tree = model_functions.Tree


def make_gradient_fn(
  functions: model_functions.ModelFunctions, *, pieces: dependencies.Pieces
) -> model_functions.GradientFn:
  """Returns `(chunks, outer, batch, key=None) -> Gradients`.

  Microbatches are added up in a loop, each differentiated by JAX.

  Args:
    functions: The model.
    pieces: How many virtual stages there are.
  """
  functions = model_functions.with_own_keys(functions)
  number = pieces.num_stages * pieces.num_chunks

  def one(
    chunks: _Tree,
    outer: _Tree,
    batch: Mapping[str, jax.Array],
    i: jax.Array,
    key: jax.Array | None,
  ) -> model_functions.Gradients:
    inputs = {name: x[i] for name, x in batch.items()}

    def piece(k: jax.Array) -> model_functions.Piece:
      own = key
      if own is not None:
        own = jax.random.fold_in(jax.random.fold_in(own, i), k)
      return model_functions.Piece(i, k, inputs, own)

    def objective(chunks: _Tree, outer: _Tree) -> tuple[jax.Array, _Tree]:
      def next_piece(x: _Tree, given: _Tree) -> tuple[_Tree, jax.Array]:
        variables, k = given
        return functions.chunk(variables, x, piece(k))

      numbers = jnp.arange(number, dtype=jnp.int32)
      x = functions.first(outer, piece(numbers[0]))
      x, auxiliary = jax.lax.scan(next_piece, x, (chunks, numbers))
      total = jnp.sum(auxiliary, dtype=jnp.float32)
      loss, metrics = functions.last(outer, x, piece(numbers[-1]))
      loss = loss.astype(jnp.float32)
      return loss + total, (loss, total, metrics)

    gradients, found = jax.grad(objective, argnums=(0, 1), has_aux=True)(
      chunks, outer
    )
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), gradients)
    return model_functions.Gradients(*found, *wide)

  def gradient_fn(
    chunks: _Tree,
    outer: _Tree,
    batch: Mapping[str, jax.Array],
    key: jax.Array | None = None,
  ) -> model_functions.Gradients:
    def add(
      sums: model_functions.Gradients, i: jax.Array
    ) -> tuple[model_functions.Gradients, None]:
      new = one(chunks, outer, batch, i, key)
      return jax.tree.map(jnp.add, sums, new), None

    shapes = jax.eval_shape(one, chunks, outer, batch, jnp.int32(0), key)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    size = next(iter(batch.values())).shape[0]
    sums, _ = jax.lax.scan(add, zeros, jnp.arange(size, dtype=jnp.int32))
    return sums

  return gradient_fn
