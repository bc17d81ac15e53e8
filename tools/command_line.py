"""Shared code of command lines of the form `PROGRAM COMMAND ARGUMENTS`.

A usage error prints one line to stderr and exits with status 2; an interrupt
exits with status 130. A closed pipe, as by `head`, is not an error.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
import os
import re
import sys
from typing import Final, NoReturn

from etils import epath

from paxon.runner import interrupts, run_dir, user_error
from paxon.runner.checkpoints import stored_checkpoint, unreadable
from paxon.runner.hosts import terminal_output
from paxon.sharding import suggestions
from paxon.tools import console_scripts

# By name: takes the arguments after it, and returns the exit status.
Commands = Mapping[str, Callable[[list[str]], int]]

WRONG_USE: Final = 2
_MAX_DELETED = 20


def dispatch(
  argv: Sequence[str], commands: Commands, *, help_text: Callable[[], str]
) -> int:
  """Runs one command and returns its exit status.

  If a run has deleted the checkpoint that was read, the command starts again.
  """
  if not argv or argv[0] in ("-h", "--help", "help"):
    print(console_scripts.name_programs(help_text()))
    return 0 if argv else WRONG_USE
  name, *rest = argv
  try:
    if name not in commands:
      raise user_error.UserError(
        f"Unknown command {name!r}{suggestions.suggest(name, commands)}"
      )
    for _ in range(_MAX_DELETED):
      try:
        return commands[name](rest)
      except unreadable.DeletedCheckpointError as error:
        print(f"{user_error.one_line(error)}; starting again", file=sys.stderr)
    return commands[name](rest)
  except user_error.UserError as error:
    print(user_error.one_line(error), file=sys.stderr)
    return WRONG_USE


def catch_user_errors(act: Callable[[], int]) -> int:
  """Returns the status of `act`; a user's mistake is one line and status 2."""
  try:
    return act()
  except user_error.UserError as error:
    print(user_error.one_line(error), file=sys.stderr)
  except OSError as error:
    # Such as a folder where a file must be.
    if error.filename is None:
      raise
    print(user_error.one_line(error), file=sys.stderr)
  return WRONG_USE


def run(main: Callable[[Sequence[str]], int]) -> NoReturn:
  """Runs a program on the process's arguments; exits with its status."""
  terminal_output.open_missing()
  interrupts.run_program(main)


def find_checkpoint(place: str) -> stored_checkpoint.StoredCheckpoint:
  """Returns the checkpoint that an argument names.

  Args:
    place: `RUN` or `RUN@STEP`.

  Raises:
    user_error.UserError: It does not exist.
  """
  path, step = parse_place(place)
  return stored_checkpoint.find_checkpoint(path, step=step)


def parse_place(place: str) -> tuple[epath.Path, int | None]:
  """Returns the folder and the step that an argument names.

  Args:
    place: `RUN` or `RUN@STEP`.

  Raises:
    user_error.UserError: It is empty.
  """
  if not place.strip():
    raise user_error.UserError("The run directory is empty; pass its path.")
  matched = re.fullmatch(r"(.+)@(\d+)", place)
  path = run_dir.resolve(matched[1] if matched else place, os.environ)
  return path, int(matched[2]) if matched else None


class Parser(argparse.ArgumentParser):
  """A parser of one command's arguments that raises `UserError`."""

  def __init__(
    self, command: str, description: str, *, program: str = "tools/ckpt"
  ) -> None:
    super().__init__(
      prog=console_scripts.name_programs(f"{program} {command}"),
      description=description,
      allow_abbrev=False,
    )
    self._command = command

  def error(self, message: str) -> NoReturn:
    """Raises a usage error."""
    raise user_error.UserError(
      f"{self._command}: {message} (see {self.prog} --help)."
    )
