"""No interrupt is lost, and nothing else is taken for one."""

import gc
import signal
import subprocess
import sys
import threading
import time
import weakref

import pytest

from paxon.runner import interrupts


@pytest.fixture(autouse=True)
def _python_handles_it():
  before = signal.signal(signal.SIGINT, signal.default_int_handler)
  yield
  signal.signal(signal.SIGINT, before)


class _Object:
  """Something that a weak reference can point to."""


def _interrupt(*args):
  del args
  signal.raise_signal(signal.SIGINT)


def _wait():
  for _ in range(1000):
    time.sleep(0.01)


def _in_a_weak_reference():
  value = _Object()
  reference = weakref.ref(value, _interrupt)
  del value
  assert reference() is None
  _wait()


def _in_the_garbage_collector():
  gc.callbacks.append(_interrupt)
  try:
    gc.collect()
  finally:
    gc.callbacks.remove(_interrupt)
  _wait()


def _as_another_error():
  try:
    _interrupt()
  except KeyboardInterrupt as error:
    raise ImportError("numpy failed") from error


@pytest.mark.parametrize(
  "body",
  [
    _interrupt,
    _in_a_weak_reference,
    _in_the_garbage_collector,
    _as_another_error,
  ],
)
def test_an_interrupt_is_delivered(body, capsys):
  before = signal.getsignal(signal.SIGINT), sys.unraisablehook
  with pytest.raises(KeyboardInterrupt), interrupts.reliable_interrupts():
    body()
  assert capsys.readouterr().err == ""
  assert (signal.getsignal(signal.SIGINT), sys.unraisablehook) == before


def test_other_errors_stay(monkeypatch):
  reported = []
  monkeypatch.setattr(
    sys, "unraisablehook", lambda error: reported.append(error.exc_type)
  )

  def fail(_):
    raise OSError

  def run():
    value = _Object()
    reference = weakref.ref(value, fail)
    del value
    assert reference() is None
    raise ValueError("a bug")

  with (
    pytest.raises(ValueError, match="a bug"),
    interrupts.reliable_interrupts(),
  ):
    run()
  assert reported == [OSError]


def test_other_handlers_stay():
  received = []
  before = signal.signal(signal.SIGINT, lambda *args: received.append(args[0]))
  try:
    with interrupts.reliable_interrupts():
      signal.raise_signal(signal.SIGINT)
  finally:
    signal.signal(signal.SIGINT, before)
  assert received == [signal.SIGINT]


def test_other_threads_are_left_alone():
  handlers = []

  def run():
    with interrupts.reliable_interrupts():
      handlers.append(signal.getsignal(signal.SIGINT))

  thread = threading.Thread(target=run)
  thread.start()
  thread.join()
  assert handlers == [signal.default_int_handler]


def test_an_interrupt_at_exit_prints_nothing():
  # As JAX does, the program cleans up in Python while it exits.
  program = (
    "import atexit, signal\n"
    f"from paxon.runner import {interrupts.__name__.rpartition('.')[2]} as it\n"
    "atexit.register(signal.raise_signal, signal.SIGINT)\n"
    "it.exit_quietly(0)\n"
  )
  process = subprocess.run(
    [sys.executable, "-c", program], stderr=subprocess.PIPE, check=False
  )
  assert (process.returncode, process.stderr) == (-signal.SIGINT, b"")
