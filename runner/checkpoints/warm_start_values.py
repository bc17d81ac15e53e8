"""Reads what a plan of a warm start says, each array where it will stay."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from paxon.learners import parameter_average
from paxon.runner import run_dir, user_error
from paxon.runner.checkpoints import (
  checkpointer,
  stored_arrays,
  stored_checkpoint,
  warm_start_plan,
)

_COUNT = "average/count"


def read(
  plan: warm_start_plan.Plan, *, shardings: Mapping[str, jax.sharding.Sharding]
) -> dict[str, jax.Array]:
  """Returns the new values by the target's name, each in memory of its own.

  The checksums of the checkpoint are compared first.

  Args:
    plan: What is read.
    shardings: Of all targets, by name.

  Raises:
    user_error.UserError: The checkpoint is damaged, or does not say how its
      average is to be used.
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


def _read_averaged(
  plan: warm_start_plan.Plan, shardings: Mapping[str, jax.sharding.Sharding]
) -> dict[str, jax.Array]:
  average = _average(plan.checkpoint)
  count = int(stored_arrays.read_numpy(plan.checkpoint, [_COUNT])[_COUNT])
  if average.debias and not count:
    # Before its first update a debiased average stands for nothing.
    return _read_all(plan, plan.reads, shardings)
  values = _read_all(plan, {**plan.reads, **plan.averages}, shardings)
  for name in plan.averages:
    values[name] = _evaluated(plan, name, values[name], average, count)
  return values


def _read_all(
  plan: warm_start_plan.Plan,
  sources: Mapping[str, str],
  shardings: Mapping[str, jax.sharding.Sharding],
) -> dict[str, jax.Array]:
  arrays: dict[str, jax.Array] = {}
  pending = dict(sources)
  while pending:
    # A source that fills two targets is read twice: each needs its own copy.
    once = {source: name for name, source in reversed(pending.items())}
    wanted = {}
    for source, name in once.items():
      stored = plan.checkpoint.arrays[source]
      is_average = plan.averages.get(name) == source
      dtype = stored.dtype if is_average else plan.targets[name].dtype
      wanted[source] = jax.ShapeDtypeStruct(
        stored.shape, jnp.dtype(dtype), sharding=shardings[name]
      )
    found = stored_arrays.read(plan.checkpoint, wanted)
    for source, name in once.items():
      arrays[name] = found[source]
      del pending[name]
  return arrays


def _average(
  checkpoint: stored_checkpoint.StoredCheckpoint,
) -> parameter_average.ParameterAverage:
  """Returns how the source's run averages, which its folder tells."""
  config = stored_checkpoint.read_config(checkpoint.run_path) or {}
  described = config.get("task", {}).get("learner", {}).get("average")
  try:
    return parameter_average.ParameterAverage(
      decay=described["decay"], debias=described["debias"]
    )
  except (TypeError, KeyError, ValueError) as error:
    raise user_error.UserError(
      "WarmStart.averaged is set, but how the average is to be used is not"
      f" known: {checkpoint.run_path / run_dir.CONFIG_JSON} is missing or"
      " describes none; keep it beside the folder of checkpoints."
    ) from error


def _evaluated(
  plan: warm_start_plan.Plan,
  name: str,
  value: jax.Array,
  average: parameter_average.ParameterAverage,
  count: int,
) -> jax.Array:
  """Returns what the source evaluates with, in the target's dtype."""
  stored = plan.checkpoint.arrays[plan.reads[name]]
  state = parameter_average.AverageState(
    count=jnp.asarray(count, jnp.int32), average={name: value}
  )
  # Only the dtype of the parameters matters, because there were updates.
  params = {name: value.astype(stored.dtype)}
  found = average.values(state, params)[name]
  return found.astype(plan.targets[name].dtype)
