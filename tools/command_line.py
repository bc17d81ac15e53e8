"""What command lines of the form `PROGRAM COMMAND ARGUMENTS` have in common.

Help is of the whole program. Wrong use is one line on stderr and status 2, an
interrupt is status 130, and a reader that has had enough, such as `head`, is
no error.
"""

from collections.abc import Callable, Mapping, Sequence
import os
import sys
from typing import Final, NoReturn

from paxon.runner import user_error
from paxon.sharding import suggestions

# By name: takes the arguments after it, and returns the exit status.
Commands = Mapping[str, Callable[[list[str]], int]]

WRONG_USE: Final = 2
_INTERRUPTED: Final = 130


def dispatch(
  argv: Sequence[str], commands: Commands, *, help_text: Callable[[], str]
) -> int:
  """Runs one command and returns its exit status.

  Args:
    argv: The command and its arguments.
    commands: Those that there are.
    help_text: Returns what is printed for `--help`, and without arguments.
  """
  if not argv or argv[0] in ("-h", "--help", "help"):
    print(help_text())
    return 0 if argv else WRONG_USE
  name, *rest = argv
  try:
    if name not in commands:
      raise user_error.UserError(
        f"There is no command {name!r}{suggestions.suggest(name, commands)}"
      )
    return commands[name](rest)
  except user_error.UserError as error:
    print(user_error.one_line(error), file=sys.stderr)
    return WRONG_USE


def run(main: Callable[[Sequence[str]], int]) -> NoReturn:
  """Runs a program on the process's arguments; exits with its status."""
  try:
    status = main(sys.argv[1:])
    sys.stdout.flush()
  except KeyboardInterrupt:
    status = _INTERRUPTED
  except BrokenPipeError:
    # What is left would fail again when the interpreter ends.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    status = 0
  sys.exit(status)
