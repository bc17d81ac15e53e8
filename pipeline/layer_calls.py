"""The layers of a stack as functions of their variables.

A pipeline runs each group of layers on variables that it hands over, outside of
linen's lifted transforms. A group is applied in a scope of the path that it has
in the model, so that it is called the same in messages and its random keys
depend on that path.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
from typing import Any, cast

from flax import core, traverse_util
from flax import linen as nn
from flax.core import meta
from flax.core import scope as core_scope
import jax
import jax.numpy as jnp

from paxon.layers import shared
from paxon.sharding import axes, variables

# Collections of nested dicts.
Tree = Mapping[str, Any]

_NOT_MUTABLE = ("params", shared.COLLECTION)


class _Group(nn.Module):
  """One period of the pattern; names its blocks `blocks_0`, `blocks_1`, ..."""

  blocks: Sequence[nn.Module]


@dataclasses.dataclass(frozen=True)
class GroupCall:
  """Calls one group of layers.

  Attributes:
    blocks: Templates of the group's layers.
    call: `(block, x, index, *args) -> x`.
    path: Of the stack in the model.
    mutable: The collections that layers may change or make.
  """

  blocks: tuple[nn.Module, ...]
  call: Callable[..., Any]
  path: tuple[str, ...]
  mutable: Any

  def __call__(
    self,
    group: Tree,
    shared_parameters: Tree,
    keys: Mapping[str, jax.Array],
    start: jax.Array | None,
    x: Any,
    args: Sequence[Any],
  ) -> tuple[Any, Tree]:
    """Returns what the layers make of `x`, and their mutable collections.

    Args:
      group: The group's variables by collection.
      shared_parameters: Those of shared parts, by label.
      keys: Of each random stream.
      start: The number of the first layer, where layers are told it.
      x: What the layers change.
      args: What else they are given.
    """
    path = (*self.path, axes.LAYERS)

    def run(root: core.Scope) -> Any:
      scope = root
      for name in path:
        scope = scope.push(name)
      # A scope is a parent, too, though its type does not say so.
      owner = _Group((), parent=cast(Any, scope))
      # Layers may be rematerialized, which is a lifted transform.
      copies = tuple(shared.with_stores(b, owner=owner) for b in self.blocks)
      y = x
      group = _Group(copies, parent=cast(Any, scope))
      for slot, block in enumerate(group.blocks):
        index = None if start is None else start + slot
        y = self.call(block, y, index, *args)
      return y

    nested = {name: _nested(tree, path) for name, tree in group.items()}
    if shared_parameters:
      nested[shared.COLLECTION] = shared_parameters
    y, made = core.apply(run, mutable=self.mutable)(nested, rngs=dict(keys))
    return y, {name: _inner(tree, path) for name, tree in made.items()}


def mutable_in(module: nn.Module) -> Any:
  """Returns linen's filter of what layers of a bound module may change."""
  assert module.scope is not None
  return core_scope.subtract_filters(module.scope.mutable, _NOT_MUTABLE)


def variables_of(module: nn.Module) -> dict[str, Tree]:
  """Returns the stacked variables of a stack, plain, by collection."""
  found = {
    name: tree[axes.LAYERS]
    for name, tree in module.variables.items()
    if axes.LAYERS in tree
  }
  return variables.unbox(core.unfreeze(core.freeze(found)))


def shared_parameters_of(module: nn.Module) -> dict[str, Any]:
  """Returns the parameters of shared parts of the model, by label."""
  assert module.scope is not None
  found = module.scope.root.variables().get(shared.COLLECTION, {})
  return variables.unbox(core.unfreeze(core.freeze(found)))


def put(module: nn.Module, made: Tree) -> None:
  """Gives a bound stack the collections [G,...] of its stacked layers.

  Boxes around what it has stay.
  """
  flat: dict[Any, Any] = traverse_util.flatten_dict(dict(made))
  by_collection: dict[str, dict[Any, Any]] = {}
  for (name, *path), value in flat.items():
    by_collection.setdefault(name, {})[tuple(path)] = value
  for name, new in by_collection.items():
    before: Any = module.variables.get(name, {}).get(axes.LAYERS, {})
    old: dict[Any, Any] = traverse_util.flatten_dict(core.unfreeze(before))
    for path, value in new.items():
      box = old.get(path)
      if isinstance(box, meta.AxisMetadata):
        value = box.replace_boxed(variables.unbox(value))
      old[path] = value
    tree = traverse_util.unflatten_dict(old)
    module.put_variable(name, axes.LAYERS, tree)


@dataclasses.dataclass(frozen=True)
class Keys:
  """Random keys as numbers, which can be cut and placed like other arrays.

  Attributes:
    data: uint32 arrays by stream.
    impl: The implementation of typed keys; None of raw ones.
  """

  data: Mapping[str, jax.Array]
  impl: Mapping[str, Any]

  def of(self, data: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Returns the keys that numbers of `data` are."""
    return {
      name: x
      if self.impl[name] is None
      else jax.random.wrap_key_data(x, impl=self.impl[name])
      for name, x in data.items()
    }


def keys_of(
  module: nn.Module, *, num_groups: int, num_microbatches: int
) -> Keys:
  """Returns the random keys [G,M,...] of each stream.

  The model's key is folded with the number of the microbatch, as a learner with
  several microbatches does (with one, nothing is folded), and split for the
  groups, as a scanned stack does. A scan of linen counts each call that makes a
  key twice, so its numbers are others.

  Args:
    module: The stack, bound.
    num_groups: G.
    num_microbatches: M.
  """
  assert module.scope is not None
  data, impl = {}, {}
  for name, lazy in module.scope.rngs.items():
    # Linen's keys that know the path of their scope.
    assert isinstance(lazy, core_scope.LazyRng)
    key = lazy.rng
    keys = key[None]
    if num_microbatches > 1:
      numbers = jnp.arange(num_microbatches, dtype=jnp.uint32)
      keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, numbers)
    split = jax.vmap(lambda k: jax.random.split(k, num_groups), out_axes=1)
    is_typed = jax.dtypes.issubdtype(key.dtype, jax.dtypes.prng_key)
    impl[name] = jax.random.key_impl(key) if is_typed else None
    data[name] = jax.random.key_data(split(keys))
  return Keys(data, impl)


def _nested(tree: Tree, path: Sequence[str]) -> Tree:
  for name in reversed(path):
    tree = {name: tree}
  return tree


def _inner(tree: Any, path: Sequence[str]) -> Tree:
  for name in path:
    tree = tree.get(name, {})
  return core.unfreeze(core.freeze(tree)) if tree else {}
