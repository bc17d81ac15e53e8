"""Dispatch, exit statuses and closed pipes of command lines."""

import subprocess
import sys

import pytest

from paxon.runner import user_error
from paxon.runner.checkpoints import unreadable
from paxon.tools import command_line

_PROGRAM = f"""
import sys
from paxon.tools import {command_line.__name__.rpartition(".")[2]} as lines

def main(argv):
  if argv == ["interrupt"]:
    raise KeyboardInterrupt
  print("line\\n" * 100_000)
  return len(argv)

lines.run(main)
"""


def _reject(argv):
  raise user_error.UserError(f"no\n  {argv[0]}")


def _main(*argv):
  commands = {"count": len, "reject": _reject}
  return command_line.dispatch(argv, commands, help_text=lambda: "the help")


@pytest.mark.parametrize(
  ("argv", "status", "out", "error"),
  [
    ((), 2, "the help\n", ""),
    (("help",), 0, "the help\n", ""),
    (("--help", "count"), 0, "the help\n", ""),
    (("count", "-h", "a"), 2, "", ""),
    (("count",), 0, "", ""),
    (("reject", "it"), 2, "", "no it\n"),
  ],
)
def test_dispatches(capsys, argv, status, out, error):
  assert _main(*argv) == status
  assert tuple(capsys.readouterr()) == (out, error)


def test_a_command_whose_checkpoint_is_deleted_starts_again(capsys):
  left = ["deleted", "deleted"]

  def export(argv):
    if left:
      raise unreadable.DeletedCheckpointError(left.pop())
    return len(argv)

  commands = {"export": export}
  argv = ("export", "a", "b")
  assert command_line.dispatch(argv, commands, help_text=str) == 2
  assert capsys.readouterr().err == "deleted; starting again\n" * 2


def test_the_closest_command_is_named(capsys):
  assert _main("coumt") == 2
  (line,) = capsys.readouterr().err.splitlines()
  assert line.startswith("Unknown command 'coumt'; did you mean 'count'")


def _start(*argv, **kwargs):
  command = [sys.executable, "-c", _PROGRAM, *argv]
  return subprocess.Popen(command, stderr=subprocess.PIPE, **kwargs)


def test_the_status_is_that_of_the_program():
  process = _start("a", "b", "c", stdout=subprocess.DEVNULL)
  assert process.communicate()[1] == b""
  assert process.returncode == 3


def test_a_closed_pipe_is_not_an_error():
  process = _start(stdout=subprocess.PIPE)
  assert process.stdout.readline() == b"line\n"
  process.stdout.close()
  assert process.stderr.read() == b""
  process.stderr.close()
  assert process.wait() == 0


def test_an_interrupt_has_the_status_of_a_shell():
  process = _start("interrupt", stdout=subprocess.DEVNULL)
  assert process.communicate()[1] == b""
  assert process.returncode == 130
