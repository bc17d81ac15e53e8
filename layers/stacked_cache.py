"""The caches of stacked layers, written in place by one layer after another.

A scan hands each layer its slice of all stacked variables, and stacks what the
layers give back. That is right for what a training step makes; in a decoding
step it would copy every layer's cache several times, to add a token to each. So
there `Stack` carries the collection `cache` whole from layer to layer:

  * the variables of a part that has `index` among them come whole, as
    [L, ...], with the number of the layer in one more entry, `layer` (and
    `first` and `common`, see below). The part reads and writes its own layer,
    as `attention.kv_cache` does;
  * those of any other part come and go as slices, as elsewhere.

What caches keep of where tokens stand is the same in all layers, if each gave
its cache the positions and segments that the stack was given. Then no layer
writes it: all read the `first` layer's as it was before the step. That stays
constant in the loop, and so does what follows from it, such as masks, so that
compilers move it out of the loop. The stack writes it for all layers afterwards
(`CommonTokens`, the entry `common`).
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


# Static: it goes with variables, which an inner stack carries through a loop.
@jax.tree_util.register_static
class CommonTokens:
  """What the caches of all layers of a stack do alike in a step; used once.

  A block that gives its caches the arrays of the stack in a decoding step must
  have done so in the prefill.
  """

  def __init__(self, args: Sequence[Any]) -> None:
    """Remembers what every layer is given, arrays among it."""
    self._args = tuple(args)
    self._updates: dict[tuple[str, ...], Callable[[Tree], Tree]] = {}

  def includes(self, *arrays: jax.Array) -> bool:
    """Whether each is an array of the stack, itself and not its equal."""
    return all(any(x is arg for arg in self._args) for x in arrays)

  def leave(self, cache: nn.Module, update: Callable[[Tree], Tree]) -> None:
    """Leaves variables of all layers' caches to the stack.

    Args:
      cache: That of any layer; it does not write them.
      update: Maps the arrays of one layer, by variable, to those that change.
        It closes over arrays of the stack only.
    """
    self._updates[cache.path] = update

  def write(self, stack: nn.Module) -> None:
    """Writes what was left into the variables of the stack."""
    for path, update in self._updates.items():
      names = path[len(stack.path) :]
      part: Any = stack.variables[cache_variables.COLLECTION]
      for name in names:
        part = part[name]
      for name, x in _for_all(part, update).items():
        # Nested, as `put_variable` wants what is not the module's own.
        value: Any = jax.tree.map(lambda _, x=x: x, part[name])
        for outer in reversed((*names[1:], name)):
          value = {outer: value}
        stack.put_variable(cache_variables.COLLECTION, names[0], value)


class LayerView:
  """What one layer sees of the stacked variables; used once.

  Parts of a layer that stand in scopes of their own, such as the parameters of
  shared parts, have trees of their own: all are given first, in the order in
  which they are taken then.
  """

  def __init__(
    self, number: jax.Array, common: CommonTokens | None = None
  ) -> None:
    """Remembers the layer.

    Args:
      number: Of the layer, int of rank 0.
      common: What all layers do alike; `None` leaves all to each.
    """
    self._number = number
    self._common = common
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
    if cache_variables.INDEX not in stacked:
      return jax.tree.map(
        lambda x: cache_variables.at_layer(x, self._number), stacked
      )
    arrays = _own(stacked)
    first, number = jnp.int32(0), self._number
    if cache_variables.LAYER in stacked:
      # In a stack of stacks, [L,L',...]: as one of all layers, [L * L',...].
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

  def _put(self, stacked: Tree, given: Tree, changed: Tree) -> Tree:
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


def _for_all(
  part: Tree, update: Callable[[Tree], Tree]
) -> dict[str, jax.Array]:
  """Returns what an update changes of a part, with the layers' axes."""
  arrays = {k: jax.tree.leaves(v)[0] for k, v in _own(part).items()}
  outer = part.get(cache_variables.LAYER)
  # Of all layers of this stack, one of the layers of the outer one.
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
  """Returns the variables of a part without what it is given with them."""
  return {k: v for k, v in part.items() if k not in _GIVEN}


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
