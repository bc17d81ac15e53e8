"""A stack of layers: one pattern of blocks, repeated.

The layers are `blocks[0], blocks[1], ..., blocks[0], ...`, `num_layers` in
total. Their variables are stored stacked: those of layer `g * period + p` are
entry `g` of `layers/blocks_<p>/...`, whose leading axis is named `layers`.
Layers of an incomplete last period are stored separately as `layers_<i>/...`.
So may be all others when a model is applied (`variables.separate_layers`); the
loop is then unrolled.

`scan=True` compiles the pattern once and loops over it; `scan=False` unrolls
the loop, which takes longer to compile and may run faster. The variables are
the same, so the choice can change at any time.

With `pass_layer_index` each layer is called with its index (an array, because
the program loops) for what differs between layers and is not a variable. A
stack can be a block of another stack; indices then count all layers.
"""

from collections.abc import Sequence
import functools
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp

from paxon.layers import remat
from paxon.layers.attention import cache_variables
from paxon.layers.cpu import forms
from paxon.layers.stacks import shared, stacked_cache
from paxon.sharding import axes, checks, variables


class Group(nn.Module):
  """One period of the pattern, with blocks `blocks_0`, `blocks_1`, ..."""

  blocks: Sequence[nn.Module]


class Stack(nn.Module):
  """Applies `num_layers` blocks one after another.

  Attributes:
    blocks: One period of the pattern. Blocks are templates: each layer gets a
      copy with its own variables, even if one object occurs twice. Modules
      marked `shared` (see `shared`) have one set of parameters for all.
    num_layers: Number of layers; need not be a multiple of the period.
    scan: Whether the compiled program loops over the periods.
    remat_policy: Values saved for the backward pass (`layers.remat`); `None`
      saves everything, or in a loop on one CPU what `recompute_elementwise`
      saves.
    pass_layer_index: Whether each layer is called with `layer_index`, an int32
      scalar from 0.
  """

  blocks: Sequence[nn.Module]
  num_layers: int
  scan: bool = True
  remat_policy: remat.Policy | str | None = None
  pass_layer_index: bool = False

  def __post_init__(self) -> None:
    # A tuple is hashable, a list is not.
    self.blocks = tuple(self.blocks)
    super().__post_init__()
    if not self.blocks:
      raise ValueError("Stack.blocks must not be empty.")
    checks.check_size(self, "num_layers")

  @nn.compact
  def __call__(
    self,
    x: jax.Array,
    *args: Any,
    layer_index: jax.Array | None = None,
    **static: Any,
  ) -> Any:
    """Returns `x` after all layers.

    Args:
      x: Input; each layer keeps its shape and dtype.
      *args: Arrays (or trees of arrays) passed to every layer.
      layer_index: Index of this stack in an outer stack.
      **static: Keyword arguments of every layer, compile-time constants such as
        `deterministic` and `cache_length`.
    """
    period = len(self.blocks)
    groups = self._num_stacked() // period
    indices = self._indices(layer_index)
    if groups:
      is_decoding = self._is_decoding()
      make = self._make_decoding_scan if is_decoding else self._make_scan
      scanned = make(groups, len(args), static)
      starts = None if indices is None else indices[: groups * period : period]
      x, _ = scanned(self._group(), x, starts, *args)
    # Common-subexpression elimination would undo rematerialization.
    call = self._call(static, prevent_cse=True)
    for i in range(groups * period, self.num_layers):
      block = shared.with_stores(self.blocks[i % period], owner=self)
      layer = block.clone(parent=self, name=f"layers_{i}")
      x = call(layer, x, None if indices is None else indices[i], *args)
    return x

  def _num_stacked(self) -> int:
    """Returns the number of layers whose variables are stacked."""
    period = len(self.blocks)
    number = self.num_layers // period * period
    given = set().union(*self.variables.values())
    is_separate = any(f"layers_{i}" in given for i in range(number))
    return 0 if is_separate else number

  def _indices(self, layer_index: jax.Array | None) -> jax.Array | None:
    """Returns the index of each layer, [L], if layers need it."""
    if not self.pass_layer_index:
      return None
    first = 0 if layer_index is None else layer_index * self.num_layers
    return first + jnp.arange(self.num_layers, dtype=jnp.int32)

  def _group(self) -> Group:
    # Deep copies: clones share submodules, so all layers would silently have
    # the same parameters.
    copies = tuple(shared.with_stores(b, owner=self) for b in self.blocks)
    return Group(copies, name=axes.LAYERS)

  def _make_scan(
    self, groups: int, num_args: int, static: dict[str, Any]
  ) -> Any:
    """Returns `(group, x, starts, *args) -> (x, None)` over all groups."""
    recomputes = self.scan and forms.recomputes_elementwise()
    default = remat.recompute_elementwise if recomputes else None
    # CSE cannot merge a loop with its recomputation, but unrolled code.
    call = self._call(static, prevent_cse=not self.scan, default=default)

    def body(
      group: Group, x: jax.Array, start: jax.Array | None, *args: Any
    ) -> tuple[Any, None]:
      for slot, block in enumerate(group.blocks):
        x = call(block, x, _add_slot(start, slot), *args)
      return x, None

    return self._lift(body, groups, num_args)

  def _make_decoding_scan(
    self,
    groups: int,
    num_args: int,
    static: dict[str, Any],
    *,
    first: int = 0,
    common: stacked_cache.CommonTokens | None = None,
  ) -> Any:
    """Like `_make_scan`, with caches carried from layer to layer.

    `first` is the index of the first group, and `common` has the shared updates
    of caches, if the caller writes them.
    """
    call = self._call(static, prevent_cse=False)
    given, read = common, self._immutable_collections()

    def run_group(
      group: Group, x: jax.Array, starts: jax.Array | None, *args: Any
    ) -> tuple[Any, None]:
      common = given or stacked_cache.CommonTokens(args)

      def body(
        group: Group, carry: Any, start: jax.Array | None, *args: Any
      ) -> tuple[Any, None]:
        x, number = carry
        for slot, block in enumerate(group.blocks):
          view = stacked_cache.LayerView(number, common)
          # Indexed here, like the caches: XLA:CPU copies the slices of scanned
          # arrays in a different order than they are used, which costs some
          # percent of a step.
          own = nn.map_variables(
            call, read, trans_in_fn=functools.partial(_at_layer, number=number)
          )
          x = nn.map_variables(
            own,
            stacked_cache.COLLECTION,
            trans_in_fn=view.select,
            trans_out_fn=view.update,
            mutable=True,
          )(block, x, _add_slot(start, slot), *args)
        return (x, number + 1), None

      carry = {"variable_carry": stacked_cache.COLLECTION}
      carried = self._lift(body, groups, num_args, whole=read, **carry)
      (x, _), _ = carried(group, (x, jnp.int32(first)), starts, *args)
      if given is None:
        common.write(self)
      return x, None

    return run_group

  def _lift(
    self,
    body: Any,
    groups: int,
    num_args: int,
    *,
    whole: Sequence[str] = (),
    **axes_of: Any,
  ) -> Any:
    """Returns the loop `(group, carry, starts, *args)` over all groups.

    The body gets the collections in `whole` for all layers. `axes_of` are
    further arguments of `nn.scan`.
    """
    # Linen then traces the body twice, because it may create variables that all
    # layers share.
    makes_shared = self.is_mutable_collection(shared.COLLECTION) and any(
      map(shared.has_shared, self.blocks)
    )
    return nn.scan(
      body,
      # All collections and random streams, including those of users, except
      # parameters that all layers share.
      variable_axes={True: 0},
      variable_broadcast=[shared.COLLECTION, *whole],
      split_rngs={True: True},
      in_axes=(0, *(nn.broadcast,) * num_args),
      length=groups,
      unroll=1 if self.scan else groups,
      check_constancy_invariants=makes_shared,
      metadata_params={
        nn.PARTITION_NAME: axes.LAYERS,
        variables.PERIOD: len(self.blocks),
      },
      **axes_of,
    )

  def _immutable_collections(self) -> list[str]:
    """Returns the collections that this call does not change."""
    return [
      name
      for name in self.variables
      if name != shared.COLLECTION and not self.is_mutable_collection(name)
    ]

  def _is_decoding(self) -> bool:
    """Whether layers have mutable caches."""
    made = self.variables.get(stacked_cache.COLLECTION, {})
    is_mutable = self.is_mutable_collection(stacked_cache.COLLECTION)
    return axes.LAYERS in made and is_mutable

  def _call(
    self,
    static: dict[str, Any],
    *,
    prevent_cse: bool,
    default: remat.Policy | None = None,
  ) -> Any:
    """Returns `(block, x, index, *args) -> x`, rematerialized by the policy."""
    policy = remat.to_policy(self.remat_policy)
    if policy is None:
      policy = default

    # A closure, because arguments would be traced.
    def call(
      block: nn.Module, x: jax.Array, index: jax.Array | None, *args: Any
    ) -> Any:
      if policy is not None:
        x = remat.tag(x, remat.BLOCK_INPUT)
      if index is None:
        return block(x, *args, **static)
      return block(x, *args, layer_index=index, **static)

    # Decoding has no backward pass to save memory for.
    if policy is None or self._is_decoding():
      return call
    return nn.remat(call, policy=policy, prevent_cse=prevent_cse)


