"""A tiny model and a sequential oracle for tests of schedules."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from paxon.pipeline.schedules import model_functions, table

_Tree = model_functions.Tree
VOCAB, EMBED, ROWS, LENGTH = 7, 4, 4, 3
# One operation a number, where the default is a hundred to compile.
_IMPL = "unsafe_rbg"


def _key(context, number):
  """Returns a key of a function, microbatch and virtual stage."""
  key = jax.random.wrap_key_data(context.inputs["key"], impl=_IMPL)
  key = jax.random.fold_in(key, context.virtual_stage)
  return jax.random.fold_in(key, number)


def _first(outer, context):
  noise = jax.random.uniform(_key(context, 0), (1, LENGTH, EMBED))
  return outer["embedding"][context.inputs["ids"]] * (1.0 + noise)


def _chunk(variables, x, context):
  """Layers with a random branch and a loss of their own."""
  keys = jax.random.split(_key(context, 1), variables["kernel"].shape[0])

  def layer(x, given):
    kernel, bias, key = given
    kept = jax.random.bernoulli(key, 0.75, (1, *x.shape[1:]))
    hidden = jnp.tanh(jnp.einsum("BTD,DE->BTE", x, kernel) + bias[None, None])
    return x + jnp.where(kept, hidden, 0.0), jnp.sum(hidden**2) * 0.01

  given = (variables["kernel"], variables["bias"], keys)
  x, losses = jax.lax.scan(layer, x, given)
  return x, jnp.sum(losses)


def _get_tied(outer):
  return outer["embedding"]


def _get_untied(outer):
  return outer["head"]


def functions(*, tied: bool) -> model_functions.ModelFunctions:
  """Returns the model.

  Args:
    tied: Whether the embedding is the head.
  """
  table_of = _get_tied if tied else _get_untied

  def last(outer, y, context):
    noise = jax.random.uniform(_key(context, 2), (1, LENGTH, EMBED))
    logits = jnp.einsum("BTD,VD->BTV", y * (1.0 + noise), table_of(outer))
    picked = jax.nn.one_hot(context.inputs["targets"], VOCAB)
    entropy = -jnp.sum(picked * jax.nn.log_softmax(logits), axis=-1)
    weights = context.inputs["weights"]
    metrics = {"weight": (jnp.sum(weights), jnp.float32(1))}
    return jnp.sum(entropy * weights), metrics

  return model_functions.ModelFunctions(first=_first, chunk=_chunk, last=last)


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
  """Returns ids, targets and weights [M,B,T], and data of keys [M,4]."""
  keys = jax.random.split(jax.random.key(1), 3)
  shape = (num_microbatches, ROWS, LENGTH)
  own = jax.random.split(jax.random.key(2, impl=_IMPL), num_microbatches)
  return {
    "key": jax.random.key_data(own),
    "ids": jax.random.randint(keys[0], shape, 0, VOCAB),
    "targets": jax.random.randint(keys[1], shape, 0, VOCAB),
    "weights": jax.random.uniform(keys[2], shape),
  }


def gpipe(*, num_stages: int, num_microbatches: int) -> table.Table:
  """Returns the table of GPipe: all forward, then all backward."""
  order = [
    table.Operation(kind, i)
    for kind in table.Kind
    for i in range(num_microbatches)
  ]
  return table.from_orders([order] * num_stages, name="GPipe")


def count_in_flight(schedule: table.Table) -> list[int]:
  """Returns by stage how many chunks wait for their backward pass at most."""
  now = [0] * schedule.num_stages
  most = [0] * schedule.num_stages
  for at, op in schedule.operations:
    now[at.stage] += 1 if op.kind is table.Kind.FORWARD else -1
    most[at.stage] = max(most[at.stage], now[at.stage])
  return most


def sequential_gradient_fn(
  functions: model_functions.ModelFunctions, *, num_virtual_stages: int
) -> model_functions.GradientFn:
  """Returns `(chunks, outer, batch) -> Gradients` without stages.

  One virtual stage after the other; microbatches are added up in a loop, each
  differentiated by JAX.

  Args:
    functions: The model.
    num_virtual_stages: K.
  """

  def one(
    chunks: _Tree,
    outer: _Tree,
    batch: Mapping[str, jax.Array],
    i: jax.Array,
  ) -> model_functions.Gradients:
    inputs = {name: x[i] for name, x in batch.items()}

    def context(k: jax.Array) -> model_functions.Context:
      return model_functions.Context(i, k, inputs)

    def objective(chunks: _Tree, outer: _Tree) -> tuple[jax.Array, _Tree]:
      def next_stage(x: _Tree, given: _Tree) -> tuple[_Tree, jax.Array]:
        variables, k = given
        return functions.chunk(variables, x, context(k))

      numbers = jnp.arange(num_virtual_stages, dtype=jnp.int32)
      x = functions.first(outer, context(numbers[0]))
      x, auxiliary = jax.lax.scan(next_stage, x, (chunks, numbers))
      total = jnp.sum(auxiliary, dtype=jnp.float32)
      loss, metrics = functions.last(outer, x, context(numbers[-1]))
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
  ) -> model_functions.Gradients:
    def add(
      sums: model_functions.Gradients, i: jax.Array
    ) -> tuple[model_functions.Gradients, None]:
      new = one(chunks, outer, batch, i)
      return jax.tree.map(jnp.add, sums, new), None

    shapes = jax.eval_shape(one, chunks, outer, batch, jnp.int32(0))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    size = next(iter(batch.values())).shape[0]
    sums, _ = jax.lax.scan(add, zeros, jnp.arange(size, dtype=jnp.int32))
    return sums

  return gradient_fn
