"""A stack whose first and last layers differ, with the same variables.

For example, a quantized model may keep its first and last layers in high
precision. The stack is split into runs of equal layers, usually three, and each
run is a loop over its slice of the same stacked variables. So checkpoints do
not depend on the edges.
"""

from collections.abc import Iterator, Sequence
import itertools
from typing import Any, NamedTuple, cast

from flax import core as flax_core
from flax import linen as nn
from flax import traverse_util
import jax
import jax.numpy as jnp

from paxon.layers.stacks import shared, stack, stacked_cache
from paxon.sharding import axes, checks

_CACHE = stacked_cache.COLLECTION


class _Run(NamedTuple):
  """Consecutive groups with the same blocks.

  Attributes:
    first: Index of the first group.
    length: Number of groups.
    is_edge: Whether each slot has an edge block.
  """

  first: int
  length: int
  is_edge: tuple[bool, ...]


class EdgedStack(stack.Stack):
  """A `Stack` with other blocks in its first and last layers.

  Attributes:
    edge_blocks: Replacements of `blocks` in the first and last layers, each
      with the same variables or a subset.
    num_first: Number of first layers.
    num_last: Number of last layers.
  """

  edge_blocks: Sequence[nn.Module] = ()
  num_first: int = 0
  num_last: int = 0

  def __post_init__(self) -> None:
    self.edge_blocks = tuple(self.edge_blocks)
    super().__post_init__()
    if len(self.edge_blocks) != len(self.blocks):
      raise ValueError(
        "EdgedStack.edge_blocks must have one entry for each of"
        f" {len(self.blocks)} blocks, got {len(self.edge_blocks)}."
      )
    for field, number in checks.get_values(self, "num_first", "num_last"):
      if not 0 <= number <= self.num_layers:
        raise ValueError(
          f"EdgedStack.{field} must be in [0, num_layers]"
          f" ({self.num_layers} layers), got {number}."
        )

  @nn.compact
  def __call__(
    self,
    x: jax.Array,
    *args: Any,
    layer_index: jax.Array | None = None,
    **static: Any,
  ) -> Any:
    """Returns `x` after all layers; see `Stack`."""
    if self.is_initializing():
      # Variables and initial values are those of `Stack`.
      return super().__call__(x, *args, layer_index=layer_index, **static)
    indices = self._indices(layer_index)
    period = len(self.blocks)
    groups = self._num_stacked() // period
    runs = list(self._runs(groups))
    parts = _Parts([run.length for run in runs])
    common = None
    if runs and self._is_decoding():
      common = stacked_cache.CommonTokens(args)
    for number, run in enumerate(runs):
      starts = None
      if indices is not None:
        starts = indices[: groups * period : period]
        starts = starts[run.first : run.first + run.length]
      scanned = self._make_run(number, run, parts, len(args), static, common)
      x, _ = scanned(self._layers(run), x, starts, *args)
    self._write(parts.join())
    if common is not None:
      common.write(self)
    call = self._call(static, prevent_cse=True)
    for i in range(groups * period, self.num_layers):
      block = self._block(i % period, is_edge=self._is_edge(i))
      layer = block.clone(parent=self, name=f"layers_{i}")
      x = call(layer, x, None if indices is None else indices[i], *args)
    return x

  def _is_edge(self, layer: int) -> bool:
    return layer < self.num_first or layer >= self.num_layers - self.num_last

  def _runs(self, groups: int) -> Iterator[_Run]:
    period = len(self.blocks)
    first = 0
    kinds = (
      tuple(self._is_edge(g * period + slot) for slot in range(period))
      for g in range(groups)
    )
    for is_edge, same in itertools.groupby(kinds):
      length = len(list(same))
      yield _Run(first, length, is_edge)
      first += length

  def _block(self, slot: int, *, is_edge: bool) -> nn.Module:
    blocks = self.edge_blocks if is_edge else self.blocks
    return shared.with_stores(blocks[slot], owner=self)

  def _layers(self, run: _Run) -> nn.Module:
    """Returns a group of blocks in the scope of the stacked layers."""
    copies = tuple(
      self._block(slot, is_edge=is_edge)
      for slot, is_edge in enumerate(run.is_edge)
    )
    assert self.scope is not None
    scope = self.scope.push(axes.LAYERS, reuse=True)
    # A scope can be a parent, although its type does not allow it.
    return stack.Group(copies, parent=cast(Any, scope))

  def _make_run(
    self,
    number: int,
    run: _Run,
    parts: "_Parts",
    num_args: int,
    static: dict[str, Any],
    common: stacked_cache.CommonTokens | None,
  ) -> Any:
    """Returns `(group, x, starts, *args) -> (x, None)` of one run."""
    whole = (shared.COLLECTION,)
    if common is None:
      scanned = self._make_scan(run.length, num_args, static)
    else:
      # Caches and immutable collections are passed whole and indexed by layer.
      whole += (_CACHE, *self._immutable_collections())
      scanned = self._make_decoding_scan(
        run.length, num_args, static, first=run.first, common=common
      )
    return nn.map_variables(
      scanned,
      flax_core.DenyList(whole),
      trans_in_fn=lambda given: parts.select(given, number),
      trans_out_fn=lambda made: parts.collect(made, number),
      mutable=True,
    )

  def _write(self, made: dict[tuple[str, ...], Any]) -> None:
    """Writes changed variables by collection and path."""
    by_collection: dict[str, dict[tuple[str, ...], Any]] = {}
    for (collection, *path), value in made.items():
      by_collection.setdefault(collection, {})[tuple(path)] = value
    for collection, new in by_collection.items():
      old: Any = self.variables.get(collection, {}).get(axes.LAYERS, {})
      flat = {**_flat(old), **new}
      tree = traverse_util.unflatten_dict(flat)
      self.put_variable(collection, axes.LAYERS, tree)


