"""Tests that a save takes little memory beyond the state."""

import re
import subprocess
import sys

import numpy as np

from paxon.runner.checkpoints import measure_save_memory


def test_save_uses_at_most_1_3_times_the_state():
  # A process of its own: memory that others left free would hide growth.
  printed = subprocess.run(
    [sys.executable, "-m", measure_save_memory.__name__, "150"],
    check=True,
    stdout=subprocess.PIPE,
    text=True,
  ).stdout
  found = re.fullmatch(
    r"state 150 MB, memory on the host \+\d+ MB \((.*) x the state\), save\(\)"
    r" blocked [\d.]+ s, complete after [\d.]+ s\n",
    printed,
  )
  assert found is not None, printed
  # Arrays are copied, because they may be donated; some memory is used again.
  assert 0.3 <= float(found[1]) <= 1.3


def test_peak_is_measured_since_the_reset():
  status = measure_save_memory._status
  mebibyte = 1 << 20

  def use(mebibytes):
    # Ones, because pages of zeros take no memory.
    return int(np.ones(mebibytes * mebibyte, np.uint8).sum())

  use(96)
  measure_save_memory._reset_peak()
  before = status("VmRSS")
  assert status("VmHWM") - before < 16 * mebibyte
  use(64)
  grown = status("VmHWM") - before
  assert 48 * mebibyte < grown < 80 * mebibyte
