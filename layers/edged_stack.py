"""A stack whose first and last layers compute otherwise, with its variables.

Some layers are more sensitive than others: a quantized model may leave its
first and last ones as they are. In a scanned stack all layers are one program.
Here the stack is cut into runs of equal layers, at most three of them or a few
more where a pattern of several blocks is cut, and each run is a loop of its
own over its part of the same stacked variables. So a checkpoint does not know
whether there were edges.
"""

from collections.abc import Iterator, Sequence
import itertools
from typing import Any, NamedTuple, cast

from flax import core as flax_core
from flax import linen as nn
from flax import traverse_util
import jax
import jax.numpy as jnp

from paxon.layers import shared, stack, stacked_cache
from paxon.sharding import axes

_CACHE = stacked_cache.COLLECTION


class _Run(NamedTuple):
  """Groups of layers of one kind.

  Attributes:
    first: Number of the first group.
    length: How many.
    is_edge: Of each slot of a group.
  """

  first: int
  length: int
  is_edge: tuple[bool, ...]


class EdgedStack(stack.Stack):
  """A `Stack` with other blocks at its beginning and its end.

  Attributes:
    edge_blocks: What the first and last layers are, in place of `blocks`: as
      many, each with the variables of the other one or some of them.
    num_first: How many layers at the beginning.
    num_last: How many at the end.
  """

  edge_blocks: Sequence[nn.Module] = ()
  num_first: int = 0
  num_last: int = 0

  def __post_init__(self) -> None:
    self.edge_blocks = tuple(self.edge_blocks)
    super().__post_init__()
    if len(self.edge_blocks) != len(self.blocks):
      raise ValueError(
        f"EdgedStack.edge_blocks must be as many as blocks, got"
        f" {len(self.edge_blocks)} for {len(self.blocks)}."
      )
    for field in ("num_first", "num_last"):
      if not 0 <= getattr(self, field) <= self.num_layers:
        raise ValueError(
          f"EdgedStack.{field} must be from 0 to num_layers"
          f" ({self.num_layers}), got {getattr(self, field)}."
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
      # The variables are those of a stack, and so are their first values.
      return super().__call__(x, *args, layer_index=layer_index, **static)
    indices = self._indices(layer_index)
    period = len(self.blocks)
    groups = self.num_layers // period
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
      scanned = self._of_run(number, run, parts, len(args), static, common)
      x, _ = scanned(self._layers(run), x, starts, *args)
    self._put(parts.joined())
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
    # A scope is a parent, too, though its type does not say so.
    return stack.Group(copies, parent=cast(Any, scope))

  def _of_run(
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
      scanned = self._scanned(run.length, num_args, static)
    else:
      # Caches are carried whole, and what is only read comes whole; layers
      # know their number.
      whole += (_CACHE, *self._only_read())
      scanned = self._decoding(
        run.length, num_args, static, first=run.first, common=common
      )
    return nn.map_variables(
      scanned,
      flax_core.DenyList(whole),
      trans_in_fn=lambda given: parts.cut(given, number),
      trans_out_fn=lambda made: parts.keep(made, number),
      mutable=True,
    )

  def _put(self, made: dict[tuple[str, ...], Any]) -> None:
    """Writes what layers changed, by collection and path."""
    by_collection: dict[str, dict[tuple[str, ...], Any]] = {}
    for (collection, *path), value in made.items():
      by_collection.setdefault(collection, {})[tuple(path)] = value
    for collection, new in by_collection.items():
      old: Any = self.variables.get(collection, {}).get(axes.LAYERS, {})
      flat = {**_flat(old), **new}
      tree = traverse_util.unflatten_dict(flat)
      self.put_variable(collection, axes.LAYERS, tree)


class _Parts:
  """Stacked variables, cut for runs, and put together after them."""

  def __init__(self, lengths: Sequence[int]) -> None:
    self._lengths = tuple(lengths)
    self._cut: dict[int, tuple[jax.Array, Sequence[jax.Array]]] = {}
    # By collection and path: what a run was given, and what it made.
    self._given: dict[tuple[str, ...], Any] = {}
    self._made: list[dict[tuple[str, ...], Any]] = [{} for _ in lengths]

  def cut(self, given: Any, number: int) -> Any:
    """Returns the part of a run of variables [G,...]."""
    self._given |= _flat(given)
    return self._part(given, number)

  def keep(self, made: Any, number: int) -> dict[str, Any]:
    """Keeps what a run changed; until all have run, nothing is written."""
    self._made[number] |= _flat(made)
    return {}

  def joined(self) -> dict[tuple[str, ...], Any]:
    """Returns what the runs changed or made, of all layers."""
    result = {}
    for path in dict.fromkeys(path for made in self._made for path in made):
      example = next(made[path] for made in self._made if path in made)
      parts = [
        made[path] if path in made else self._without(path, example, number)
        for number, made in enumerate(self._made)
      ]
      result[path] = jax.tree.map(lambda *x: jnp.concatenate(x), *parts)
    return result

  def _without(self, path: tuple[str, ...], example: Any, number: int) -> Any:
    """Returns the part of a run whose layers know nothing of a variable."""
    if path in self._given:
      return self._part(self._given[path], number)
    length = self._lengths[number]
    return jax.tree.map(
      lambda x: jnp.zeros((length, *x.shape[1:]), x.dtype), example
    )

  def _part(self, tree: Any, number: int) -> Any:
    return jax.tree.map(lambda x: self._parts_of(x)[number], tree)

  def _parts_of(self, x: jax.Array) -> Sequence[jax.Array]:
    # Cut once: the derivative is then one concatenation for all runs.
    if id(x) not in self._cut:
      self._cut[id(x)] = x, jax.lax.split(x, self._lengths)
    return self._cut[id(x)][1]


def _flat(tree: Any) -> dict[tuple[str, ...], Any]:
  plain: Any = flax_core.unfreeze(flax_core.freeze(tree))
  return traverse_util.flatten_dict(plain)
