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


def test_noise_is_filtered():
  done = _run()
  assert done.stdout == "before\nfrom Python\nfrom below\nafter\n"


def test_muted_processes_print_errors_only():
  done = _run("mute")
  assert done.stdout == "before\nfrom Python\nfrom below\n"
  assert done.stderr == "error\n"
