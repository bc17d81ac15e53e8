"""Whether a configuration could run, found out on a CPU without computing."""

import math

import fiddle as fdl
import jax

from paxon.runner import user_error
from paxon.runner.configuration import refusals, resolving
from paxon.runner.training import memory_fit, preflight
from paxon.runner.training import session as session_lib
from paxon.sharding import mesh as meshes


def lines(config: fdl.Buildable, num_devices: int | None) -> list[str]:
  """Returns what a valid configuration amounts to.

  The parts are built, the variables' shapes, axes and shardings are derived,
  and the training step and the generation of samples are traced. The devices
  are imaginary ones of the CPU, so any number will do.

  Args:
    config: The root.
    num_devices: For how many devices; None is as many as the mesh names, with
      -1 standing for one.

  Raises:
    user_error.UserError: Something in it cannot run.
  """
  job = resolving.build(config)
  number = num_devices or _smallest(meshes.MeshSpec.parse(job.mesh))
  try:
    jax.config.update("jax_num_cpu_devices", number)
    devices = jax.devices("cpu")[:number]
  except RuntimeError:  # Already started, in a test or a notebook.
    devices = jax.devices("cpu")[:number]
  if len(devices) < number:
    raise user_error.UserError(
      f"The mesh {job.mesh!r} takes {number} devices, but this process has"
      f" started with {len(devices)}; use a new one."
    )
  try:
    session = session_lib.open_session(job, devices=devices)
    preflight.trace(session)
  except Exception as error:
    refusal = refusals.of(error, config)
    if refusal is None:
      raise
    raise user_error.UserError(refusal) from error
  return [*_facts(session), "ok"]


def _smallest(spec: meshes.MeshSpec) -> int:
  sizes = (*spec.ici.values(), *spec.dcn.values())
  return math.prod(size for size in sizes if size != -1)


def _facts(session: session_lib.Session) -> list[str]:
  specs = jax.tree.leaves(session.specs)
  trainable = sum(math.prod(spec.shape) for spec in specs if spec.trainable)
  state, batch = session.abstract_state(), dict(session.batch)
  whole = sum(
    math.prod(leaf.shape) * leaf.dtype.itemsize
    for leaf in jax.tree.leaves(state)
  )
  rows = next(iter(session.batch.values())).shape
  mesh = session.layout.mesh
  axes = [f"{axis}={size}" for axis, size in mesh.shape.items() if size > 1]
  words = memory_fit.format_bytes
  return [
    f"trainable parameters: {trainable:,} in {len(specs)} variables",
    f"state: {words(whole)} in all, {words(memory_fit.shard_bytes(state))} on"
    f" each of {mesh.size} devices ({', '.join(axes) or 'nothing is split'})",
    f"batch: {' x '.join(map(str, rows))},"
    f" {words(memory_fit.shard_bytes(batch))} on each device",
    f"steps: {session.job.num_train_steps:,}",
  ]
