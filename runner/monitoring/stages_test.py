"""Tests for stage lines."""

import io
import itertools
import os
import re
import sys
import threading
import time
import types

import pytest

from paxon.runner.monitoring import stages


def _has_no_thread():
  return all(thread.name != "stages" for thread in threading.enumerate())


def test_a_long_stage_prints_until_it_ends():
  lines, enough = [], threading.Event()

  def write(line):
    lines.append(line)
    if len(lines) == 3:
      enough.set()

  with stages.heartbeat("evaluating", pause=0.01, write=write):
    assert enough.wait(30)
  count = len(lines)
  assert all(re.fullmatch(r"evaluating: \d+ s", line) for line in lines)
  time.sleep(0.1)
  assert len(lines) == count
  assert _has_no_thread()


def test_a_stage_of_an_hour_prints_eight_lines_in_a_log():
  times = itertools.accumulate(stages.make_pauses())
  found = list(itertools.takewhile(lambda seconds: seconds < 3600, times))
  assert found == [10, 30, 70, 150, 310, 630, 1270, 2550]


@pytest.fixture(name="lines")
def _allow_lines(monkeypatch):
  """Allows the lines of logs, which are off in tests."""
  monkeypatch.delenv("PAXON_NO_HEARTBEAT", raising=False)


@pytest.mark.usefixtures("lines")
def test_a_log_gets_lines(capsys):
  said = ""
  with stages.heartbeat("evaluating", pause=0.2):
    while not said:
      time.sleep(0.01)
      said += capsys.readouterr().out
  assert re.fullmatch(r"(evaluating: \d+ s\n)+", said)
  with stages.heartbeat("evaluating", pause=3600.0):
    pass
  assert capsys.readouterr().out == ""


def test_a_log_has_no_lines_if_the_environment_says_so(monkeypatch, capsys):
  monkeypatch.setenv("PAXON_NO_HEARTBEAT", "1")
  with stages.heartbeat("evaluating", pause=0.0):
    assert _has_no_thread()
  assert capsys.readouterr().out == ""


class _Copying:
  """Standard output that also writes elsewhere, without other methods."""

  def __init__(self):
    self.text = ""

  def write(self, text):
    self.text += text

  def flush(self):
    pass


@pytest.mark.usefixtures("lines")
def test_an_output_without_other_methods_gets_lines_of_a_log(monkeypatch):
  monkeypatch.setattr(sys, "stdout", _Copying())
  with stages.heartbeat("evaluating", pause=0.05):
    while not sys.stdout.text:
      time.sleep(0.01)
  assert re.match(r"evaluating: \d+ s\n", sys.stdout.text)
  monkeypatch.setattr(sys, "stdout", None)
  monkeypatch.setattr(sys, "__stdout__", None)
  with stages.heartbeat("evaluating", pause=0.05):
    time.sleep(0.1)


def test_an_error_ends_the_stage():
  with pytest.raises(ValueError, match="no"), stages.heartbeat("compiling"):
    raise ValueError("no")
  assert _has_no_thread()


def _read_terminal(use, monkeypatch, seconds=0.01):
  """Returns what `use` writes to a terminal."""
  try:
    parent, child = os.openpty()
  except OSError as error:
    pytest.skip(f"this machine has no pseudo-terminals: {error}")
  monkeypatch.setattr(stages, "_REWRITE_SECONDS", seconds)
  with open(child, "w", buffering=1, closefd=False) as stream:
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "__stdout__", stream)
    use()
    assert sys.stdout is stream
  os.write(child, b"|")
  text = b""
  # The kernel hands over what was written in parts, and some of it later.
  while not text.endswith(b"|"):
    text += os.read(parent, 1 << 16)
  os.close(child)
  os.close(parent)
  return text.decode().replace("\r\n", "\n").removesuffix("|")


def _draw(text):
  """Returns the lines that a terminal shows, as its rules are."""
  lines, column = [""], 0
  for letter in text:
    if letter == "\n":
      lines.append("")
      column = 0
    elif letter == "\r":
      column = 0
    else:
      line = lines[-1].ljust(column)
      lines[-1] = line[:column] + letter + line[column + 1 :]
      column += 1
  return [line.rstrip() for line in lines]


def _wait_for_line():
  """Waits until the line of the stage is drawn."""
  while not sys.stdout._length:
    time.sleep(0.001)


def test_a_terminal_has_one_line_that_is_rewritten(monkeypatch):
  def use():
    with stages.heartbeat("compiling the training step"):
      _wait_for_line()
      print("a warning")
      _wait_for_line()
      with stages.heartbeat("a stage in a stage"):
        time.sleep(0.05)
      print("half ", end="")
      time.sleep(0.05)
      print("a line")
      _wait_for_line()
    print("done")

  text = _read_terminal(use, monkeypatch)
  assert len(re.findall(r"compiling the training step: \d+ s", text)) >= 3
  assert "a stage in a stage" not in text
  assert _draw(text) == ["a warning", "half a line", "done", ""]


def test_a_short_stage_writes_nothing_to_a_terminal(monkeypatch):
  def use():
    with stages.heartbeat("evaluating"):
      pass

  assert not _read_terminal(use, monkeypatch, seconds=30.0)


def test_nothing_is_printed_beside_a_progress_bar(monkeypatch):
  def use():
    terminal = sys.stdout
    # As rich replaces it while a bar is drawn.
    sys.stdout = types.SimpleNamespace(
      isatty=lambda: True, write=terminal.write, flush=terminal.flush
    )
    with stages.heartbeat("evaluating", pause=0.01):
      time.sleep(0.05)
    sys.stdout = terminal

  assert not _read_terminal(use, monkeypatch)


def test_a_notebook_has_one_line_that_is_rewritten(monkeypatch):
  class OutStream(io.StringIO):
    pass

  OutStream.__module__ = "ipykernel.iostream"
  stream = OutStream()
  monkeypatch.setattr(stages, "_REWRITE_SECONDS", 0.01)
  monkeypatch.setattr(sys, "stdout", stream)
  with stages.heartbeat("evaluating"):
    while stream.getvalue().count("evaluating: ") < 3:
      time.sleep(0.01)
  print("done")
  assert _draw(stream.getvalue()) == ["done", ""]
