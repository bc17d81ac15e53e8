"""Checks of a job before anything is computed or written.

Every program of the run is traced: the training step, and sample generation at
the end, where an error would come after hours. Tracing takes about a second,
and the step is compiled from this trace.
"""

import math
import os
import platform
import shlex

from etils import epath
import jax

import paxon
from paxon.inputs import base_input
from paxon.learners import privacy_accounting
from paxon.runner import job as job_lib
from paxon.runner import run_dir as run_dirs
from paxon.runner import user_error
from paxon.runner.generation import generation_limits, generation_program
from paxon.runner.monitoring import stages
from paxon.runner.session import (
  batch_padding,
  compiled_steps,
  kernel_checks,
  memory_fit,
  prefetch,
)
from paxon.runner.session import session as session_lib
from paxon.sharding import axes, lint


def check(session: session_lib.Session) -> jax.stages.Traced:
  """Returns the traced training step of a job that can run.

  Raises:
    UserError: The job needs more memory than there is, or the data of a split
      cannot be read or has no target.
    ValueError: A module rejected its configuration, or the training input has
      nothing to read; the caller adds its configuration path
      (`configuration.resolving.explain_error`).
  """
  session.job.train_input.check_readable()
  _check_vocabulary(session)
  generation_limits.check_splits(session.job)
  kernel_checks.check_attention(
    session.job,
    platform=kernel_checks.get_platform(session.layout.mesh).value,
    where="this machine's devices",
  )
  check_memory(session)
  with stages.heartbeat("reading the first batches"):
    prefetch.check_data(session.job.inputs)
  step, generation = trace(session)
  advice = "make the batch, length or model smaller"
  _check_loops(session, step, "activations", advice)
  if generation is not None:
    advice = "reduce generation.max_new_tokens"
    _check_loops(session, generation, "cache", advice)
  return step


def _check_vocabulary(session: session_lib.Session) -> None:
  """Raises if the first batch of a split has ids outside the vocabulary.

  Only if there may be any: those that never occur need no embedding.
  """
  job, size = session.job, session.vocab_size
  for split, source in job.inputs.items():
    required = source.required_vocab_size()
    if size is None or required is None or required <= size:
      continue
    position = source.get_state()
    try:
      session.check_ids(source.get_next())
    except user_error.UserError as error:
      raise user_error.UserError(f"The split {split!r}: {error}") from error
    except Exception as error:
      if not base_input.is_end(error):
        raise
    finally:
      source.set_state(position)


def warnings(session: session_lib.Session) -> list[str]:
  """Returns a sentence for each array that could be sharded but is not.

  There is one, too, for sizes that are padded.
  """
  found = lint.check(
    session.specs,
    batch={name: value.shape for name, value in session.batch.items()},
    mesh=dict(session.layout.mesh.shape),
    rules=session.layout.rules,
    partitioner=session.layout.partitioner,
  )
  found += batch_padding.find_padding(
    session.batch_size, session.layout.shards(axes.BATCH)
  )
  return [finding.message for finding in found]


def summary(session: session_lib.Session, run_dir: epath.Path) -> list[str]:
  """Returns the first lines of a training run."""
  job, mesh = session.job, session.layout.mesh
  source = job.train_input
  sequences, unit = source.global_batch_size, source.unit
  count = sequences * source.length
  batch = f"{count:,} {unit}"
  if unit == "tokens":
    batch = f"{sequences:,} sequences x {source.length:,} = {batch}"
  for last, size in reversed(job.batch_ramp):
    batch = f"{size:,} sequences to step {last:,}, {batch}"
  seen = job.count_sequences() * source.length
  axes_of_mesh = [f"{k}={n}" for k, n in mesh.shape.items() if n > 1]
  where = f"mesh {','.join(axes_of_mesh)}" if axes_of_mesh else "no sharding"
  if jax.process_count() > 1:
    where = f"{jax.process_count()} processes, {where}"
  trained = session.num_parameters()
  total = sum(
    math.prod(spec.shape) for spec in jax.tree.leaves(session.specs["params"])
  )
  frozen = f", {trained:,} of them trained" if trained != total else ""
  return [
    f"versions: paxon {paxon.__version__}, jax {jax.__version__}, Python"
    f" {platform.python_version()}",
    f"model: {total:,} parameters{frozen}",
    *job.notes,
    f"devices: {mesh.size} x {mesh.devices.flat[0].device_kind}, {where}",
    f"batch: {batch}; {job.num_train_steps:,} steps = {seen:,} {unit}",
    "metrics: tensorboard --logdir="
    + shlex.quote(os.fspath(run_dir / run_dirs.EVENTS)),
    *describe_privacy(job, job.num_train_steps),
    f"live curves: paxon-watch {shlex.quote(os.fspath(run_dir))}",
  ]


def describe_privacy(job: job_lib.Job, num_steps: int) -> list[str]:
  """Returns a line with the epsilon after some steps; none without privacy.

  Raises:
    UserError: It cannot be computed.
  """
  settings = job.task.learner.privacy
  if settings is None:
    return []
  try:
    return [
      privacy_accounting.describe(
        settings,
        batch_size=job.train_input.global_batch_size,
        num_steps=num_steps,
      )
    ]
  except (ValueError, ImportError) as error:
    raise user_error.UserError(f"task.learner.privacy: {error}") from error


def trace(
  session: session_lib.Session,
) -> tuple[jax.stages.Traced, jax.stages.Traced | None]:
  """Returns the traced training step and sample generation, if there is any."""
  step = compiled_steps.trace_train_step(session)
  if session.job.generation is None or generation_program.generation_problem(
    session.job
  ):
    return step, None
  return step, generation_program.trace(session)


def check_memory(session: session_lib.Session) -> None:
  """Raises UserError if the state and a batch do not fit into the devices."""
  needs = {
    "state (parameters and optimizer)": memory_fit.shard_bytes(
      session.abstract_state()
    ),
    "data": memory_fit.shard_bytes(dict(session.batch)),
  }
  memory_fit.check(
    needs,
    advice=(
      "make the model or the batch smaller, or spread them over more devices"
    ),
  )


def _check_loops(
  session: session_lib.Session,
  traced: jax.stages.Traced,
  name: str,
  advice: str,
) -> None:
  # At best sharded over all devices.
  size = memory_fit.loop_bytes(traced.jaxpr) // session.layout.mesh.size
  memory_fit.check({name: size}, advice=advice)
