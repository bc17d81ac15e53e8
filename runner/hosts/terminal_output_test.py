"""Tests for filters of standard output."""

import os
import subprocess
import sys

CODE = """
import os, sys, time
from paxon.runner.hosts import terminal_output
print("before")
terminal_output.filter_noise()
print("from Python")
os.write(1, b"[Gloo] Rank 0 is connected to 1 peer ranks.\\n[Gl")
os.write(1, b"oo] Rank 1 is too.\\nfrom below\\n")
time.sleep(0.3)
if len(sys.argv) > 1:
  terminal_output.mute()
print("after", flush=True)
print("error", file=sys.stderr)
"""


def _run(*arguments):
  return subprocess.run(
    [sys.executable, "-c", CODE, *arguments],
    capture_output=True,
    text=True,
    check=True,
    env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
  )


def test_closed_streams_are_no_files_that_are_opened_next(tmp_path):
  path = tmp_path / "file"
  code = (
    "import os, sys\n"
    "from paxon.runner.hosts import terminal_output\n"
    "terminal_output.open_missing()\n"
    f"with open({os.fspath(path)!r}, 'w') as file:\n"
    "  print('to nobody', flush=True)\n"
    "  os.write(1, b'from below')\n"
    "  print('an error', file=sys.stderr, flush=True)\n"
    "  os.system('echo of a child')\n"
    "  file.write(str(sys.stdin.read()) + str(file.fileno() > 2))\n"
  )
  done = subprocess.run(
    ["sh", "-c", 'exec "$0" "$@" <&- >&- 2>&-', sys.executable, "-c", code],
    check=True,
    env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
  )
  assert done.returncode == 0
  assert path.read_text() == "True"


def test_noise_is_filtered():
  done = _run()
  assert done.stdout == "before\nfrom Python\nfrom below\nafter\n"


def test_muted_processes_print_errors_only():
  done = _run("mute")
  assert done.stdout == "before\nfrom Python\nfrom below\n"
  assert done.stderr == "error\n"
