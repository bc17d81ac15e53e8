"""Tests for the table of what weights of few bits cost."""

import pytest

from paxon.tools import served_weights_main, tiny_run


def _rows(text):
  return [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in text.splitlines()
    if line.startswith("|")
  ]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  return tiny_run.trained(tmp_path_factory.getbasetemp())


def test_measures_a_run_and_leaves_it_alone(run, capsys):
  arguments = [f"--job_log_dir={run}", "--weights=int4"]
  assert served_weights_main.main(arguments) == 0
  said = capsys.readouterr().out
  assert said.startswith("TinyLm after 6 steps; loss of validation;")
  _, _, before, after = _rows(said)
  # A table of 264 ids of 16 features, three scales of norms; four kernels of
  # 16 x 16, and three of 16 x 32: two weights a byte, and scales of outputs.
  common = 4 * 16 * (264 + 3)
  weights, outputs = 4 * 16 * 16 + 3 * 16 * 32, 5 * 16 + 2 * 32
  assert before[1] == f"{common + 4 * weights:,}"
  assert after[1].startswith(f"{common + weights // 2 + 4 * outputs:,} (")
  old, new = (float(row[4].split()[0]) for row in (before, after))
  assert new == pytest.approx(old, rel=0.02)
  assert not (run / "serving").exists()


def test_another_split_is_refused(run, capsys):
  arguments = [f"--job_log_dir={run}", "--weights=int4", "--split=test"]
  assert served_weights_main.main(arguments) == 2
  said = capsys.readouterr().err
  assert "--split=test: the splits that the run evaluates are valid" in said


def test_the_table_says_what_a_conversion_measured():
  figures = served_weights_main.Figures(
    nbytes=(4000, 1000), largest=0.004, mean=0.0123, losses=(2.0, 2.01)
  )
  table = served_weights_main.to_table({"int8": figures, "int4": figures})
  _, _, *rows = _rows(table)
  changed = ["1,000 (25.0%)", "0.40%", "1.23%", "2.0100 (+0.50%)"]
  assert rows == [
    ["as trained", "4,000", "-", "-", "2.0000"],
    ["int8", *changed],
    ["int4", *changed],
  ]


def test_a_folder_without_a_run_is_refused(tmp_path, capsys):
  assert served_weights_main.main([f"--job_log_dir={tmp_path}"]) == 2
  assert "has no settings.json" in capsys.readouterr().err
