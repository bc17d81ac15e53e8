"""Layers of a stack as functions of their variables.

A pipeline runs each group of layers on variables that it passes explicitly,
outside of linen's lifted transforms. A group is applied in a scope with its
path in the model, so that errors name it and its random keys depend on it.

In a bubble a group computes on arbitrary values, which may give NaN. The result
is discarded, so its gradient is zero; but zero times infinity is NaN, which
would be added to the gradients of real work. `mask_gradient` prevents that.
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

from paxon.layers.stacks import shared
from paxon.learners import combining
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
    path: Path of the stack in the model.
    mutable: Filter of the collections that layers may change or create.
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
    """Returns the output of the layers, and their mutable collections.

    Args:
      group: The group's variables by collection.
      shared_parameters: Parameters of shared modules, by label.
      keys: Random keys by stream.
      start: Index of the first layer, if layers receive their index.
      x: Input of the first layer.
      args: Other arguments of every layer.
    """
    path = (*self.path, axes.LAYERS)

    def run(root: core.Scope) -> Any:
      scope = root
      for name in path:
        scope = scope.push(name)
      # A scope can be a parent, though its type does not allow it.
      owner = _Group((), parent=cast(Any, scope))
      # Layers may be rematerialized, which is a lifted transform.
      copies = tuple(shared.with_stores(b, owner=owner) for b in self.blocks)
      y = x
      group = _Group(copies, parent=cast(Any, scope))
      for slot, block in enumerate(group.blocks):
        index = None if start is None else start + slot
        y = self.call(block, y, index, *args)
      return y

    nested = {name: _nest(tree, path) for name, tree in group.items()}
    if shared_parameters:
      nested[shared.COLLECTION] = shared_parameters
    y, made = core.apply(run, mutable=self.mutable)(nested, rngs=dict(keys))
    return y, {name: _unnest(tree, path) for name, tree in made.items()}


def mutable_filter(module: nn.Module) -> Any:
  """Returns linen's filter of the variables that bound layers may change."""
  assert module.scope is not None
  return core_scope.subtract_filters(module.scope.mutable, _NOT_MUTABLE)


def stacked_variables(module: nn.Module) -> dict[str, Tree]:
  """Returns the stacked variables of a stack, unboxed, by collection."""
  found = {
    name: tree[axes.LAYERS]
    for name, tree in module.variables.items()
    if axes.LAYERS in tree
  }
  return variables.unbox(core.unfreeze(core.freeze(found)))


def shared_parameters(module: nn.Module) -> dict[str, Any]:
  """Returns the parameters of shared modules of the model, by label."""
  assert module.scope is not None
  found = module.scope.root.variables().get(shared.COLLECTION, {})
  return variables.unbox(core.unfreeze(core.freeze(found)))


def put_variables(module: nn.Module, made: Tree) -> None:
  """Sets collections [G,...] of the stacked layers of a bound stack.

  Existing variables keep their boxes.
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
class KeyData:
  """Random keys as plain arrays, which can be split and sharded.

  Attributes:
    data: uint32 arrays by stream.
    impls: Implementation of typed keys by stream; None for raw keys.
  """

  data: Mapping[str, jax.Array]
  impls: Mapping[str, Any]

  def wrap(self, data: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Returns the keys of some of the data."""
    return {
      name: x
      if self.impls[name] is None
      else jax.random.wrap_key_data(x, impl=self.impls[name])
      for name, x in data.items()
    }


def to_key_data(keys: Mapping[str, jax.Array]) -> KeyData:
  """Returns keys by stream as plain arrays."""
  return KeyData(
    {name: jax.random.key_data(key) for name, key in keys.items()},
    {
      name: jax.random.key_impl(key)
      if jax.dtypes.issubdtype(key.dtype, jax.dtypes.prng_key)
      else None
      for name, key in keys.items()
    },
  )


def module_keys(module: nn.Module) -> dict[str, jax.Array]:
  """Returns the random keys of a bound module by stream."""
  assert module.scope is not None
  keys = {}
  for name, lazy in module.scope.rngs.items():
    assert isinstance(lazy, core_scope.LazyRng)
    keys[name] = lazy.rng
  return keys


def fold_microbatches(key: jax.Array, num_microbatches: int) -> jax.Array:
  """Returns keys [M] as a learner does: if M is 1, `key` is not folded."""
  if num_microbatches == 1:
    return key[None]
  numbers = jnp.arange(num_microbatches, dtype=jnp.uint32)
  return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, numbers)


def split_groups(keys: jax.Array, num_groups: int) -> jax.Array:
  """Returns keys [M,G] of keys [M], split as a scanned stack does.

  A linen scan counts each call that makes a key twice, so its random numbers
  differ.
  """
  return jax.vmap(lambda k: jax.random.split(k, num_groups))(keys)


def _nest(tree: Tree, path: Sequence[str]) -> Tree:
  for name in reversed(path):
    tree = {name: tree}
  return tree


def _unnest(tree: Any, path: Sequence[str]) -> Tree:
  for name in path:
    tree = tree.get(name, {})
  return core.unfreeze(core.freeze(tree)) if tree else {}


@jax.custom_vjp
def mask_gradient(live: jax.Array, tree: Any) -> Any:
  """Returns `tree`; its gradient is zero unless `live`, a bool []."""
  del live
  return tree


def _mask_forward(live: jax.Array, tree: Any) -> tuple[Any, jax.Array]:
  return tree, live


def _mask_backward(live: jax.Array, gradients: Any) -> tuple[None, Any]:
  def mask(g: Any) -> Any:
    # The gradient of integers and of keys has a dtype without values.
    if g.dtype == jax.dtypes.float0:
      return g
    return jnp.where(live, g, jnp.zeros_like(g))

  return None, jax.tree.map(mask, gradients)


mask_gradient.defvjp(_mask_forward, _mask_backward)


def copy_per_tick(values: Any, specs: variables.Specs, *, copies: int) -> Any:
  """Returns a copy of variables for each tick, [copies,...].

  For variables that are overwritten with their gradient. The gradients of the
  copies are combined by each variable's `CombineRule`; autodiff would add them.
  """

  @jax.custom_vjp
  def fan_out(values: Any) -> Any:
    return jax.tree.map(
      lambda x: jnp.broadcast_to(x[None], (copies, *x.shape)), values
    )

  def backward(_: None, gradients: Any) -> tuple[Any]:
    return (combining.combine_overwritten(gradients, specs=specs),)

  fan_out.defvjp(lambda values: (fan_out(values), None), backward)
  return fan_out(values)
