"""Tests for the comparison of generation with two caches."""

import numpy as np
import pytest

from paxon.tools import kv_cache_agreement, kv_cache_main, tiny_run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  return tiny_run.trained(tmp_path_factory.getbasetemp())


def test_compares_both_caches_on_a_trained_model(run, capsys):
  arguments = [
    f"--job_log_dir={run}",
    "--kv_cache=int8",
    "--tokens=9",
    "--prompt=def ",
    "--prompt=x",
  ]
  assert kv_cache_main.main(arguments) == 0
  said = capsys.readouterr().out
  assert said.startswith("TinyLm after 6 steps, greedy, 9 tokens a prompt;")
  rows = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in said.splitlines()
    if line.startswith("| int8")
  ]
  assert [row[2] for row in rows] == ['`"def "`', '`"x"`']
  # Slots are those of the longer prompt, with its begin, and of all new tokens
  # but the last; eight rows fill the mesh. One layer has two heads of eight.
  slots = 8 * (5 + 9 - 1)
  kept = slots * (2 * 2 * (8 + 2) + 2 * 4) + 4
  plain = slots * (2 * 2 * 8 * 4 + 2 * 4) + 4
  assert rows[0][1] == f"{kept:,} ({kept / plain:.1%} of the plain one)"
  for row in rows:
    is_equal = row[3] == "all 9"
    assert is_equal == (row[4] == "-")
    assert is_equal or float(row[4]) < 0.1


def test_the_first_difference_has_the_margin_there():
  plain = np.array([5, 6, 7, 8])
  margins = np.array([0.5, 0.25, 0.125, 0.75])
  found = kv_cache_agreement._agreement(
    "a", plain, np.array([5, 6, 9, 8]), margins
  )
  assert (found.equal, found.tokens, found.chosen) == (2, 4, (7, 9))
  assert (found.margin, found.least) == (0.125, 0.25)
  same = kv_cache_agreement._agreement("a", plain, plain, margins)
  assert (same.equal, same.margin, same.least) == (4, None, 0.125)
  first = kv_cache_agreement._agreement("a", plain, plain + 1, margins)
  assert (first.equal, first.margin, first.least) == (0, 0.5, None)


def test_a_folder_without_a_run_is_refused(tmp_path, capsys):
  assert kv_cache_main.main([f"--job_log_dir={tmp_path}"]) == 2
  assert "has no settings.json" in capsys.readouterr().err


def test_no_tokens_are_refused(capsys):
  with pytest.raises(SystemExit):
    kv_cache_main.main(["--job_log_dir=x", "--tokens=0"])
  assert "--tokens must be positive, got 0" in capsys.readouterr().err
