"""A stack of layers: one pattern of blocks, repeated.

The layers are `blocks[0], blocks[1], ..., blocks[0], ...`, `num_layers` in
all. Their variables are stored stacked: what layer `g * period + p` has is
entry `g` of `layers/blocks_<p>/...`, whose leading axis is named `layers`.
Layers that do not fill a whole period are stored singly as `layers_<i>/...`.

`scan=True` compiles the pattern once and loops over it; `scan=False` compiles
every layer on its own, which takes longer to compile and may run faster. It is
the same tree of variables either way, so the choice can change at any time.

What differs between the layers of one slot, but is no variable, they compute
from their number: with `pass_layer_index` each is called with `layer_index`,
an array, because the program loops; tables are indexed by it (`table[i]`). A
stack is a block, too: the layers of a stack of stacks count through.

This is the only module of `layers` that uses linen's lifted transforms.
"""

from collections.abc import Sequence
import functools
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp

from paxon.layers import remat, shared, stacked_cache
from paxon.layers.attention import cache_variables
from paxon.sharding import axes, checks, variables


class Group(nn.Module):
  """One period of the pattern; names its blocks `blocks_0`, `blocks_1`, ..."""

  blocks: Sequence[nn.Module]


class Stack(nn.Module):
  """Applies `num_layers` blocks one after another.

  Attributes:
    blocks: One period of the pattern. They are templates: each layer gets a
      copy with variables of its own, also where one object stands twice. What
      is marked `shared` (`layers.shared`) has one set of parameters for all.
    num_layers: Number of layers, of any remainder by the period.
    scan: Whether the compiled program loops over the periods.
    remat_policy: What is saved for the backward pass (`layers.remat`); `None`
      saves everything.
    pass_layer_index: Whether each layer is called with `layer_index`, its
      number from 0, an int32 scalar.
  """

  blocks: Sequence[nn.Module]
  num_layers: int
  scan: bool = True
  remat_policy: remat.Policy | None = None
  pass_layer_index: bool = False

  def __post_init__(self) -> None:
    # A tuple keeps the module hashable where a list was given.
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
      x: What each layer maps to something of the same shape and dtype.
      *args: Arrays (or trees of them) given to every layer, unchanged.
      layer_index: The number of this stack among those of an outer stack.
      **static: Keyword arguments for every layer, constants of the
        compilation such as `deterministic` and `cache_length`.
    """
    period = len(self.blocks)
    groups = self.num_layers // period
    indices = self._indices(layer_index)
    if groups:
      make = self._decoding if self._is_decoding() else self._scanned
      scanned = make(groups, len(args), static)
      starts = None if indices is None else indices[: groups * period : period]
      x, _ = scanned(self._group(), x, starts, *args)
    # Protected from common-subexpression elimination, which would undo it.
    call = self._call(static, prevent_cse=True)
    for i in range(groups * period, self.num_layers):
      block = shared.with_stores(self.blocks[i % period], owner=self)
      layer = block.clone(parent=self, name=f"layers_{i}")
      x = call(layer, x, None if indices is None else indices[i], *args)
    return x

  def _indices(self, layer_index: jax.Array | None) -> jax.Array | None:
    """Returns the number of each layer, [L], where layers are told it."""
    if not self.pass_layer_index:
      return None
    first = 0 if layer_index is None else layer_index * self.num_layers
    return first + jnp.arange(self.num_layers, dtype=jnp.int32)

  def _group(self) -> Group:
    # Deep copies: a clone keeps the children of its original, and all layers
    # would silently have the same parameters.
    copies = tuple(shared.with_stores(b, owner=self) for b in self.blocks)
    return Group(copies, name=axes.LAYERS)

  def _scanned(self, groups: int, num_args: int, static: dict[str, Any]) -> Any:
    """Returns `(group, x, starts, *args) -> (x, None)` over all groups."""
    # A loop cannot be merged with its recomputation, straight code can.
    call = self._call(static, prevent_cse=not self.scan)

    def body(
      group: Group, x: jax.Array, start: jax.Array | None, *args: Any
    ) -> tuple[Any, None]:
      for slot, block in enumerate(group.blocks):
        x = call(block, x, _plus(start, slot), *args)
      return x, None

    return self._lifted(body, groups, num_args)

  def _decoding(
    self,
    groups: int,
    num_args: int,
    static: dict[str, Any],
    *,
    first: int = 0,
    common: stacked_cache.CommonTokens | None = None,
  ) -> Any:
    """Returns what `_scanned` does, with caches carried from layer to layer.

    Args:
      groups: How many.
      num_args: How many arguments each layer gets.
      static: Keyword arguments of each layer.
      first: The number of the first group.
      common: What caches do alike, if the caller writes it.
    """
    call = self._call(static, prevent_cse=False)
    given, read = common, self._only_read()

    def scanned(
      group: Group, x: jax.Array, starts: jax.Array | None, *args: Any
    ) -> tuple[Any, None]:
      common = given or stacked_cache.CommonTokens(args)

      def body(
        group: Group, carry: Any, start: jax.Array | None, *args: Any
      ) -> tuple[Any, None]:
        x, number = carry
        for slot, block in enumerate(group.blocks):
          view = stacked_cache.LayerView(number, common)
          # By its number, as the caches. Slices that the loop makes of what it
          # loops over are copied by XLA:CPU in an order that is not of their
          # use, which costs some percent of a step.
          own = nn.map_variables(
            call, read, trans_in_fn=functools.partial(_at_layer, number=number)
          )
          x = nn.map_variables(
            own,
            stacked_cache.COLLECTION,
            trans_in_fn=view.given,
            trans_out_fn=view.taken,
            mutable=True,
          )(block, x, _plus(start, slot), *args)
        return (x, number + 1), None

      carry = {"variable_carry": stacked_cache.COLLECTION}
      carried = self._lifted(body, groups, num_args, whole=read, **carry)
      (x, _), _ = carried(group, (x, jnp.int32(first)), starts, *args)
      if given is None:
        common.write(self)
      return x, None

    return scanned

  def _lifted(
    self,
    body: Any,
    groups: int,
    num_args: int,
    *,
    whole: Sequence[str] = (),
    **axes_of: Any,
  ) -> Any:
    """Returns the loop `(group, carry, starts, *args)` over all groups.

    Args:
      body: Of the loop.
      groups: How often it runs.
      num_args: How many arguments each layer gets.
      whole: Collections of which the body gets those of all layers.
      **axes_of: More of what `nn.scan` takes.
    """
    # Linen traces the loop's body twice where the body may make variables that
    # are one set for all layers.
    makes_shared = self.is_mutable_collection(shared.COLLECTION) and any(
      map(shared.has_shared, self.blocks)
    )
    return nn.scan(
      body,
      # Every collection and random stream, those that users name included,
      # but for parameters that are one set for all layers.
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

  def _only_read(self) -> list[str]:
    """Returns the collections of layers that this call does not change."""
    return [
      name
      for name in self.variables
      if name != shared.COLLECTION and not self.is_mutable_collection(name)
    ]

  def _is_decoding(self) -> bool:
    """Whether layers have caches, and change them."""
    made = self.variables.get(stacked_cache.COLLECTION, {})
    is_mutable = self.is_mutable_collection(stacked_cache.COLLECTION)
    return axes.LAYERS in made and is_mutable

  def _call(self, static: dict[str, Any], *, prevent_cse: bool) -> Any:
    """Returns `(block, x, index, *args) -> x`, rematerialized by the policy."""

    # Static arguments by closure: as arguments they would be traced.
    def call(
      block: nn.Module, x: jax.Array, index: jax.Array | None, *args: Any
    ) -> Any:
      if index is None:
        return block(x, *args, **static)
      return block(x, *args, layer_index=index, **static)

    # Decoding has no backward pass to save memory for.
    if self.remat_policy is None or self._is_decoding():
      return call
    return nn.remat(call, policy=self.remat_policy, prevent_cse=prevent_cse)


def _at_layer(tree: Any, *, number: jax.Array) -> Any:
  """Returns one layer's part of the variables of all."""
  return jax.tree.map(
    lambda x: cache_variables.at_layer(x, number), variables.unbox(tree)
  )


def _plus(start: jax.Array | None, slot: int) -> jax.Array | None:
  """Returns the number of a layer, where layers are told it."""
  return None if start is None else start + slot
