"""Prints, validates and compares configurations.

  tools/configs dump EXP [--fdl....] [--json]
                      print the resolved configuration, with defaults
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
import sys
from typing import Final

from paxon.runner import user_error
from paxon.runner.configuration import overrides, resolving
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
  """Runs one command and returns its exit status.

  Args:
    argv: The command and its arguments.
  """
  return command_line.dispatch(argv, COMMANDS, help_text=lambda: __doc__ or "")


def _dump(argv: list[str]) -> int:
  as_json = "--json" in argv
  resolved = _resolve(_one(_operands([a for a in argv if a != "--json"])))
  from paxon.runner.configuration import dump

  write = dump.to_json if as_json else dump.to_text
  print(write(resolved.config), end="")
  return _SAME


def _validate(argv: list[str]) -> int:
  devices = [a for a in argv if a.startswith("--devices")]
  operand = _one(_operands([a for a in argv if a not in devices]))
  number = _number(devices[-1]) if devices else None
  resolved = _resolve(operand)
  from paxon.tools import configs_checks

  print("\n".join(configs_checks.validate(resolved.config, number)))
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
  from paxon.tools import configs_checks

  found = configs_checks.compare(
    *(configs_checks.side(o.name, o.given, _PACKAGES) for o in operands)
  )
  print(f"A: {operands[0]}\nB: {operands[1]}\n" + "\n".join(found.lines))
  return _DIFFERENT if found.differs else _SAME


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


COMMANDS: Final[command_line.Commands] = {
  "dump": _dump,
  "validate": _validate,
  "compare": _compare,
}


if __name__ == "__main__":
  command_line.run(main)
