"""Inputs of a schedule's functions for each microbatch, as arrays [M,...].

Random keys are those of a learner that accumulates over as many microbatches.
Inputs of layers follow as in a `PipelinedStack`: one for each group, whatever
its stage.
"""

from collections.abc import Callable, Mapping
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from paxon.learners import metrics as metrics_lib
from paxon.learners import microbatches
from paxon.pipeline import layer_calls
from paxon.pipeline.schedules import linen_functions

_BATCH, _ARGS, _KEYS, _LAYER_KEYS = "batch", "args", "keys", "layer_keys"


@dataclasses.dataclass(frozen=True, kw_only=True)
class MicrobatchInputs:
  """Arrays of all microbatches, and how to read one.

  Attributes:
    arrays: [M,...] by name, for the executor.
    read: Returns `Inputs` of the arrays of one microbatch.
  """

  arrays: Mapping[str, jax.Array]
  read: Callable[[Mapping[str, jax.Array]], linen_functions.Inputs]


def batch_size(batch: metrics_lib.Batch) -> int:
  """Returns the number of sequences of a batch.

  Args:
    batch: Arrays [batch,...], and scalars.

  Raises:
    ValueError: The batch has only scalars.
  """
  found = [x.shape[0] for x in batch.values() if x.ndim]
  if not found:
    raise ValueError(
      "The batch has no sequences to split into microbatches, only"
      f" {sorted(batch)}."
    )
  return found[0]


def make(
  batch: metrics_lib.Batch,
  rngs: Mapping[str, jax.Array],
  *,
  args: tuple[Any, ...],
  num_microbatches: int,
  num_groups: int,
  padding: int,
) -> MicrobatchInputs:
  """Splits a batch and random keys into microbatches.

  Args:
    batch: Arrays [batch,...], and scalars, which all microbatches share.
    rngs: Random keys by stream.
    args: Arguments of the stack's layers for the whole batch.
    num_microbatches: M.
    num_groups: Groups of layers.
    padding: Unused groups of virtual stages.

  Raises:
    ValueError: An array has no batch axis, or an argument may need a gradient.
  """
  leaves, treedef = jax.tree.flatten(args)
  scalars = {name: x for name, x in batch.items() if not x.ndim}
  arrays = {f"{_BATCH}/{name}": x for name, x in batch.items() if x.ndim}
  arrays |= {f"{_ARGS}/{i}": x for i, x in enumerate(leaves)}
  _check_arrays(arrays, size=batch_size(batch))
  parts, _ = microbatches.split(arrays, num_microbatches=num_microbatches)
  for name, x in scalars.items():
    parts[f"{_BATCH}/{name}"] = jnp.broadcast_to(x, (num_microbatches, 1))
  keys = {
    name: layer_calls.fold_microbatches(key, num_microbatches)
    for name, key in rngs.items()
  }
  key_data = layer_calls.to_key_data(keys)
  layer_keys = layer_calls.to_key_data(
    {
      name: layer_calls.split_groups(key, num_groups)
      for name, key in keys.items()
    }
  )
  for name, data in layer_keys.data.items():
    last = jnp.repeat(data[:, -1:], padding, axis=1)
    parts[f"{_KEYS}/{name}"] = key_data.data[name]
    parts[f"{_LAYER_KEYS}/{name}"] = jnp.concatenate([data, last], axis=1)

  def read(given: Mapping[str, jax.Array]) -> linen_functions.Inputs:
    own, arrays = _select(given, _ARGS), _select(given, _BATCH)
    return linen_functions.Inputs(
      batch=arrays | {name: arrays[name][0] for name in scalars},
      args=jax.tree.unflatten(treedef, [own[str(i)] for i in range(len(own))]),
      keys=key_data.wrap(_select(given, _KEYS)),
      layer_keys=layer_keys.wrap(_select(given, _LAYER_KEYS)),
    )

  return MicrobatchInputs(arrays=parts, read=read)


def _check_arrays(arrays: Mapping[str, jax.Array], *, size: int) -> None:
  """Raises ValueError if a schedule cannot split an array."""
  for name, x in arrays.items():
    if not x.ndim or x.shape[0] != size:
      raise ValueError(
        f"{name} of shape {list(x.shape)} must have the batch of {size}"
        " sequences as its first axis: a schedule splits all arrays into"
        " microbatches."
      )
    if name.startswith(_ARGS) and jnp.issubdtype(x.dtype, jnp.floating):
      raise ValueError(
        f"The stack's layers receive {name} of dtype {x.dtype.name}; with a"
        " schedule, arguments must be integers or booleans, because their"
        " gradients do not pass between stages."
      )


def _select(
  arrays: Mapping[str, jax.Array], prefix: str
) -> dict[str, jax.Array]:
  """Returns the arrays `<prefix>/<name>` by name."""
  start = f"{prefix}/"
  return {
    name.removeprefix(start): x
    for name, x in arrays.items()
    if name.startswith(start)
  }
