"""Tests for options of the process: its start time, its profiler port."""

import socket
import subprocess
import sys
import time

import pytest

from paxon.runner.monitoring import launch, observer


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


def test_profiler_server_listens_while_the_observer_is_entered():
  with socket.socket() as free:
    free.bind(("", 0))
    port = free.getsockname()[1]
  launch.check_port(port)
  given = launch.Launch(profiler_port=port)
  with observer.Observer(launch=given):
    socket.create_connection(("localhost", port), timeout=10).close()
    with pytest.raises(ValueError, match=rf"--profiler_port={port} cannot be"):
      launch.check_port(port)
  with pytest.raises(ConnectionRefusedError):
    socket.create_connection(("localhost", port), timeout=10)


@pytest.mark.parametrize("port", [0, -1, 65536])
def test_ports_out_of_range_are_rejected(port):
  with pytest.raises(ValueError, match=r"must be from 1 to 65535"):
    launch.check_port(port)
