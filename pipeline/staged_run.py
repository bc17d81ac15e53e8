"""Forward pass of a batch through the stages of a pipelined stack.

Letters: G groups of layers, P stages, R repeats, K groups of a stage in a
repeat, M microbatches.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
from typing import Any, NamedTuple

from flax import linen as nn
from flax import traverse_util
import jax
import jax.numpy as jnp

from paxon.layers import remat
from paxon.layers.stacks import stacked_cache
from paxon.pipeline import (
  layer_calls,
  layer_state,
  shifting_buffer,
  stage_sharding,
  stages,
)
from paxon.sharding import variables

_CACHE = stacked_cache.COLLECTION


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
  """How a batch passes through the stages.

  Attributes:
    microbatches: Which sequences are in which microbatch.
    layers: Which groups of layers are on which stage.
    ticks: Which microbatch a stage computes at each tick.
    period: Layers of a group.
    batch: Sequences of the batch.
    streaming: Whether each stage holds a share of the microbatches.
    unroll: Whether the groups of a stage are compiled one by one.
    iteration_policy: Values that a tick saves for the backward pass.
  """

  microbatches: stages.Microbatches
  layers: stages.StageLayers
  ticks: stages.Ticks
  period: int
  batch: int
  streaming: bool
  unroll: bool
  iteration_policy: remat.Policy | None


class _Constants(NamedTuple):
  """Per-stage constants: arrays [P,...], or of one stage.

  Attributes:
    stage: Index of the stage, int32.
    variables: Variables of its groups by collection, [R,K,...].
    keys: Data of random keys, [R,K,M,...].
    groups: Indices of its groups, [R,K].
    starts: Indices of the groups' first layers, [R,K], if layers receive them.
    common: Parameters of shared modules, and arguments without a batch axis.
    unbatched: Cache variables without a batch axis before the step, [R,K].
  """

  stage: jax.Array
  variables: Any
  keys: Any
  groups: jax.Array
  starts: jax.Array | None
  common: Any
  unbatched: layer_state.FlatCaches


# Caches of a decoding step: with a batch axis, and without after the step.
_State = tuple[layer_state.FlatCaches, layer_state.FlatCaches]


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
    module: The bound stack; its mutable collections are updated.
    x: Input of the first layer, [batch,...].
    args: Other arguments of every layer.
    starts: Index of each group's first layer [G], if layers receive it.
    call: `(block, x, index, *args) -> x`.
    specs: Of the variables that are replaced or overwritten, by collection.
    settings: How the batch passes through the stages.
  """
  layers = settings.layers
  found = layer_calls.stacked_variables(module)
  caches = found.pop(_CACHE, {})
  plain, overwritten = _split_overwritten(found, specs)
  split = _ArgumentSplit(args, settings.batch)
  keys = _make_keys(module, settings)
  batched, unbatched = layer_state.split_caches(
    layers.split(caches), settings.microbatches, batch=settings.batch
  )
  common = (layer_calls.shared_parameters(module), split.unbatched)
  constants = _Constants(
    stage=jnp.arange(layers.num_stages, dtype=jnp.int32),
    variables=layers.split(plain),
    keys=layers.split(
      jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), dict(keys.data))
    ),
    groups=layers.group_numbers(),
    starts=None if starts is None else layers.split(starts),
    common=_copy_per_stage(common, layers.num_stages),
    unbatched=unbatched,
  )
  stage = _Stage(
    call=layer_calls.GroupCall(
      module.blocks, call, module.path, layer_calls.mutable_filter(module)
    ),
    keys=keys,
    split=split,
    settings=settings,
    writes=module.is_mutable_collection(_CACHE),
  )
  x, state, made = _run_ticks(
    stage,
    constants,
    (x, split.batched),
    state=(batched, unbatched),
    per_tick=_copy_per_tick(overwritten, specs, settings),
  )
  if caches and stage.writes:
    merged = layers.merge(layer_state.merge_caches(*state))
    layer_calls.put_variables(module, {_CACHE: merged})
  if jax.tree.leaves(made):
    _collect(module, made, old=plain, specs=specs, settings=settings)
  return x


