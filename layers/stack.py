"""A stack of layers: one pattern of blocks, repeated.

The layers are `blocks[0], blocks[1], ..., blocks[0], ...`, `num_layers` in
all. Their variables are stored stacked: what layer `g * period + p` has is
entry `g` of `layers/blocks_<p>/...`, whose leading axis is named `layers`.
Layers that do not fill a whole period are stored singly as `layers_<i>/...`.

`scan=True` compiles the pattern once and loops over it; `scan=False` compiles
every layer on its own, which takes longer to compile and may run faster. It is
the same tree of variables either way, so the choice can change at any time.

This is the only module of `layers` that uses linen's lifted transforms.
"""

from collections.abc import Sequence
from typing import Any

from flax import linen as nn
import jax

from paxon.layers import dimensions, remat, shared
from paxon.sharding import axes, variables


class _Group(nn.Module):
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
  """

  blocks: Sequence[nn.Module]
  num_layers: int
  scan: bool = True
  remat_policy: remat.Policy | None = None

  def __post_init__(self) -> None:
    # A tuple keeps the module hashable where a list was given.
    self.blocks = tuple(self.blocks)
    super().__post_init__()
    if not self.blocks:
      raise ValueError("Stack.blocks must not be empty.")
    dimensions.check(self, "num_layers")

  @nn.compact
  def __call__(self, x: jax.Array, *args: Any, **static: Any) -> Any:
    """Returns `x` after all layers.

    Args:
      x: What each layer maps to something of the same shape and dtype.
      *args: Arrays (or trees of them) given to every layer, unchanged.
      **static: Keyword arguments for every layer, constants of the
        compilation such as `deterministic` and `cache_length`.
    """
    period = len(self.blocks)
    groups = self.num_layers // period
    if groups:
      x, _ = self._scanned(groups, len(args), static)(self._group(), x, *args)
    # Protected from common-subexpression elimination, which would undo it.
    call = self._call(static, prevent_cse=True)
    for i in range(groups * period, self.num_layers):
      block = shared.with_stores(self.blocks[i % period], owner=self)
      x = call(block.clone(parent=self, name=f"layers_{i}"), x, *args)
    return x

  def _group(self) -> _Group:
    # Deep copies: a clone keeps the children of its original, and all layers
    # would silently have the same parameters.
    copies = tuple(shared.with_stores(b, owner=self) for b in self.blocks)
    return _Group(copies, name=axes.LAYERS)

  def _scanned(self, groups: int, num_args: int, static: dict[str, Any]) -> Any:
    """Returns `(group, x, *args) -> (x, None)` over all groups."""
    # A loop cannot be merged with its recomputation, straight code can.
    call = self._call(static, prevent_cse=not self.scan)

    def body(group: _Group, x: jax.Array, *args: Any) -> tuple[Any, None]:
      for block in group.blocks:
        x = call(block, x, *args)
      return x, None

    return nn.scan(
      body,
      # Every collection and random stream, those that users name included, but
      # for parameters that are one set for all layers.
      variable_axes={True: 0},
      variable_broadcast=[shared.COLLECTION],
      split_rngs={True: True},
      in_axes=(nn.broadcast,) * num_args,
      length=groups,
      unroll=1 if self.scan else groups,
      metadata_params={
        nn.PARTITION_NAME: axes.LAYERS,
        variables.PERIOD: len(self.blocks),
      },
    )

  def _call(self, static: dict[str, Any], *, prevent_cse: bool) -> Any:
    """Returns `(block, x, *args) -> x`, rematerialized by the policy."""

    # Static arguments by closure: as arguments they would be traced.
    def call(block: nn.Module, x: jax.Array, *args: Any) -> Any:
      return block(x, *args, **static)

    if self.remat_policy is None:
      return call
    return nn.remat(call, policy=self.remat_policy, prevent_cse=prevent_cse)
