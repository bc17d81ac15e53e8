"""The caches of stacked layers, written in place by one layer after another.

A scan hands each layer its slice of all stacked variables, and stacks what the
layers give back. That is right for what a training step makes; in a decoding
step it would copy every layer's cache several times, to add a token to each. So
there `Stack` carries the collection `cache` whole from layer to layer:

  * the variables of a part that has `index` among them come whole, as
    [L, ...], with the number of the layer in one more entry, `layer`. The part
    reads and writes its own layer, as `attention.kv_cache` does;
  * those of any other part come and go as slices, as elsewhere.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

import jax

COLLECTION: Final = "cache"
# How many tokens a cache has seen; marks parts that know of `LAYER`.
INDEX: Final = "index"
LAYER: Final = "layer"

Tree = Mapping[str, Any]


class LayerView:
  """What one layer sees of the stacked variables; used once.

  Parts of a layer that stand in scopes of their own, such as the parameters of
  shared parts, have trees of their own: all are given first, in the order in
  which they are taken then.
  """

  def __init__(self, number: jax.Array) -> None:
    """Remembers the layer.

    Args:
      number: Of the layer, int of rank 0.
    """
    self._number = number
    self._seen: list[tuple[Tree, Tree]] = []

  def given(self, stacked: Tree) -> Tree:
    """Returns what the layer is given of the stacked variables."""
    given = _mapped(self._part, stacked)
    self._seen.append((stacked, given))
    return given

  def taken(self, changed: Tree) -> Tree:
    """Returns the stacked variables after the layer changed what it was given.

    Boxes around variables are as before.

    Raises:
      ValueError: The layer made more variables, for which there is no place.
    """
    stacked, given = self._seen.pop(0)
    new = sorted(_names(changed) - _names(given))
    if new:
      raise ValueError(
        f"A layer made the variable {new[0]} in a decoding step; make it in "
        "the prefill, which makes the caches of all layers."
      )
    return _mapped(self._put, stacked, given, changed)

  def _part(self, stacked: Tree) -> Tree:
    if INDEX not in stacked:
      return jax.tree.map(lambda x: at_layer(x, self._number), stacked)
    if LAYER not in stacked:
      return {**stacked, LAYER: self._number}
    # In a stack of stacks, [L,L',...]: as one of all layers, [L * L',...].
    arrays = {k: v for k, v in stacked.items() if k != LAYER}
    inner = jax.tree.leaves(arrays)[0].shape[1]
    arrays = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), arrays)
    return {**arrays, LAYER: stacked[LAYER] * inner + self._number}

  def _put(self, stacked: Tree, given: Tree, changed: Tree) -> Tree:
    def put(x: jax.Array, before: jax.Array, after: jax.Array) -> jax.Array:
      if INDEX in stacked:
        return after.reshape(x.shape)
      return x if after is before else with_layer(x, after, self._number)

    kept = {k: v for k, v in stacked.items() if k != LAYER}
    leaves = (
      jax.tree.leaves({name: tree[name] for name in kept})
      for tree in (kept, given, changed)
    )
    values = [put(*each) for each in zip(*leaves, strict=True)]
    result = jax.tree.unflatten(jax.tree.structure(kept), values)
    return {**stacked, **result}


def at_layer(x: jax.Array, number: jax.Array) -> jax.Array:
  """Returns entry `number` of a stacked array."""
  return jax.lax.dynamic_index_in_dim(x, number, axis=0, keepdims=False)


def with_layer(x: jax.Array, part: jax.Array, number: jax.Array) -> jax.Array:
  """Returns a stacked array with `part` in place of entry `number`."""
  return jax.lax.dynamic_update_index_in_dim(x, part, number, axis=0)


def _mapped(fn: Callable[..., Tree], tree: Tree, *others: Tree) -> Tree:
  """Returns `fn` of the variables of each part, given all trees' together."""
  parts = {k: v for k, v in tree.items() if isinstance(v, Mapping)}
  own = {k: v for k, v in tree.items() if k not in parts}
  result = {
    name: _mapped(fn, part, *(other[name] for other in others))
    for name, part in parts.items()
  }
  if own:
    # Entries that `fn` adds are in the others only.
    rest = ({k: v for k, v in o.items() if k not in parts} for o in others)
    result |= fn(own, *rest)
  return result


def _names(tree: Tree) -> set[str]:
  names = set()
  for name, value in tree.items():
    inner = _names(value) if isinstance(value, Mapping) else {""}
    names |= {f"{name}/{rest}".rstrip("/") for rest in inner}
  return names
