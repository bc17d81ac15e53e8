"""Checks of configurations: validation and comparison, without computing.

`validate` traces the train step on devices of the CPU. `compare` classifies
each difference by `runner.configuration.comparison`, and compares the
lowered train steps of both configurations on one device.
"""

from collections.abc import Sequence
import dataclasses
import math
import os

import fiddle as fdl
import jax

from paxon.runner import files, run_dir, units, user_error
from paxon.runner.configuration import comparison, dump, overrides, resolving
from paxon.runner.training import (
  compiled_steps,
  memory_fit,
  preflight,
  run_files,
)
from paxon.runner.training import session as session_lib
from paxon.sharding import mesh as meshes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Side:
  """One of the two configurations.

  Attributes:
    text: The configuration as a dump.
    config: The configuration to build a program from, or None.
    missing: Why `config` is None.
  """

  text: str
  config: fdl.Buildable | None = None
  missing: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Found:
  """Lines of output, and whether anything differs."""

  lines: tuple[str, ...]
  differs: bool


def side(
  name: str, given: Sequence[overrides.Override], packages: Sequence[str]
) -> Side:
  """Returns the configuration of an experiment or of a run.

  Args:
    name: An experiment, or a run directory.
    given: Overrides, for an experiment only.
    packages: Packages to search for names close to a misspelled one.

  Raises:
    user_error.UserError: Neither exists, or an override is invalid.
  """
  folder = run_dir.resolve(name, os.environ)
  files.check_store(folder)
  if not (folder / run_dir.CONFIG_TEXT).exists():
    if "/" in name or folder.is_dir():
      raise user_error.UserError(
        f"{name} is not a run directory: it has no {run_dir.CONFIG_TEXT}."
      )
    config = resolving.resolve(name, given, packages=packages).config
    return Side(text=dump.to_text(config), config=config)
  if given:
    raise user_error.UserError(
      f"{given[0]} follows the run {name}, which takes no overrides."
    )
  text = (folder / run_dir.CONFIG_TEXT).read_text()
  settings = run_files.read_settings(folder)
  if settings is None:
    return Side(text=text, missing=f"{name} does not record its command line")
  try:
    config = resolving.resolve(
      settings.experiment, settings.overrides, packages=packages
    ).config
  except user_error.UserError as error:
    return Side(text=text, missing=f"{name} cannot be built again ({error})")
  if dump.to_text(config) != text:
    return Side(
      text=text, missing=f"{name} was made by another version of its experiment"
    )
  return Side(text=text, config=config)


def compare(a: Side, b: Side) -> Found:
  """Returns the differences, grouped by their effect.

  Raises:
    user_error.UserError: One of the two cannot run.
  """
  found = comparison.differences(a.text, b.text)
  if not found:
    return Found(lines=("equal",), differs=False)
  lines = [_program_line(a, b, found)]
  for effect, group in comparison.grouped(found).items():
    lines += ["", effect.value, *(f"  {each}" for each in group)]
  return Found(lines=tuple(lines), differs=True)


def _program_line(
  a: Side, b: Side, found: Sequence[comparison.Difference]
) -> str:
  missing = a.missing or b.missing
  if a.config is None or b.config is None:
    return f"program: not compared; {missing}"
  if _step_text(a.config) == _step_text(b.config):
    return "program: the same training step, apart from the mesh"
  gravest = min(list(comparison.Effect).index(e.rule.effect) for e in found)
  line = "program: the training step differs"
  if gravest > list(comparison.Effect).index(comparison.Effect.THROUGHPUT):
    # By the table no trained value differs, but the program does.
    line += ", though no field below should change it: assume other numerics"
  return line


def _step_text(config: fdl.Buildable) -> str:
  """Returns the lowered training step of a configuration on one device."""
  job = dataclasses.replace(resolving.build(config), mesh="")
  with resolving.user_errors(config):
    session = session_lib.open_session(job, devices=jax.devices("cpu")[:1])
    traced = compiled_steps.trace_train_step(session)
  return session.layout.lower(traced).as_text()


def validate(config: fdl.Buildable, num_devices: int | None) -> list[str]:
  """Validates a configuration and returns lines about its size.

  Builds all components, derives shapes, axes and shardings of the variables,
  and traces the training step and the generation of samples, on any number of
  CPU devices.

  Args:
    config: The root.
    num_devices: Number of devices; None for the size of the mesh, with 1 for
      -1.

  Raises:
    user_error.UserError: The configuration cannot run.
  """
  job = resolving.build(config)
  number = num_devices or _smallest(meshes.MeshSpec.parse(job.mesh))
  try:
    jax.config.update("jax_num_cpu_devices", number)
    devices = jax.devices("cpu")[:number]
  except RuntimeError:  # JAX is initialized, in a test or a notebook.
    devices = jax.devices("cpu")[:number]
  if len(devices) < number:
    raise user_error.UserError(
      f"The mesh {job.mesh!r} needs {number} devices, but this process started"
      f" with {len(devices)}; use a new process."
    )
  with resolving.user_errors(config):
    session = session_lib.open_session(job, devices=devices)
    preflight.trace(session)
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
  words = units.size
  return [
    f"trainable parameters: {trainable:,} in {len(specs)} variables",
    f"state: {words(whole)} in all, {words(memory_fit.shard_bytes(state))} on"
    f" each of {mesh.size} devices ({', '.join(axes) or 'replicated'})",
    f"batch: {' x '.join(map(str, rows))},"
    f" {words(memory_fit.shard_bytes(batch))} on each device",
    f"steps: {session.job.num_train_steps:,}",
  ]
