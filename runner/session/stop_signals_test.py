"""Tests for signals that ask to stop."""

import io
import os
import signal
import subprocess
import sys
import tempfile
import threading

import pytest

from paxon.runner.session import stop_signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_noted(number, capsys):
  before = signal.getsignal(number)
  with stop_signals.StopSignals() as stop:
    assert stop.requested is None
    os.kill(os.getpid(), number)
    assert stop.requested == number.name
  assert f"{number.name}: stopping after this step" in capsys.readouterr().out
  assert signal.getsignal(number) is before


def test_a_request_may_come_again_and_after_the_signal_it_stands_for(capsys):
  before = signal.getsignal(signal.SIGUSR1)
  with stop_signals.StopSignals() as stop:
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR1):
      signal.raise_signal(number)
    assert stop.requested == "SIGTERM"
    # Another one of those kills.
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
  assert capsys.readouterr().out.count("stopping after") == 1
  assert signal.getsignal(signal.SIGUSR1) is before
  with stop_signals.StopSignals() as stop:
    signal.raise_signal(signal.SIGUSR1)
    assert stop.requested == "SIGUSR1"
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    signal.raise_signal(signal.SIGUSR1)
  assert capsys.readouterr().out.count("stopping after") == 1


class _Interrupted(io.RawIOBase):
  """Receives a signal while it is written to."""

  def writable(self):
    return True

  def write(self, data, /):
    signal.raise_signal(signal.SIGTERM)
    return len(data)


def test_a_signal_while_the_program_prints(monkeypatch, capfd):
  stream = io.TextIOWrapper(io.BufferedWriter(_Interrupted()))
  with stop_signals.StopSignals() as stop:
    with monkeypatch.context() as patched:
      patched.setattr(sys, "stdout", stream)
      print("step 1", flush=True)
    assert stop.requested == "SIGTERM"
    # Closing it writes nothing more.
    stream.detach()
  assert "SIGTERM: stopping after this step" in capfd.readouterr().out


def test_the_second_signal_ends_the_process_at_once():
  program = (
    "import os, signal, time\n"
    "from paxon.runner.session import stop_signals\n"
    "with stop_signals.StopSignals() as stop:\n"
    "  os.kill(os.getpid(), signal.SIGINT)\n"
    "  assert stop.requested == 'SIGINT'\n"
    "  os.kill(os.getpid(), signal.SIGTERM)\n"
    "  time.sleep(60)\n"
  )
  done = subprocess.run([sys.executable, "-c", program], check=False)
  assert done.returncode == -signal.SIGTERM


def test_a_closed_terminal_ends_a_program_after_its_step():
  # Its standard error is the terminal, too.
  program = (
    "import os, signal, sys, time, traceback\n"
    "from paxon.runner.session import stop_signals\n"
    "def write(*text): open(os.environ['SAID'], 'w').write(''.join(text))\n"
    "sys.excepthook = lambda *e: write(*traceback.format_exception(*e))\n"
    "with stop_signals.StopSignals() as stop:\n"
    "  print('ready', flush=True)\n"
    "  while not stop.requested:\n"
    "    time.sleep(0.01)\n"
    "  print('to nobody', flush=True)\n"
    "  write(stop.requested)\n"
  )
  with tempfile.TemporaryDirectory() as folder:
    said = os.path.join(folder, "said")
    try:
      terminal, inside = os.openpty()
    except OSError as error:
      pytest.skip(f"this machine has no pseudo-terminals: {error}")
    process = subprocess.Popen(
      [sys.executable, "-c", program],
      stdout=inside,
      stderr=inside,
      env=os.environ | {"SAID": said},
    )
    os.close(inside)
    # The end of the line too: the terminal may pass a line on in two parts.
    ready = b""
    while b"\n" not in ready:
      ready += os.read(terminal, 100)
    assert b"ready" in ready
    # Writing fails from now on.
    os.close(terminal)
    process.send_signal(signal.SIGHUP)
    status = process.wait()
    with open(said) as file:
      assert file.read() == "SIGHUP"
    assert status == 0


def test_an_ignored_hangup_stays_ignored():
  before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
  try:
    with stop_signals.StopSignals() as stop:
      signal.raise_signal(signal.SIGHUP)
      assert stop.requested is None
  finally:
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_native_code_at_once_where_nothing_would_be_lost(number):
  # Native code of a minute, like a compilation: no handler runs meanwhile.
  program = (
    "import hashlib\n"
    "from paxon.runner.session import stop_signals\n"
    "with stop_signals.StopSignals() as stop, stop.at_once():\n"
    "  print('ready', flush=True)\n"
    "  hashlib.pbkdf2_hmac('sha256', b'', b'', 200_000_000)\n"
  )
  process = subprocess.Popen(
    [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True
  )
  try:
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    output, _ = process.communicate()
  finally:
    process.kill()
  assert process.returncode == 128 + number
  assert output == (
    f"{number.name}: stopped before the first step; nothing is lost.\n"
  )


def test_after_that_a_signal_is_a_request_again():
  before = signal.set_wakeup_fd(-1)
  signal.set_wakeup_fd(before)
  with stop_signals.StopSignals() as stop:
    with stop.at_once():
      pass
    assert signal.set_wakeup_fd(before) == before
    assert stop.requested is None
    signal.raise_signal(signal.SIGTERM)
    assert stop.requested == "SIGTERM"
    # Asked already: the loop ends by itself.
    with stop.at_once():
      assert signal.set_wakeup_fd(before) == before


def test_does_nothing_in_another_thread():
  before = signal.getsignal(signal.SIGTERM)
  during = []

  def body():
    with stop_signals.StopSignals() as stop, stop.at_once():
      during.append(signal.getsignal(signal.SIGTERM))

  thread = threading.Thread(target=body)
  thread.start()
  thread.join()
  assert during == [before]
