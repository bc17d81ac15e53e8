"""Prints, validates and compares configurations.

  tools/configs dump EXP [--fdl....] [--json]
                      print the resolved configuration, with defaults
  tools/configs code EXP [--fdl....]
                      print a Python program whose function `config_fixture`
                      makes the configuration, by Fiddle's code generation
  tools/configs picture EXP [--fdl....]
                      print a picture in the DOT language of Graphviz, for
                      `dot -Tsvg`
  tools/configs validate EXP [--fdl....] [--devices=N]
                      build it and trace the train step for N devices, without
                      computing
  tools/configs compare A [--fdl....] [B [--fdl....]]
                      list differences and their effects; exit status 1 if
                      there are any

EXP is an experiment, as for `--exp`. A and B are experiments or run
directories. Overrides apply to the name before them; a single experiment is
compared with and without its overrides. Usage errors and invalid configurations
print one line to stderr and exit with status 2.
"""

from collections.abc import Sequence
import dataclasses
import math
import os
import sys
from typing import Any, Final

import fiddle as fdl
from fiddle import daglish, graphviz
from fiddle.codegen import codegen
import jax
import numpy as np

from paxon.runner import files, run_dir, units, user_error
from paxon.runner.configuration import comparison, dump, overrides, resolving
from paxon.runner.session import compiled_steps, memory_fit, run_files
from paxon.runner.session import session as session_lib
from paxon.runner.training import preflight
from paxon.sharding import mesh as meshes
from paxon.tools import command_line

_PACKAGES = ("paxon.tasks",)
_SAME, _DIFFERENT = 0, 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Operand:
  """A name on the command line, with the overrides that follow it."""

  name: str
  given: tuple[overrides.Override, ...] = ()

  def __str__(self) -> str:
    return " ".join([self.name, *map(str, self.given)])


def main(argv: Sequence[str]) -> int:
  """Runs one command and returns its exit status."""
  return command_line.dispatch(argv, COMMANDS, help_text=lambda: __doc__ or "")


def _dump(argv: list[str]) -> int:
  as_json = "--json" in argv
  resolved = _resolve(_one(_operands([a for a in argv if a != "--json"])))
  write = dump.to_json if as_json else dump.to_text
  print(write(resolved.config), end="")
  return _SAME


def _code(argv: list[str]) -> int:
  config = _resolve(_one(_operands(argv))).config
  print(codegen.auto_config_codegen(_replace_dtypes(config)), end="")
  return _SAME


def _picture(argv: list[str]) -> int:
  print(graphviz.render(_resolve(_one(_operands(argv))).config).source, end="")
  return _SAME


def _replace_dtypes(config: fdl.Buildable) -> fdl.Buildable:
  """Returns a configuration with scalar types in place of dtypes.

  Fiddle generates no code for `numpy.dtype`.
  """

  def replace(value: Any, state: Any) -> Any:
    if isinstance(value, np.dtype):
      return value.type
    return state.map_children(value)

  return daglish.MemoizedTraversal.run(replace, config)


def _validate(argv: list[str]) -> int:
  devices = [a for a in argv if a.startswith("--devices")]
  operand = _one(_operands([a for a in argv if a not in devices]))
  number = _number(devices[-1]) if devices else None
  resolved = _resolve(operand)
  print("\n".join(_validate_lines(resolved.config, number)))
  return _SAME


def _compare(argv: list[str]) -> int:
  operands = _operands(argv)
  if len(operands) == 1 and operands[0].given:
    operands = [Operand(name=operands[0].name), operands[0]]
  if len(operands) != 2:
    raise user_error.UserError(
      f"compare takes two experiments or run directories, got {len(operands)};"
      " or one experiment with --fdl.NAME=VALUE."
    )
  a, b = (_side(o) for o in operands)
  found = comparison.differences(a.text, b.text)
  lines = [_program_line(a, b, found)] if found else ["equal"]
  for effect, group in comparison.group_by_effect(found).items():
    lines += ["", effect.value, *(f"  {each}" for each in group)]
  print(f"A: {operands[0]}\nB: {operands[1]}\n" + "\n".join(lines))
  return _DIFFERENT if found else _SAME


def _operands(argv: Sequence[str]) -> list[Operand]:
  """Returns the names with the overrides that follow each.

  Raises:
    user_error.UserError: There is another flag, or an override without a name.
  """
  found: list[Operand] = []
  for argument in argv:
    override = overrides.parse_argument(argument)
    if override is None and argument.startswith("-"):
      raise user_error.UserError(
        f"Unknown flag {argument.partition('=')[0]}; see --help."
      )
    if override is None:
      found.append(Operand(name=argument))
    elif not found:
      raise user_error.UserError(f"{override} must follow an experiment.")
    else:
      last = found[-1]
      found[-1] = Operand(name=last.name, given=(*last.given, override))
  return found


def _one(operands: Sequence[Operand]) -> Operand:
  if len(operands) != 1:
    raise user_error.UserError(
      f"Expected one experiment, such as tasks.lm.C; got {len(operands)}."
    )
  return operands[0]


def _number(argument: str) -> int:
  text = argument.partition("=")[2]
  if not (text.isascii() and text.isdigit() and 0 < int(text[:6]) < 10**5):
    raise user_error.UserError(f"{argument}: N must be between 1 and 99999.")
  return int(text)


def _resolve(operand: Operand) -> resolving.Resolved:
  resolved = resolving.resolve(operand.name, operand.given, packages=_PACKAGES)
  for note in resolved.notes:
    print(note, file=sys.stderr)
  return resolved


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Side:
  """One of the two configurations.

  Attributes:
    text: The configuration as a dump.
    config: The configuration to build a program from, or None.
    missing: Why `config` is None.
  """

  text: str
  config: fdl.Buildable | None = None
  missing: str = ""


def _side(operand: Operand) -> _Side:
  """Returns the configuration of an experiment or of a run."""
  name, given = operand.name, operand.given
  folder = run_dir.resolve(name, os.environ)
  files.check_store(folder)
  if not (folder / run_dir.CONFIG_TEXT).exists():
    if "/" in name or folder.is_dir():
      raise user_error.UserError(
        f"{name} is not a run directory: it has no {run_dir.CONFIG_TEXT}."
      )
    config = resolving.resolve(name, given, packages=_PACKAGES).config
    return _Side(text=dump.to_text(config), config=config)
  if given:
    raise user_error.UserError(
      f"{given[0]} follows the run {name}, which takes no overrides."
    )
  text = files.read_text(folder / run_dir.CONFIG_TEXT)
  settings = run_files.read_settings(folder)
  if settings is None:
    return _Side(text=text, missing=f"{name} does not record its command line")
  try:
    config = resolving.resolve(
      settings.experiment, settings.overrides, packages=_PACKAGES
    ).config
  except user_error.UserError as error:
    return _Side(text=text, missing=f"{name} cannot be built again ({error})")
  if dump.to_text(config) != text:
    return _Side(
      text=text, missing=f"{name} was made by another version of its experiment"
    )
  return _Side(text=text, config=config)


def _program_line(
  a: _Side, b: _Side, found: Sequence[comparison.Difference]
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


def _validate_lines(
  config: fdl.Buildable, num_devices: int | None
) -> list[str]:
  """Validates a configuration and returns lines about its size.

  Traces the training step and the generation of samples on CPU devices, by
  default as many as the mesh has, with 1 for -1.
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


COMMANDS: Final[command_line.Commands] = {
  "dump": _dump,
  "code": _code,
  "picture": _picture,
  "validate": _validate,
  "compare": _compare,
}


if __name__ == "__main__":
  command_line.run(main)