def _make_keys(module: nn.Module, settings: Settings) -> layer_calls.KeyData:
  """Returns random keys for each microbatch and group, [M,G]."""
  num_microbatches = settings.ticks.num_microbatches
  return layer_calls.to_key_data(
    {
      name: layer_calls.split_groups(
        layer_calls.fold_microbatches(key, num_microbatches),
        settings.layers.num_groups,
      )
      for name, key in layer_calls.module_keys(module).items()
    }
  )


def _copy_per_stage(common: Any, num_stages: int) -> Any:
  """Returns a copy for each stage, [P,...], and no two on a device.

  Gradients of the copies are added once, after the loop.
  """
  return stage_sharding.shard(
    jax.tree.map(
      lambda x: jnp.broadcast_to(x[None], (num_stages, *x.shape)), common
    )
  )


def _collect(
  module: nn.Module,
  made: Any,
  *,
  old: Any,
  specs: variables.Specs,
  settings: Settings,
) -> None:
  """Sets the collections made in each tick, arrays [ticks,P,K,...]."""
  made = settings.ticks.gather_microbatches(made)
  made = jax.tree.map(lambda x: jnp.moveaxis(x, 2, 0), made)
  combined = layer_state.combine_microbatches(
    jax.vmap(settings.layers.merge)(made),
    old=old,
    specs=specs,
    microbatches=settings.microbatches,
    size=settings.batch // settings.ticks.num_microbatches,
    period=settings.period,
  )
  layer_calls.put_variables(module, combined)


def _run_ticks(
  stage: "_Stage",
  constants: _Constants,
  inputs: Any,
  *,
  state: _State,
  per_tick: Any,
) -> tuple[Any, _State, Any]:
  """Runs the loop over ticks; `inputs` are `x` and the batched arguments."""
  settings = stage.settings
  axis = stage_sharding.find_stage_axis()

  def tick(
    t: jax.Array, given: Any, state: Any, own: Any, constants: _Constants
  ) -> Any:
    scope = settings.layers.live_scope(settings.ticks)
    with stage_sharding.inside_stage(), jax.named_scope(scope):
      mapped = jax.vmap(stage, in_axes=(None, 0, 0, 0, 0), spmd_axis_name=axis)
      return mapped(t, given, state, own, constants)

  if settings.iteration_policy is not None:
    tick = jax.checkpoint(
      tick, policy=settings.iteration_policy, prevent_cse=False
    )
  y, state, made = shifting_buffer.run(
    lambda t, given, state, own: tick(t, given, state, own, constants),
    settings.microbatches.split(inputs),
    ticks=settings.ticks,
    state=state,
    per_tick=per_tick,
    streaming=settings.streaming,
  )
  return stage_sharding.shard_batch(settings.microbatches.merge(y)), state, made


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Stage:
  """Computes one tick of one stage."""

  call: layer_calls.GroupCall
  keys: layer_calls.KeyData
  split: "_ArgumentSplit"
  settings: Settings
  writes: bool

  def __call__(
    self,
    tick: jax.Array,
    given: Any,
    state: _State,
    own: Any,
    constants: _Constants,
  ) -> tuple[Any, _State, Any]:
    """Returns the output, the caches, and the layers' collections, [K,...]."""
    microbatches = self.settings.microbatches
    work = self.settings.ticks.work(tick, constants.stage)
    x, batched_args = given
    groups, numbers, starts, keys = stages.select_repeat(
      (
        _merge(constants.variables, own),
        constants.groups,
        constants.starts,
        constants.keys,
      ),
      work.repeat,
    )
    keys = jax.tree.map(
      lambda x: jax.lax.dynamic_index_in_dim(
        x, work.microbatch, axis=1, keepdims=False
      ),
      keys,
    )
    caches = layer_state.read_caches(
      state[0], constants.unbatched, work, microbatches
    )
    live = work.is_live & (numbers < self.settings.layers.num_groups)

    def group(x: Any, xs: Any) -> tuple[Any, Any]:
      return self._group(x, batched_args, constants.common, *xs)

    x, (made, changed) = jax.lax.scan(
      group,
      x,
      (groups, caches, keys, starts, live),
      unroll=live.shape[0] if self.settings.unroll else 1,
    )
    if self.writes and caches:
      kept: Any = traverse_util.flatten_dict(
        layer_state.read_caches({}, state[1], work, microbatches)
      )
      state = (
        layer_state.write_caches(state[0], changed, work, microbatches),
        layer_state.write_caches(
          state[1], _select(live, changed, kept), work, microbatches
        ),
      )
    return (x, batched_args), state, made

  def _group(
    self,
    x: Any,
    batched_args: Sequence[jax.Array],
    common: Any,
    group: Any,
    cache: Any,
    keys: Any,
    start: jax.Array | None,
    live: jax.Array,
  ) -> tuple[Any, Any]:
    """Returns the output of one group, its collections and its caches."""
    used = layer_calls.mask_gradient(live, (x, batched_args, common, group))
    used_x, batched_args, (shared_parameters, unbatched), group = used
    y, made = self.call(
      {**group, _CACHE: cache} if cache else group,
      shared_parameters,
      self.keys.wrap(keys),
      start,
      used_x,
      self.split.join(batched_args, unbatched),
    )
    made = dict(made)
    changed = cache
    if cache:
      # In a bubble, too, each cache has a value.
      changed = _where(live, made.pop(_CACHE, cache), cache)
    return _where(live, y, x), (made, changed)


