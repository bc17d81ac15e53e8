"""A tiny model for tests of schedules."""

import functools

import jax
import jax.numpy as jnp

from paxon.pipeline.schedules import model_functions

VOCAB, EMBED, ROWS, LENGTH = 7, 4, 4, 3


def _first(outer, piece):
  noise = jax.random.uniform(piece.key, (1, LENGTH, EMBED))
  return outer["embedding"][piece.inputs["ids"]] * (1.0 + noise)


def _chunk(variables, x, piece, *, unroll):
  """Layers with a random branch and a loss of their own."""
  keys = jax.random.split(piece.key, variables["kernel"].shape[0])

  def layer(x, given):
    kernel, bias, key = given
    kept = jax.random.bernoulli(key, 0.75, (1, *x.shape[1:]))
    hidden = jnp.tanh(jnp.einsum("BTD,DE->BTE", x, kernel) + bias[None, None])
    return x + jnp.where(kept, hidden, 0.0), jnp.sum(hidden**2) * 0.01

  given = (variables["kernel"], variables["bias"], keys)
  if not unroll:
    x, losses = jax.lax.scan(layer, x, given)
    return x, jnp.sum(losses)
  total = jnp.float32(0)
  for kernel, bias, key in zip(*given, strict=True):
    x, loss = layer(x, (kernel, bias, key))
    total += loss
  return x, total


def _tied(outer):
  return outer["embedding"]


def _untied(outer):
  return outer["head"]


def functions(
  *, tied: bool, unroll: bool = False
) -> model_functions.ModelFunctions:
  """Returns the model.

  Args:
    tied: Whether the embedding is the head.
    unroll: Whether layers are written one after the other.
  """
  table_of = _tied if tied else _untied

  def last(outer, y, piece):
    noise = jax.random.uniform(piece.key, (1, LENGTH, EMBED))
    logits = jnp.einsum("BTD,VD->BTV", y * (1.0 + noise), table_of(outer))
    picked = jax.nn.one_hot(piece.inputs["targets"], VOCAB)
    entropy = -jnp.sum(picked * jax.nn.log_softmax(logits), axis=-1)
    weights = piece.inputs["weights"]
    return jnp.sum(entropy * weights), {"weight": jnp.sum(weights)}

  return model_functions.ModelFunctions(
    first=_first, chunk=functools.partial(_chunk, unroll=unroll), last=last
  )


def variables(*, num_layers: int, tied: bool):
  """Returns layers [L,...] and outer variables."""
  keys = jax.random.split(jax.random.key(0), 4)
  layers = {
    "kernel": jax.random.normal(keys[0], (num_layers, EMBED, EMBED)),
    "bias": jax.random.normal(keys[1], (num_layers, EMBED)),
  }
  outer = {"embedding": jax.random.normal(keys[2], (VOCAB, EMBED))}
  if not tied:
    outer["head"] = jax.random.normal(keys[3], (VOCAB, EMBED))
  return layers, outer


def batch(*, num_microbatches: int):
  """Returns ids, targets and weights [M,rows,T]."""
  keys = jax.random.split(jax.random.key(1), 3)
  shape = (num_microbatches, ROWS, LENGTH)
  return {
    "ids": jax.random.randint(keys[0], shape, 0, VOCAB),
    "targets": jax.random.randint(keys[1], shape, 0, VOCAB),
    "weights": jax.random.uniform(keys[2], shape),
  }


def without_noise(
  model: model_functions.ModelFunctions,
) -> model_functions.ModelFunctions:
  """Returns the model with the same random numbers for all rows' shards."""

  def fixed(function):
    def call(*args):
      *rest, piece = args
      key = jax.random.fold_in(jax.random.key(3), piece.virtual_stage)
      return function(*rest, piece._replace(key=key))

    return call

  return model_functions.ModelFunctions(
    first=fixed(model.first), chunk=fixed(model.chunk), last=fixed(model.last)
  )
