"""Fragments of modules and imports up the levels of runner/ are caught."""

import pytest

from paxon.tools.dependencies import module_rules, planted


def _two_modules(lines: int) -> dict[str, str]:
  """Returns two modules in one folder, of which one imports the other."""
  return {
    **planted.package(
      "learners/lion",
      "lion",
      "from paxon.learners import adamw\n",
      '"//learners:adamw"',
    ),
    "learners/adamw.py": "#\n" * lines,
  }


def test_catches_a_module_that_belongs_into_its_importer(tmp_path):
  changes = _two_modules(lines=79)
  assert planted.found_by(module_rules.check, tmp_path, changes) == [
    "learners/adamw.py: has 79 lines, and only learners/lion/lion.py imports"
    " it; move its code there."
  ]


def test_a_module_of_80_lines_may_have_one_importer(tmp_path):
  changes = _two_modules(lines=80)
  assert planted.found_by(module_rules.check, tmp_path, changes) == []


def test_a_small_module_may_have_two_importers(tmp_path):
  changes = {
    **_two_modules(lines=1),
    "runner/task.py": "from paxon.learners import adamw\n",
  }
  assert planted.found_by(module_rules.check, tmp_path, changes) == []


def test_a_small_module_may_serve_another_package(tmp_path):
  assert planted.found_by(module_rules.check, tmp_path, {}) == []


def test_catches_an_import_up_the_levels(tmp_path):
  changes = {
    **planted.package(
      "runner/plan",
      "memory",
      "from paxon.runner.training import train\n",
      '"//runner/training:train"',
    ),
    **planted.package("runner/training", "train", "#\n" * 80),
  }
  assert planted.found_by(module_rules.check, tmp_path, changes) == [
    "runner/plan/memory.py:1: //runner/plan:memory: imports"
    " runner/training/train.py, which is on a higher level of runner/; pass it"
    " as an argument, or move the code."
  ]


@pytest.mark.parametrize(
  ("lower", "higher"),
  [
    ("runner/user_error.py", "runner/job.py"),
    ("runner/settings/retention.py", "runner/configuration/dump.py"),
    ("runner/experiment.py", "runner/plan/memory/forecast.py"),
    ("runner/checkpoints/manifest.py", "runner/training/train.py"),
    ("runner/training/train.py", "runner/planning/measure.py"),
    ("runner/planning/measure.py", "runner/main.py"),
  ],
)
def test_levels_follow_the_order_of_the_folders(lower, higher):
  first, second = module_rules.level(lower), module_rules.level(higher)
  assert first is not None
  assert second is not None
  assert first < second


def test_other_folders_have_no_levels():
  assert module_rules.level("layers/block.py") is None
  assert module_rules.level("runner_tools/main.py") is None
