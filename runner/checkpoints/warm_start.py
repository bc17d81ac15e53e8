"""Execution and summary of a warm start's plan."""

from collections.abc import Callable, Iterable, Mapping
import math
import os
import types
from typing import Any
import zlib

import jax
import jax.numpy as jnp

from paxon.learners import parameter_average
from paxon.runner import run_dir, user_error
from paxon.runner.checkpoints import (
  checkpointer,
  stored_checkpoint,
  text_table,
  unreadable,
  warm_start_plan,
)

_COUNT = "average/count"
_LEARNER = "task.learner"
_MAX_GROUPS = 8
_NONE: Mapping[str, Any] = types.MappingProxyType({})


def read(
  plan: warm_start_plan.Plan,
  *,
  shardings: Mapping[str, jax.sharding.Sharding],
  convert: Mapping[str, Callable[[jax.Array], dict[str, jax.Array]]] = _NONE,
) -> dict[str, jax.Array]:
  """Verifies the checkpoint and returns new arrays by the target's name.

  Args:
    plan: Variables to read.
    shardings: Of all targets, by name.
    convert: Functions of targets that are read one after the other; each
      returns the arrays, by name, that replace it.

  Raises:
    user_error.UserError: The checkpoint is damaged, or the settings of its
      average are unknown.
    unreadable.DeletedCheckpointError: Its run has deleted it meanwhile.
  """
  try:
    with checkpointer.Checkpointer(
      plan.checkpoint.folder, read_only=True
    ) as checkpoints:
      checkpoints.verify(plan.checkpoint.step)
    sources = {
      name: _source_sharding(plan, name, sharding)
      for name, sharding in shardings.items()
    }
    apart = {} if plan.averages else convert
    if plan.averages:
      values = _read_averaged(plan, sources)
    else:
      reads = {k: v for k, v in plan.reads.items() if k not in apart}
      values = _read_all(plan, reads, sources)
  except unreadable.DeletedCheckpointError:
    raise
  except checkpointer.DamagedCheckpointError as error:
    raise user_error.UserError(
      f"{error}; choose another WarmStart.step, or copy the files again."
    ) from error
  expanded = {*plan.entries, *plan.repeats}
  for name in expanded & values.keys():
    values[name] = _expand(plan, name, values[name], shardings[name])
  for name in convert.keys() & plan.reads.keys():
    if name in apart:
      one = _read_all(plan, {name: plan.reads[name]}, sources)[name]
      if name in expanded:
        one = _expand(plan, name, one, shardings[name])
    else:
      one = values.pop(name)
    values |= convert[name](one)
  return values


def summarize(plan: warm_start_plan.Plan) -> list[str]:
  """Returns counts, and the names that are not read under their own name."""
  matching, start = plan.matching, plan.start
  every = [n for n in plan.targets if stored_checkpoint.is_variable(n)]
  shown = [
    f"warm start from step {plan.checkpoint.step} of"
    f" {os.fspath(plan.checkpoint.folder)}",
    _line(
      "read",
      f"{len(matching.sources)} of {len(every)} variables,"
      f" {_count(plan, matching.sources):,} of {_count(plan, every):,} values"
      + (", averaged" if start.averaged else ""),
    ),
  ]
  for axis in start.repeated_axes:
    names = [
      name
      for name, repeated in plan.repeats.items()
      if axis in [plan.targets[name].axes[i] for i in repeated]
    ]
    noise = f", noise {start.repeat_noise:g}" if start.repeat_noise else ""
    shown.append(_line("", f"copies along {axis}: {len(names)}{noise}"))
  for (expression, template), count in zip(
    start.patterns, matching.uses, strict=True
  ):
    source = "initial values" if template is None else template
    shown.append(_line("", f"{expression} <- {source}: {count}"))
  shown.append(_line("training", _summarize_state(plan)))
  shown += _groups("initial", matching.initial, every)
  shown += _groups("missing", matching.absent, every)
  others = [n for n in plan.targets if not stored_checkpoint.is_variable(n)]
  shown += _groups("fresh", plan.kept, others)
  shown += _groups("unused", matching.unused, plan.checkpoint.variables())
  return shown


def format_table(plan: warm_start_plan.Plan) -> list[str]:
  """Returns a line for each target and for each unused source.

  Targets are variables, and the training state if it is read too.
  """
  rows = []
  for name, spec in plan.targets.items():
    is_variable = stored_checkpoint.is_variable(name)
    if not (is_variable or plan.start.training_state):
      continue
    shape = text_table.format_shape(spec.shape)
    source = plan.averages.get(name, plan.reads.get(name))
    if source is None:
      why = "missing" if name in plan.matching.absent else "initial"
      rows.append((why, name, shape, ""))
    else:
      if name in plan.entries:
        source += warm_start_plan.format_entries(plan.entries[name])
      renamed = "" if source == name else f"<- {source}"
      rows.append(("read", name, shape, renamed))
  rows += [("unused", "", "", f"<- {name}") for name in plan.matching.unused]
  return text_table.format_lines(rows)


def _read_averaged(
  plan: warm_start_plan.Plan, shardings: Mapping[str, jax.sharding.Sharding]
) -> dict[str, jax.Array]:
  average = _find_average(plan.checkpoint)
  counts = stored_checkpoint.read_numpy(plan.checkpoint, [_COUNT])
  count = int(counts[_COUNT])
  if average.debias and not count:
    # A debiased average is undefined before its first update.
    return _read_all(plan, plan.reads, shardings)
  values = _read_all(plan, {**plan.reads, **plan.averages}, shardings)
  for name in plan.averages:
    values[name] = _averaged_value(plan, name, values[name], average, count)
  return values


