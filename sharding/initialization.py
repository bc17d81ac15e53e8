"""Initial values that do not depend on how the model is laid out.

The value of a variable in layer i is

  initializer(fold_in(fold_in(key(seed), hash(name)), i), layer shape, dtype)

where `name` is the logical name without the slot in a repeated pattern. So
scan, unrolling, the period of a pattern, pipeline stages and the mesh never
change step 0: layer 7 starts the same wherever it is stored. (JAX's default
threefry keys give the same bits however an array is sharded.)
"""

from collections.abc import Callable, Sequence
import hashlib
import itertools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paxon.sharding import axes, variables

_STACKED = re.compile(r"(?:^|/)layers/blocks_(\d+)(?=/)")
_SINGLE = re.compile(r"(?:^|/)layers_(\d+)(?=/)")


def initial_values(
  specs: variables.Specs,
  seed: int | jax.Array,
  *,
  fallback: Callable[[], Any] | None = None,
) -> Any:
  """Computes every variable's first value.

  Meant to be traced under `Layout.jit` with `out_shardings`, so that no device
  ever holds a whole large array.

  Args:
    specs: Nested dicts of `VariableSpec`.
    seed: The experiment's seed.
    fallback: Returns a tree like `specs` with the values of variables that
      have no initializer of their own (linen modules from elsewhere); usually
      `lambda: variables.unbox(model.init(...))`. The others are not used.

  Returns:
    Nested dicts of arrays, as `specs` says.

  Raises:
    ValueError: A variable has no initializer, and there is no fallback.
  """
  leaves, treedef = jax.tree.flatten(specs)
  foreign = [spec.name for spec in leaves if spec.initializer is None]
  keys = _keys(jax.random.key(seed), leaves)
  if not foreign:
    return treedef.unflatten(list(map(_value, keys, leaves)))
  if fallback is None:
    raise ValueError(f"{foreign[0]} has no initializer; pass `fallback`.")
  others = treedef.flatten_up_to(fallback())
  return treedef.unflatten(
    [
      other if spec.initializer is None else _value(key, spec)
      for key, spec, other in zip(keys, leaves, others, strict=True)
    ]
  )


def _value(keys: jax.Array, spec: variables.VariableSpec) -> jax.Array:
  """The value of one variable, all its layers stacked."""
  assert spec.initializer is not None
  init, shape, dtype = spec.initializer, spec.layer_shape, spec.dtype
  if not spec.stacked:
    return jnp.asarray(init(keys[0], shape, dtype), dtype)
  values = jax.vmap(lambda k: jnp.asarray(init(k, shape, dtype), dtype))(keys)
  return values.reshape(spec.shape)


def _keys(
  root: jax.Array, specs: Sequence[variables.VariableSpec]
) -> list[jax.Array]:
  """One key per layer of each variable, in storage order.

  The hashes of all variables are folded in at once: a few large computations
  are compiled in a fraction of the time of many small ones.
  """
  paths = [np.asarray(_path(spec), np.uint32) for spec in specs]
  keys: list[jax.Array] = [root] * len(specs)
  for length in sorted({path.shape[1] for path in paths}):
    alike = [i for i, path in enumerate(paths) if path.shape[1] == length]
    whole = np.concatenate([paths[i] for i in alike])
    made = jnp.broadcast_to(root, (len(whole),))
    for numbers in whole.T:
      made = jax.vmap(jax.random.fold_in)(made, numbers)
    ends = np.cumsum([len(paths[i]) for i in alike])
    for i, part in zip(alike, jnp.split(made, ends[:-1]), strict=True):
      keys[i] = part
  return keys


def _path(spec: variables.VariableSpec) -> list[tuple[int, ...]]:
  """What is folded in for each layer, first to last."""
  name = _layerless(spec.name)
  singles = [[int(index)] for index in _SINGLE.findall(spec.name)]
  return list(itertools.product([_hash(name)], *singles, *_indices(spec)))


def _indices(spec: variables.VariableSpec) -> Sequence[list[int]]:
  """The layer's index along each stacked axis, for each stored entry."""
  slots = iter([int(slot) for slot in _STACKED.findall(spec.name)])
  indices = []
  for (axis, period), length in zip(spec.stacked, spec.shape, strict=False):
    slot = next(slots, 0) if axis == axes.LAYERS else 0
    indices.append([group * period + slot for group in range(length)])
  return indices


def _layerless(name: str) -> str:
  """The name without the slot or the number of a layer."""
  name = _STACKED.sub(lambda m: m.group(0).rpartition("/")[0], name)
  return _SINGLE.sub(lambda m: m.group(0).rpartition("_")[0], name)


def _hash(name: str) -> int:
  """31 stable bits: `hash()` differs between processes."""
  digest = hashlib.sha256(name.encode()).digest()
  return int.from_bytes(digest[:4], "big") >> 1