class _Parts:
  """Stacked variables, split between runs and joined after them."""

  def __init__(self, lengths: Sequence[int]) -> None:
    self._lengths = tuple(lengths)
    self._slices: dict[int, tuple[jax.Array, Sequence[jax.Array]]] = {}
    # By collection and path: inputs of all runs, and outputs of each.
    self._given: dict[tuple[str, ...], Any] = {}
    self._made: list[dict[tuple[str, ...], Any]] = [{} for _ in lengths]

  def select(self, given: Any, number: int) -> Any:
    """Returns the slice of a run of variables [G,...]."""
    self._given |= _flat(given)
    return self._slice(given, number)

  def collect(self, made: Any, number: int) -> dict[str, Any]:
    """Stores the outputs of a run; nothing is written until all have run."""
    self._made[number] |= _flat(made)
    return {}

  def join(self) -> dict[tuple[str, ...], Any]:
    """Returns the changed or created variables of all layers."""
    result = {}
    for path in dict.fromkeys(path for made in self._made for path in made):
      example = next(made[path] for made in self._made if path in made)
      parts = [
        made[path] if path in made else self._fill(path, example, number)
        for number, made in enumerate(self._made)
      ]
      result[path] = jax.tree.map(lambda *x: jnp.concatenate(x), *parts)
    return result

  def _fill(self, path: tuple[str, ...], example: Any, number: int) -> Any:
    """Returns the slice of a run whose layers do not have a variable."""
    if path in self._given:
      return self._slice(self._given[path], number)
    length = self._lengths[number]
    return jax.tree.map(
      lambda x: jnp.zeros((length, *x.shape[1:]), x.dtype), example
    )

  def _slice(self, tree: Any, number: int) -> Any:
    return jax.tree.map(lambda x: self._split(x)[number], tree)

  def _split(self, x: jax.Array) -> Sequence[jax.Array]:
    # Split once, so that the derivative is one concatenation for all runs.
    if id(x) not in self._slices:
      self._slices[id(x)] = x, jax.lax.split(x, self._lengths)
    return self._slices[id(x)][1]


def _flat(tree: Any) -> dict[tuple[str, ...], Any]:
  plain: Any = flax_core.unfreeze(flax_core.freeze(tree))
  return traverse_util.flatten_dict(plain)
