"""What a schedule's functions are told of a microbatch, as arrays [M,...].

Random keys are those of a learner with as many microbatches: the key of a
stream folded with the number of the microbatch (with one, not folded). Those of
layers follow from it as in a `PipelinedStack`, one for each group, whatever
stage it is on.
"""

from collections.abc import Callable, Mapping
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from paxon.learners import metrics, microbatches
from paxon.pipeline.schedules import linen_functions

_BATCH, _ARGS, _KEYS, _LAYER_KEYS = "batch", "args", "keys", "layer_keys"


@dataclasses.dataclass(frozen=True, kw_only=True)
class MicrobatchInputs:
  """Arrays of all microbatches, and how one is read.

  Attributes:
    arrays: [M,...] by name, as the executor is given them.
    of: Returns `Inputs` of the arrays of one microbatch.
  """

  arrays: Mapping[str, jax.Array]
  of: Callable[[Mapping[str, jax.Array]], linen_functions.Inputs]


def rows_of(batch: metrics.Batch) -> int:
  """Returns the number of rows of a batch.

  Args:
    batch: Arrays [rows,...], and scalars.

  Raises:
    ValueError: It has scalars only.
  """
  found = [x.shape[0] for x in batch.values() if x.ndim]
  if not found:
    raise ValueError(
      f"The batch has no rows for microbatches, only {sorted(batch)}."
    )
  return found[0]


def make(
  batch: metrics.Batch,
  rngs: Mapping[str, jax.Array],
  *,
  args: tuple[Any, ...],
  num_microbatches: int,
  num_groups: int,
  padding: int,
) -> MicrobatchInputs:
  """Returns the arrays of a batch.

  Args:
    batch: Arrays [rows,...], and scalars, which all microbatches have.
    rngs: Random keys by stream.
    args: What the layers of the stack are given, for the whole batch.
    num_microbatches: M.
    num_groups: Groups of layers.
    padding: Groups that virtual stages have beside them.

  Raises:
    ValueError: An array has no rows, or an argument might have a gradient.
  """
  leaves, treedef = jax.tree.flatten(args)
  numbers = {name: x for name, x in batch.items() if not x.ndim}
  rows = {f"{_BATCH}/{name}": x for name, x in batch.items() if x.ndim}
  rows |= {f"{_ARGS}/{i}": x for i, x in enumerate(leaves)}
  size = rows_of(batch)
  for name, x in rows.items():
    if not x.ndim or x.shape[0] != size:
      raise ValueError(
        f"{name} of shape {list(x.shape)} must have the {size} rows of the"
        " batch as its first axis: a schedule cuts all arrays into"
        " microbatches."
      )
    if name.startswith(_ARGS) and jnp.issubdtype(x.dtype, jnp.floating):
      raise ValueError(
        f"The stack's layers are given {name} of dtype {x.dtype.name}: with a"
        " schedule arguments must be integers or booleans, since no gradient"
        " of them passes between stages."
      )
  parts, _ = microbatches.split(rows, num_microbatches=num_microbatches)
  for name, x in numbers.items():
    # The same for all microbatches.
    parts[f"{_BATCH}/{name}"] = jnp.broadcast_to(x, (num_microbatches, 1))
  impls = {}
  for stream, key in rngs.items():
    keys = key[None]
    if num_microbatches > 1:
      index = jnp.arange(num_microbatches, dtype=jnp.uint32)
      keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, index)
    layer_keys = jax.vmap(lambda k: jax.random.split(k, num_groups))(keys)
    is_typed = jax.dtypes.issubdtype(key.dtype, jax.dtypes.prng_key)
    impls[stream] = jax.random.key_impl(key) if is_typed else None
    data = jax.random.key_data(layer_keys)
    last = jnp.repeat(data[:, -1:], padding, axis=1)
    parts[f"{_KEYS}/{stream}"] = jax.random.key_data(keys)
    parts[f"{_LAYER_KEYS}/{stream}"] = jnp.concatenate([data, last], axis=1)

  def of(given: Mapping[str, jax.Array]) -> linen_functions.Inputs:
    def below(prefix: str) -> dict[str, jax.Array]:
      start = f"{prefix}/"
      return {
        name.removeprefix(start): x
        for name, x in given.items()
        if name.startswith(start)
      }

    def keys(prefix: str) -> dict[str, jax.Array]:
      return {
        stream: data
        if impls[stream] is None
        else jax.random.wrap_key_data(data, impl=impls[stream])
        for stream, data in below(prefix).items()
      }

    own, arrays = below(_ARGS), below(_BATCH)
    return linen_functions.Inputs(
      batch=arrays | {name: arrays[name][0] for name in numbers},
      args=jax.tree.unflatten(treedef, [own[str(i)] for i in range(len(own))]),
      keys=keys(_KEYS),
      layer_keys=keys(_LAYER_KEYS),
    )

  return MicrobatchInputs(arrays=parts, of=of)
