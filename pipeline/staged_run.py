"""One pass of a batch through the stages of a pipelined stack.

Letters: G groups of layers, P stages, R repeats, K groups of a stage and
repeat, M microbatches.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
from typing import Any, NamedTuple

from flax import linen as nn
from flax import traverse_util
import jax
import jax.numpy as jnp

from paxon.layers import remat, stacked_cache
from paxon.pipeline import (
  cache_rows,
  collected,
  layer_calls,
  live_gradients,
  microbatch_rows,
  placement,
  shifting_buffer,
  stage_view,
  timetable,
)
from paxon.sharding import variables

_CACHE = stacked_cache.COLLECTION


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
  """How a batch passes through the stages.

  Attributes:
    rows: Which rows are in which microbatch.
    view: Which groups of layers a stage has.
    table: What stages do when.
    period: Layers of a group.
    batch: Rows of the batch.
    streaming: Whether stages keep microbatches in turns.
    unroll: Whether the groups of a stage are compiled one by one.
    iteration_policy: What a tick keeps for the backward pass.
  """

  rows: microbatch_rows.Rows
  view: stage_view.StageView
  table: timetable.Timetable
  period: int
  batch: int
  streaming: bool
  unroll: bool
  iteration_policy: remat.Policy | None


class _Held(NamedTuple):
  """What stages have, whatever the tick; arrays [P,...] or of one stage.

  Attributes:
    stage: The stage's number, int32.
    variables: Of its groups by collection, [R,K,...].
    keys: Numbers of random keys, [R,K,M,...].
    numbers: Of its groups, [R,K].
    starts: Numbers of the groups' first layers, [R,K]; None if not told.
    common: Parameters of shared parts, and arguments without rows.
    counts: What caches have without rows, before the step, [R,K].
  """

  stage: jax.Array
  variables: Any
  keys: Any
  numbers: jax.Array
  starts: jax.Array | None
  common: Any
  counts: cache_rows.Flat


# Caches of a decoding step: with rows, and without after the step.
_State = tuple[cache_rows.Flat, cache_rows.Flat]


def run(
  module: nn.Module,
  x: Any,
  args: Sequence[Any],
  *,
  starts: jax.Array | None,
  call: Callable[..., Any],
  specs: variables.Specs,
  settings: Settings,
) -> Any:
  """Returns `x` after the groups of layers of a stack.

  Args:
    module: The stack, bound; gets the collections that its layers change.
    x: What the layers change, [batch,...].
    args: What else they are given.
    starts: The number of each group's first layer [G], where layers are told.
    call: `(block, x, index, *args) -> x`.
    specs: Of the variables that are replaced or overwritten, by collection.
    settings: How the batch passes through the stages.
  """
  view, table = settings.view, settings.table
  found = layer_calls.variables_of(module)
  caches = found.pop(_CACHE, {})
  plain, overwritten = _parted(found, specs)
  split = _ArgumentSplit(args, settings.batch)
  keys = layer_calls.keys_of(
    module,
    num_groups=view.num_groups,
    num_microbatches=table.num_microbatches,
  )
  with_rows, counts = cache_rows.apart(
    view.split(caches), settings.rows, batch=settings.batch
  )
  common = (layer_calls.shared_parameters_of(module), split.whole)
  held = _Held(
    stage=jnp.arange(view.num_stages, dtype=jnp.int32),
    variables=view.split(plain),
    keys=view.split(keys.data),
    numbers=view.group_numbers(),
    starts=None if starts is None else view.split(starts),
    # One copy for each stage, which no device has two of: gradients of the
    # copies are added up once, after the loop.
    common=placement.staged(_copies(common, view.num_stages)),
    counts=counts,
  )
  stage = _Stage(
    call=layer_calls.GroupCall(
      module.blocks, call, module.path, layer_calls.mutable_in(module)
    ),
    keys=keys,
    split=split,
    settings=settings,
    writes=module.is_mutable_collection(_CACHE),
  )
  x, state, made = _looped(
    stage,
    held,
    (x, split.with_rows),
    state=(with_rows, counts),
    per_tick=_per_tick(overwritten, specs, settings),
  )
  if caches and stage.writes:
    layer_calls.put(module, {_CACHE: view.merge(cache_rows.together(*state))})
  if jax.tree.leaves(made):
    _collect(module, made, old=plain, specs=specs, settings=settings)
  return x


def _collect(
  module: nn.Module,
  made: Any,
  *,
  old: Any,
  specs: variables.Specs,
  settings: Settings,
) -> None:
  """Gives the stack what layers made in each tick, arrays [ticks,P,K,...]."""
  made = stage_view.by_microbatch(made, settings.table)
  made = jax.tree.map(lambda x: jnp.moveaxis(x, 2, 0), made)
  combined = collected.combined(
    jax.vmap(settings.view.merge)(made),
    old=old,
    specs=specs,
    rows=settings.rows,
    size=settings.batch // settings.table.num_microbatches,
    period=settings.period,
  )
  layer_calls.put(module, combined)


def _looped(
  stage: "_Stage",
  held: _Held,
  rows: Any,
  *,
  state: _State,
  per_tick: Any,
) -> tuple[Any, _State, Any]:
  """Runs the loop over ticks; `rows` are `x` and the arguments with rows."""
  settings = stage.settings
  axis = placement.stage_axis()

  def tick(t: jax.Array, given: Any, state: Any, own: Any, held: _Held) -> Any:
    with placement.inside_a_stage():
      mapped = jax.vmap(stage, in_axes=(None, 0, 0, 0, 0), spmd_axis_name=axis)
      return mapped(t, given, state, own, held)

  if settings.iteration_policy is not None:
    tick = jax.checkpoint(
      tick, policy=settings.iteration_policy, prevent_cse=False
    )
  y, state, made = shifting_buffer.run(
    lambda t, given, state, own: tick(t, given, state, own, held),
    settings.rows.split(rows),
    table=settings.table,
    state=state,
    per_tick=per_tick,
    streaming=settings.streaming,
  )
  return placement.batch(settings.rows.merge(y)), state, made


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Stage:
  """What one stage does in a tick."""

  call: layer_calls.GroupCall
  keys: layer_calls.Keys
  split: "_ArgumentSplit"
  settings: Settings
  writes: bool

  def __call__(
    self, tick: jax.Array, given: Any, state: _State, own: Any, held: _Held
  ) -> tuple[Any, _State, Any]:
    """Returns the rows, the caches, and what the layers made, [K,...]."""
    rows = self.settings.rows
    work = self.settings.table.work(tick, held.stage)
    x, row_args = given
    of_repeat = stage_view.of_repeat(
      (_joined(held.variables, own), held.numbers, held.starts, held.keys),
      work.repeat,
    )
    groups, numbers, starts, keys = of_repeat
    keys = jax.tree.map(
      lambda x: jax.lax.dynamic_index_in_dim(
        x, work.microbatch, axis=1, keepdims=False
      ),
      keys,
    )
    caches = cache_rows.read(state[0], held.counts, work, rows)
    live = work.is_live & (numbers < self.settings.view.num_groups)

    def group(x: Any, xs: Any) -> tuple[Any, Any]:
      return self._group(x, row_args, held.common, *xs)

    x, (made, changed) = jax.lax.scan(
      group,
      x,
      (groups, caches, keys, starts, live),
      unroll=live.shape[0] if self.settings.unroll else 1,
    )
    if self.writes and caches:
      kept: Any = traverse_util.flatten_dict(
        cache_rows.read({}, state[1], work, rows)
      )
      state = (
        cache_rows.write(state[0], changed, work, rows),
        cache_rows.write(state[1], _chosen(live, changed, kept), work, rows),
      )
    return (x, row_args), state, made

  def _group(
    self,
    x: Any,
    row_args: Sequence[jax.Array],
    common: Any,
    group: Any,
    cache: Any,
    keys: Any,
    start: jax.Array | None,
    live: jax.Array,
  ) -> tuple[Any, Any]:
    """Returns the rows after one group, and what it made and cached."""
    used = live_gradients.only_if(live, (x, row_args, common, group))
    used_x, row_args, (shared_parameters, whole), group = used
    y, made = self.call(
      {**group, _CACHE: cache} if cache else group,
      shared_parameters,
      self.keys.of(keys),
      start,
      used_x,
      self.split.join(row_args, whole),
    )
    made = dict(made)
    changed = cache
    if cache:
      # Also where a layer did not live, each cache has a value.
      changed = _where(live, made.pop(_CACHE, cache), cache)
    return _where(live, y, x), (made, changed)


class _ArgumentSplit:
  """Which arrays of the arguments have rows, and which are given whole."""

  def __init__(self, args: Sequence[Any], batch: int) -> None:
    leaves, self._treedef = jax.tree.flatten(tuple(args))
    self._has_rows = [x.ndim > 0 and x.shape[0] == batch for x in leaves]
    pairs = list(zip(leaves, self._has_rows, strict=True))
    self.with_rows = [x for x, has_rows in pairs if has_rows]
    self.whole = [x for x, has_rows in pairs if not has_rows]

  def join(
    self, with_rows: Sequence[jax.Array], whole: Sequence[jax.Array]
  ) -> tuple[Any, ...]:
    """Returns arguments of these arrays."""
    rows, others = iter(with_rows), iter(whole)
    leaves = [next(rows if has else others) for has in self._has_rows]
    return jax.tree.unflatten(self._treedef, leaves)


def _parted(found: Any, specs: variables.Specs) -> tuple[Any, Any]:
  """Returns variables without, and those that gradients overwrite."""
  flat_specs: dict[Any, Any] = traverse_util.flatten_dict(dict(specs))
  rule = variables.UpdateRule.OVERWRITE_WITH_GRADIENT
  over = {p for p, spec in flat_specs.items() if spec.update is rule}
  flat: dict[Any, Any] = traverse_util.flatten_dict(found)
  kept = {path: x for path, x in flat.items() if path not in over}
  overwritten = {path: x for path, x in flat.items() if path in over}
  unflatten = traverse_util.unflatten_dict
  return unflatten(kept), unflatten(overwritten)


def _per_tick(
  overwritten: Any, specs: variables.Specs, settings: Settings
) -> Any:
  """Returns a copy for each tick, [ticks,P,R,K,...]."""
  if not overwritten:
    return {}
  flat: dict[Any, Any] = traverse_util.flatten_dict(dict(specs))
  own = traverse_util.flatten_dict(overwritten)
  copies = live_gradients.fanned_out(
    overwritten,
    traverse_util.unflatten_dict({path: flat[path] for path in own}),
    copies=settings.table.num_ticks,
  )
  return jax.vmap(settings.view.split)(copies)


def _joined(first: Any, second: Any) -> Any:
  """Returns the variables of two trees."""
  if not second:
    return first
  return traverse_util.unflatten_dict(
    {**traverse_util.flatten_dict(first), **traverse_util.flatten_dict(second)}
  )


def _copies(tree: Any, number: int) -> Any:
  return jax.tree.map(
    lambda x: jnp.broadcast_to(x[None], (number, *x.shape)), tree
  )


def _where(live: jax.Array, new: Any, old: Any) -> Any:
  return jax.tree.map(lambda a, b: jnp.where(live, a, b), new, old)


def _chosen(
  live: jax.Array, changed: Any, kept: Mapping[Any, jax.Array]
) -> Any:
  """Returns what changed [K] of the paths of `kept`, where layers lived."""
  flat: dict[Any, Any] = traverse_util.flatten_dict(changed)
  return traverse_util.unflatten_dict(
    {path: jnp.where(live, flat[path], old) for path, old in kept.items()}
  )