def _read_all(
  plan: warm_start_plan.Plan,
  sources: Mapping[str, str],
  shardings: Mapping[str, jax.sharding.Sharding],
) -> dict[str, jax.Array]:
  arrays: dict[str, jax.Array] = {}
  pending = dict(sources)
  while pending:
    # A source of two targets is read twice: each needs a separate buffer.
    once = {source: name for name, source in reversed(pending.items())}
    wanted = {}
    for source, name in once.items():
      stored = plan.checkpoint.arrays[source]
      is_average = plan.averages.get(name) == source
      dtype = stored.dtype if is_average else plan.targets[name].dtype
      wanted[source] = jax.ShapeDtypeStruct(
        stored.shape, jnp.dtype(dtype), sharding=shardings[name]
      )
    found = stored_checkpoint.read_arrays(plan.checkpoint, wanted)
    for source, name in once.items():
      arrays[name] = found[source]
      del pending[name]
  return arrays


def _source_sharding(
  plan: warm_start_plan.Plan, name: str, sharding: jax.sharding.Sharding
) -> jax.sharding.Sharding:
  """Returns the sharding in which the source of a target is read."""
  entries, repeats = plan.entries.get(name), plan.repeats.get(name, ())
  if entries is None and not repeats:
    return sharding
  assert isinstance(sharding, jax.sharding.NamedSharding)
  spec = [*sharding.spec, *[None] * len(plan.targets[name].shape)]
  spec = spec[: len(plan.targets[name].shape)]
  spec = [part for axis, part in enumerate(spec) if axis not in repeats]
  if entries is not None:
    # All entries are read on every device that takes some of them.
    spec = [None, *(spec if isinstance(entries, int) else spec[1:])]
  return jax.sharding.NamedSharding(
    sharding.mesh, jax.sharding.PartitionSpec(*spec)
  )


def _expand(
  plan: warm_start_plan.Plan,
  name: str,
  value: jax.Array,
  sharding: jax.sharding.Sharding,
) -> jax.Array:
  """Takes entries of a source and repeats it along the axes that it lacks."""
  spec, repeats = plan.targets[name], plan.repeats.get(name, ())
  share = plan.start.repeat_noise
  if not (repeats and stored_checkpoint.is_variable(name)):
    share = 0.0
  # Of the name, so that noise does not depend on other variables.
  seed = jax.random.fold_in(
    jax.random.key(plan.start.repeat_seed), zlib.crc32(name.encode())
  )

  def expand(source: jax.Array, key: jax.Array) -> jax.Array:
    if name in plan.entries:
      source = source[plan.entries[name]]
    copies = jnp.broadcast_to(jnp.expand_dims(source, repeats), spec.shape)
    if not (share and jnp.issubdtype(copies.dtype, jnp.floating)):
      return copies
    noise = jax.random.normal(key, copies.shape, jnp.float32)
    size = jnp.sqrt(jnp.mean(jnp.square(source.astype(jnp.float32))))
    return (copies.astype(jnp.float32) + share * size * noise).astype(
      copies.dtype
    )

  return jax.jit(expand, out_shardings=sharding)(value, seed)


def _find_average(
  checkpoint: stored_checkpoint.StoredCheckpoint,
) -> parameter_average.ParameterAverage:
  """Returns the average of the source's learner, from its configuration."""
  config = stored_checkpoint.read_config(checkpoint.run_path) or {}
  try:
    return parameter_average.ParameterAverage(
      decay=float(config[f"{_LEARNER}.average.decay"]),
      debias=config[f"{_LEARNER}.average.debias"] == "True",
    )
  except (KeyError, ValueError) as error:
    raise user_error.UserError(
      "WarmStart.averaged is set, but the settings of the average are unknown:"
      f" {checkpoint.run_path / run_dir.CONFIG_TEXT} is missing or describes"
      " none. Keep it next to the directory of checkpoints."
    ) from error


def _averaged_value(
  plan: warm_start_plan.Plan,
  name: str,
  value: jax.Array,
  average: parameter_average.ParameterAverage,
  count: int,
) -> jax.Array:
  """Returns the value used in evaluation, in the target's dtype."""
  stored = plan.checkpoint.arrays[plan.reads[name]]
  state = parameter_average.AverageState(
    count=jnp.asarray(count, jnp.int32), average={name: value}
  )
  # Only the dtype of the parameters matters, as the count is positive.
  params = {name: value.astype(stored.dtype)}
  found = average.values(state, params)[name]
  return found.astype(plan.targets[name].dtype)


def _summarize_state(plan: warm_start_plan.Plan) -> str:
  if not plan.start.training_state:
    return "starts at step 0 with a new optimizer state"
  variables = plan.matching.sources
  others = [name for name in plan.reads if name not in variables]
  first = plan.checkpoint.step if "step" in others else 0
  return f"starts at step {first}; {len(others)} non-variable arrays read"


def _groups(kind: str, names: Iterable[str], among: Iterable[str]) -> list[str]:
  groups = text_table.collapse_names(names, among=among)
  if not groups:
    return []
  shown = [
    group.label + (f" ({len(group.names)})" if len(group.names) > 1 else "")
    for group in groups[:_MAX_GROUPS]
  ]
  rest = sum(len(group.names) for group in groups[_MAX_GROUPS:])
  if rest:
    shown.append(f"and {rest} more")
  return [_line(kind, shown[0]), *(_line("", text) for text in shown[1:])]


def _count(plan: warm_start_plan.Plan, names: Iterable[str]) -> int:
  return sum(math.prod(plan.targets[name].shape) for name in names)


def _line(kind: str, text: str) -> str:
  return f"  {kind:<10}{text}"
