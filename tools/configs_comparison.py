"""Two configurations side by side: what differs, and what that does.

Each difference is classed by the table of `runner/configuration/effects`. The
table is held against the truth: the training step of both is traced and
lowered on one CPU device, and its text tells whether the program differs.
"""

from collections.abc import Sequence
import dataclasses
import os

import fiddle as fdl
import jax

from paxon.runner import files, run_dir, user_error
from paxon.runner.configuration import (
  comparison,
  dump,
  effects,
  overrides,
  refusals,
  resolving,
)
from paxon.runner.training import compiled_steps, run_files
from paxon.runner.training import session as session_lib


@dataclasses.dataclass(frozen=True, kw_only=True)
class Side:
  """One of the two.

  Attributes:
    text: Its configuration as a dump.
    config: What a program can be made of, or None.
    missing: Why there is no `config`.
  """

  text: str
  config: fdl.Buildable | None = None
  missing: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Found:
  """What to print, and whether anything differs."""

  lines: tuple[str, ...]
  differs: bool


def side(
  name: str, given: Sequence[overrides.Override], packages: Sequence[str]
) -> Side:
  """Returns the configuration of an experiment or of a run.

  Args:
    name: An experiment, or the folder of a run.
    given: Overrides, for an experiment only.
    packages: Where names close to a misspelled one are sought.

  Raises:
    user_error.UserError: There is neither, or the overrides do not fit.
  """
  folder = run_dir.resolve(name, os.environ)
  files.check_store(folder)
  if not (folder / run_dir.CONFIG_TEXT).exists():
    if "/" in name or folder.is_dir():
      raise user_error.UserError(
        f"{name} is no folder of a run: it has no {run_dir.CONFIG_TEXT}."
      )
    config = resolving.resolve(name, given, packages=packages).config
    return Side(text=dump.to_text(config), config=config)
  if given:
    raise user_error.UserError(
      f"{given[0]} follows {name}, which is a run, and those are what they are."
    )
  text = (folder / run_dir.CONFIG_TEXT).read_text()
  settings = run_files.read_settings(folder)
  if settings is None:
    return Side(text=text, missing=f"{name} does not say how it was started")
  try:
    config = resolving.resolve(
      settings.experiment, settings.overrides, packages=packages
    ).config
  except user_error.UserError as error:
    return Side(text=text, missing=f"{name} cannot be made again ({error})")
  if dump.to_text(config) != text:
    return Side(
      text=text, missing=f"{name} was made by another version of its experiment"
    )
  return Side(text=text, config=config)


def compare(a: Side, b: Side) -> Found:
  """Returns the differences, by what they do.

  Raises:
    user_error.UserError: One of the two is no configuration that can run.
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
    return "program: the same training step, but for the mesh"
  gravest = min(list(effects.Effect).index(e.rule.effect) for e in found)
  line = "program: the training step differs"
  if gravest > list(effects.Effect).index(effects.Effect.THROUGHPUT):
    # The table says that nothing trained differs; the program disagrees.
    line += ", though no field below should change it: take it for numerics"
  return line


def _step_text(config: fdl.Buildable) -> str:
  """Returns the lowered training step of a configuration on one device."""
  job = dataclasses.replace(resolving.build(config), mesh="")
  try:
    session = session_lib.open_session(job, devices=jax.devices("cpu")[:1])
    traced = compiled_steps.trace_train_step(session)
  except Exception as error:
    refusal = refusals.of(error, config)
    if refusal is None:
      raise
    raise user_error.UserError(refusal) from error
  return session.layout.lower(traced).as_text()