class Stacks(nn.Module):
  """Applies stacks one after another, each compiled once.

  For layers without one pattern, such as a few dense layers before mixtures of
  experts. Called like a stack; variables are those of `stacks_<i>`.

  Attributes:
    stacks: Stacks that do not pass their layers an index.
  """

  stacks: Sequence[nn.Module]

  def __post_init__(self) -> None:
    self.stacks = tuple(self.stacks)
    super().__post_init__()
    if not self.stacks:
      raise ValueError("Stacks.stacks must not be empty.")
    for i, each in enumerate(self.stacks):
      if isinstance(each, Stack) and each.pass_layer_index:
        raise ValueError(
          f"Stacks.stacks[{i}].pass_layer_index is set, but layers would be"
          " counted from 0 in each stack."
        )

  def __call__(self, x: jax.Array, *args: Any, **static: Any) -> Any:
    """Returns `x` after all stacks; see `Stack`."""
    for each in self.stacks:
      x = each(x, *args, **static)
    return x


def _at_layer(tree: Any, *, number: jax.Array) -> Any:
  """Returns the variables of one layer."""
  return jax.tree.map(
    lambda x: cache_variables.at_layer(x, number), variables.unbox(tree)
  )


def _add_slot(start: jax.Array | None, slot: int) -> jax.Array | None:
  """Returns the index of a layer, if layers need it."""
  return None if start is None else start + slot
