"""Initial values that are independent of the layout and of layer stacking.

The value of a variable in layer i is

  initializer(fold_in(fold_in(key(seed), hash(name)), i), layer shape, dtype)

where `name` is the logical name without the slot in a repeated pattern. Scan,
unrolling, the period of a pattern, pipeline stages and the mesh therefore do
not change the values of a layer. (JAX's default threefry keys give the same
bits for every sharding.)
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
  """Computes the initial value of every variable, as a tree like `specs`.

  Call it in a function compiled by `Layout.jit` with `out_shardings`, so that
  no device holds a whole large array. `fallback` returns a tree like `specs`
  with values for variables without an initializer (linen modules of other
  libraries), usually `lambda: variables.unbox(model.init(...))`.

  Raises:
    ValueError: A variable has no initializer and `fallback` is None.
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
  """Returns the value of one variable, with all its layers stacked."""
  assert spec.initializer is not None
  init, shape, dtype = spec.initializer, spec.layer_shape, spec.dtype
  if not spec.stacked:
    return jnp.asarray(init(keys[0], shape, dtype), dtype)
  values = jax.vmap(lambda k: jnp.asarray(init(k, shape, dtype), dtype))(keys)
  return values.reshape(spec.shape)


def _keys(
  root: jax.Array, specs: Sequence[variables.VariableSpec]
) -> list[jax.Array]:
  """Returns one key per layer of each variable, in storage order.

  The hashes of all variables are folded in together, because a few large
  computations compile much faster than many small ones.
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
  """Returns the numbers to fold into the key of each layer, in order."""
  name = _layerless(spec.name)
  singles = [[int(index)] for index in _SINGLE.findall(spec.name)]
  return list(itertools.product([_hash(name)], *singles, *_indices(spec)))


def _indices(spec: variables.VariableSpec) -> Sequence[list[int]]:
  """Returns the layer indices of the stored entries for each stacked axis."""
  slots = iter([int(slot) for slot in _STACKED.findall(spec.name)])
  indices = []
  for (axis, period), length in zip(spec.stacked, spec.shape, strict=False):
    slot = next(slots, 0) if axis == axes.LAYERS else 0
    indices.append([group * period + slot for group in range(length)])
  return indices


def _layerless(name: str) -> str:
  """Returns the name without the slot or the number of a layer."""
  name = _STACKED.sub(lambda m: m.group(0).rpartition("/")[0], name)
  return _SINGLE.sub(lambda m: m.group(0).rpartition("_")[0], name)


def _hash(name: str) -> int:
  """Returns a 31-bit hash that, unlike `hash()`, is equal in all processes."""
  digest = hashlib.sha256(name.encode()).digest()
  return int.from_bytes(digest[:4], "big") >> 1
