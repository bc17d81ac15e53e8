"""Execution and summary of a warm start's plan."""

from collections.abc import Iterable, Mapping
import math
import os

import jax
import jax.numpy as jnp

from paxon.learners import parameter_average
from paxon.runner import run_dir, user_error
from paxon.runner.checkpoints import (
  checkpointer,
  stored_checkpoint,
  text_table,
  warm_start_plan,
)

_COUNT = "average/count"
_LEARNER = "task.learner"
_MAX_GROUPS = 8


def read(
  plan: warm_start_plan.Plan, *, shardings: Mapping[str, jax.sharding.Sharding]
) -> dict[str, jax.Array]:
  """Verifies the checkpoint and returns new arrays by the target's name.

  Raises:
    user_error.UserError: The checkpoint is damaged, or the settings of its
      average are unknown.
  """
  try:
    with checkpointer.Checkpointer(
      plan.checkpoint.folder, read_only=True
    ) as checkpoints:
      checkpoints.verify(plan.checkpoint.step)
    if plan.averages:
      return _read_averaged(plan, shardings)
    return _read_all(plan, plan.reads, shardings)
  except checkpointer.DamagedCheckpointError as error:
    raise user_error.UserError(
      f"{error}; choose another WarmStart.step, or copy the files again."
    ) from error


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
