"""Tests for the start time of the process."""

import subprocess
import sys
import time

from paxon.runner.monitoring import launch


def test_process_start_time():
  code = (
    "import time; time.sleep(0.5)\n"
    "from paxon.runner.monitoring import launch\n"
    "print(launch.process_begin())"
  )
  before = time.time()
  done = subprocess.run(
    [sys.executable, "-c", code],
    capture_output=True,
    text=True,
    check=True,
    env={"PYTHONPATH": ":".join(sys.path)},
  )
  # The system counts in hundredths of a second.
  assert before - 0.1 <= float(done.stdout) <= before + 0.45
  assert launch.process_begin() < before
