"""Caches of stacked layers, updated in place.

A scan slices stacked variables for each layer and stacks the results. In a
decoding step that would copy every cache several times to add one token. So
`Stack` carries the collection `cache` whole from layer to layer:

  * a module with a variable `index` gets its variables stacked, [L, ...], and
    the additional entries `layer`, its index, `first` and `common` (see below).
    It reads and writes its own layer, as `attention.kv_cache` does;
  * other modules get slices, as in any scan.

Positions and segments of cached tokens are the same in all layers if each layer
passes those of the stack to its cache. Then layers do not write them: they read
those of the `first` layer from before the step, which are constant in the loop,
so that XLA moves their use (such as masks) out of it. The stack writes them for
all layers after the loop (`CommonTokens`, the entry `common`).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from flax import linen as nn
import jax
import jax.numpy as jnp

from paxon.layers.attention import cache_variables

COLLECTION: Final = cache_variables.COLLECTION

Tree = Mapping[str, Any]
_GIVEN = (
  cache_variables.LAYER,
  cache_variables.FIRST,
  cache_variables.COMMON,
)


# Static, because it is passed with variables that a loop carries.
@jax.tree_util.register_static
class CommonTokens:
  """Cache updates that all layers share in a step; used once.

  A block that passes the arrays of the stack to its caches in a decoding step
  must also do so in the prefill.
  """

  def __init__(self, args: Sequence[Any]) -> None:
    """Records the arguments of every layer."""
    self._arrays = jax.tree.leaves(args)
    self._updates: dict[tuple[str, ...], Callable[[Tree], Tree]] = {}

  def includes(self, *arrays: jax.Array) -> bool:
    """Whether each is identical to an array of the stack."""
    return all(any(x is array for array in self._arrays) for x in arrays)

  def defer(self, cache: nn.Module, update: Callable[[Tree], Tree]) -> None:
    """Defers an update of the caches of all layers to the stack.

    `cache` is that of any layer. `update` maps the arrays of one layer, by
    variable, to the changed ones; a closure over arrays of the stack only.
    """
    self._updates[cache.path] = update

  def write(self, stack: nn.Module) -> None:
    """Applies the deferred updates to the variables of the stack."""
    for path, update in self._updates.items():
      names = path[len(stack.path) :]
      part: Any = stack.variables[cache_variables.COLLECTION]
      for name in names:
        part = part[name]
      for name, x in _update_all(part, update).items():
        # Nested, because `put_variable` needs it for variables of submodules.
        value: Any = jax.tree.map(lambda _, x=x: x, part[name])
        for outer in reversed((*names[1:], name)):
          value = {outer: value}
        stack.put_variable(cache_variables.COLLECTION, names[0], value)


class LayerView:
  """The stacked variables as one layer sees them; used once.

  Submodules in other scopes, such as those with shared parameters, have
  separate trees: all are selected first and then updated in the same order.
  """

  def __init__(
    self, number: jax.Array, common: CommonTokens | None = None
  ) -> None:
    """Records the layer; without `common` it writes all variables."""
    self._number = number
    self._common = common
    self._seen: list[tuple[Tree, Tree]] = []

  def select(self, stacked: Tree) -> Tree:
    """Returns the variables of the layer."""
    given = _map(self._select, stacked)
    self._seen.append((stacked, given))
    return given

  def update(self, changed: Tree) -> Tree:
    """Returns the stacked variables with those that the layer changed.

    Boxes around variables are kept.

    Raises:
      ValueError: The layer created a variable.
    """
    stacked, given = self._seen.pop(0)
    new = sorted(_names(changed) - _names(given))
    if new:
      raise ValueError(
        f"A layer created the variable {new[0]} in a decoding step; create it"
        " in the prefill."
      )
    return _map(self._update, stacked, given, changed)

  def _select(self, stacked: Tree) -> Tree:
    if cache_variables.INDEX not in stacked:
      return jax.tree.map(
        lambda x: cache_variables.at_layer(x, self._number), stacked
      )
    arrays = _own(stacked)
    first, number = jnp.int32(0), self._number
    if cache_variables.LAYER in stacked:
      # A stack of stacks, [L,L',...], is flattened to [L * L',...].
      inner = jax.tree.leaves(arrays)[0].shape[1]
      arrays = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), arrays)
      first = stacked[cache_variables.LAYER] * inner
      number = first + number
    return {
      **arrays,
      cache_variables.LAYER: number,
      cache_variables.FIRST: first,
      cache_variables.COMMON: self._common,
    }

  def _update(self, stacked: Tree, given: Tree, changed: Tree) -> Tree:
    def put(x: jax.Array, before: jax.Array, after: jax.Array) -> jax.Array:
      if cache_variables.INDEX in stacked:
        return after.reshape(x.shape)
      return (
        x
        if after is before
        else cache_variables.with_layer(x, after, self._number)
      )

    kept = _own(stacked)
    leaves = (
      jax.tree.leaves({name: tree[name] for name in kept})
      for tree in (kept, given, changed)
    )
    values = [put(*each) for each in zip(*leaves, strict=True)]
    result = jax.tree.unflatten(jax.tree.structure(kept), values)
    return {**stacked, **result}


def _update_all(
  part: Tree, update: Callable[[Tree], Tree]
) -> dict[str, jax.Array]:
  """Returns the changes of an update to a part, with the layers' axes."""
  arrays = {k: jax.tree.leaves(v)[0] for k, v in _own(part).items()}
  outer = part.get(cache_variables.LAYER)
  # All layers of this stack, for one layer of the outer stack.
  own = arrays
  if outer is not None:
    own = {k: cache_variables.at_layer(x, outer) for k, x in arrays.items()}
  changed = {}
  for name, x in update({k: x[0] for k, x in own.items()}).items():
    whole = jnp.broadcast_to(x[None], own[name].shape)
    if outer is not None:
      whole = cache_variables.with_layer(arrays[name], whole, outer)
    changed[name] = whole
  return changed


def _own(part: Tree) -> dict[str, Any]:
  """Returns the variables of a part without the entries of `LayerView`."""
  return {k: v for k, v in part.items() if k not in _GIVEN}


def _map(fn: Callable[..., Tree], tree: Tree, *others: Tree) -> Tree:
  """Maps the variables of each part, with the other trees' variables."""
  parts = {k: v for k, v in tree.items() if isinstance(v, Mapping)}
  own = {k: v for k, v in tree.items() if k not in parts}
  result = {
    name: _map(fn, part, *(other[name] for other in others))
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
