"""Tests for signals that ask to stop."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from paxon.runner.programs import stop_signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_noted(number, capsys):
  before = signal.getsignal(number)
  with stop_signals.StopSignals() as stop:
    assert stop.requested is None
    os.kill(os.getpid(), number)
    assert stop.requested == number.name
  assert f"{number.name}: stopping after this step" in capsys.readouterr().out
  assert signal.getsignal(number) is before


def test_the_second_signal_ends_the_process_at_once():
  program = (
    "import os, signal, time\n"
    "from paxon.runner.programs import stop_signals\n"
    "with stop_signals.StopSignals() as stop:\n"
    "  os.kill(os.getpid(), signal.SIGINT)\n"
    "  assert stop.requested == 'SIGINT'\n"
    "  os.kill(os.getpid(), signal.SIGTERM)\n"
    "  time.sleep(60)\n"
  )
  done = subprocess.run(
    [sys.executable, "-c", program], timeout=30, check=False
  )
  assert done.returncode == -signal.SIGTERM


def test_does_nothing_in_another_thread():
  before = signal.getsignal(signal.SIGTERM)
  during = []

  def body():
    with stop_signals.StopSignals():
      during.append(signal.getsignal(signal.SIGTERM))

  thread = threading.Thread(target=body)
  thread.start()
  thread.join()
  assert during == [before]
