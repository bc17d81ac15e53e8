"""Tests for stage lines."""

import io
import itertools
import os
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
  assert set(lines) == {"evaluating: 0 s"}
  time.sleep(0.1)
  assert len(lines) == count
  assert _has_no_thread()


def test_a_stage_of_an_hour_prints_eight_lines_in_a_log():
  times = itertools.accumulate(stages.make_pauses())
  found = list(itertools.takewhile(lambda seconds: seconds < 3600, times))
  assert found == [10, 30, 70, 150, 310, 630, 1270, 2550]


def test_a_log_gets_a_line_after_a_pause(capsys):
  with stages.heartbeat("evaluating", pause=0.2):
    time.sleep(0.05)
    assert not capsys.readouterr().out
    time.sleep(0.3)
  assert capsys.readouterr().out == "evaluating: 0 s\n"


class _Copying:
  """Standard output that also writes elsewhere, without other methods."""

  def __init__(self):
    self.text = ""

  def write(self, text):
    self.text += text

  def flush(self):
    pass


def test_an_output_without_other_methods_gets_lines_of_a_log(monkeypatch):
  monkeypatch.setattr(sys, "stdout", _Copying())
  with stages.heartbeat("evaluating", pause=0.05):
    time.sleep(0.2)
  assert sys.stdout.text.startswith("evaluating: 0 s\n")
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
  parent, child = os.openpty()
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


def test_a_terminal_has_one_line_that_is_rewritten(monkeypatch):
  def use():
    with stages.heartbeat("compiling the training step"):
      time.sleep(0.1)
      print("a warning")
      time.sleep(0.1)
      with stages.heartbeat("a stage in a stage"):
        time.sleep(0.05)
      print("half ", end="")
      time.sleep(0.05)
      print("a line")
      time.sleep(0.05)
    print("done")

  text = _read_terminal(use, monkeypatch)
  assert text.count("compiling the training step: 0 s") > 3
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
    time.sleep(0.1)
  print("done")
  assert stream.getvalue().count("evaluating: 0 s") > 2
  assert _draw(stream.getvalue()) == ["done", ""]