class _ArgumentSplit:
  """Splits arguments into arrays with and without a batch axis."""

  def __init__(self, args: Sequence[Any], batch: int) -> None:
    leaves, self._treedef = jax.tree.flatten(tuple(args))
    self._is_batched = [x.ndim > 0 and x.shape[0] == batch for x in leaves]
    pairs = list(zip(leaves, self._is_batched, strict=True))
    self.batched = [x for x, is_batched in pairs if is_batched]
    self.unbatched = [x for x, is_batched in pairs if not is_batched]

  def join(
    self, batched: Sequence[jax.Array], unbatched: Sequence[jax.Array]
  ) -> tuple[Any, ...]:
    """Returns the arguments with these arrays."""
    first, second = iter(batched), iter(unbatched)
    leaves = [next(first if is_b else second) for is_b in self._is_batched]
    return jax.tree.unflatten(self._treedef, leaves)


def _split_overwritten(found: Any, specs: variables.Specs) -> tuple[Any, Any]:
  """Splits off the variables that are overwritten with their gradient."""
  flat_specs: dict[Any, Any] = traverse_util.flatten_dict(dict(specs))
  rule = variables.UpdateRule.OVERWRITE_WITH_GRADIENT
  over = {p for p, spec in flat_specs.items() if spec.update is rule}
  flat: dict[Any, Any] = traverse_util.flatten_dict(found)
  kept = {path: x for path, x in flat.items() if path not in over}
  overwritten = {path: x for path, x in flat.items() if path in over}
  unflatten = traverse_util.unflatten_dict
  return unflatten(kept), unflatten(overwritten)


def _copy_per_tick(
  overwritten: Any, specs: variables.Specs, settings: Settings
) -> Any:
  """Returns a copy for each tick, [ticks,P,R,K,...]."""
  if not overwritten:
    return {}
  flat: dict[Any, Any] = traverse_util.flatten_dict(dict(specs))
  own = traverse_util.flatten_dict(overwritten)
  copies = layer_calls.copy_per_tick(
    overwritten,
    traverse_util.unflatten_dict({path: flat[path] for path in own}),
    copies=settings.ticks.num_ticks,
  )
  return jax.vmap(settings.layers.split)(copies)


def _merge(first: Any, second: Any) -> Any:
  """Returns the variables of two trees."""
  if not second:
    return first
  return traverse_util.unflatten_dict(
    {**traverse_util.flatten_dict(first), **traverse_util.flatten_dict(second)}
  )


def _where(live: jax.Array, new: Any, old: Any) -> Any:
  return jax.tree.map(lambda a, b: jnp.where(live, a, b), new, old)


def _select(
  live: jax.Array, changed: Any, kept: Mapping[Any, jax.Array]
) -> Any:
  """Returns the changes [K] of the paths of `kept`, where `live`."""
  flat: dict[Any, Any] = traverse_util.flatten_dict(changed)
  return traverse_util.unflatten_dict(
    {path: jnp.where(live, flat[path], old) for path, old in kept.items()}
  )
