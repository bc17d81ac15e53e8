"""Tests of the comparison of steps with and without the straggler report."""

import pytest

from paxon.tools.benchmarks import straggler_cost


@pytest.mark.nightly
def test_two_processes_are_compared(capfd):
  arguments = ["--processes=2", "--rounds=1", "--steps=2"]
  assert straggler_cost.main(arguments) == 0
  with_report, without, ratio = capfd.readouterr().out.splitlines()
  assert with_report.startswith("step with the report: ")
  assert without.startswith("step without: ")
  assert ratio.startswith("ratio: ")


def test_one_process_has_no_report(capsys):
  with pytest.raises(SystemExit):
    straggler_cost.main(["--processes=1"])
  error = capsys.readouterr().err
  assert "--processes must be at least 2, got 1" in error
