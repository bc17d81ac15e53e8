"""Targets that are cut otherwise are caught."""

import pytest

from paxon.tools.dependencies import planted, target_rules

_PLANTED = [
  pytest.param(
    planted.build("learners", '  size = "small",\n', ""),
    "learners/BUILD:14: //learners:adamw_test: a test says how long it takes;"
    ' add size = "small" or "medium".',
    id="no size",
  ),
  pytest.param(
    planted.build("learners", 'name = "adamw",', 'name = "adam",'),
    "learners/BUILD:7: //learners:adam: a library is named for its module; call"
    ' it "adamw".',
    id="another name",
  ),
  pytest.param(
    planted.build("learners", '["adamw.py"]', '["adamw.py", "sgd.py"]'),
    "learners/BUILD:7: //learners:adamw: a library is one module; make one"
    " target for each of its srcs.",
    id="two modules",
  ),
  pytest.param(
    planted.build("learners", 'deps = [":adamw"],\n)', "deps = [],\n)"),
    "learners/BUILD:7: //learners:adamw: no py_test of this folder"
    " reaches it; add adamw_test.py.",
    id="untested",
  ),
  pytest.param(
    planted.build("learners", '["adamw_test.py"]', '["adamw_check.py"]'),
    'learners/BUILD:14: //learners:adamw_test: "adamw_check.py" in a test is'
    " not called *_test.py; rename it.",
    id="a test's name",
  ),
  pytest.param(
    planted.build("learners", '["adamw.py"]', '["adam/adamw.py"]'),
    'learners/BUILD:7: //learners:adamw: "adam/adamw.py" is of another folder;'
    " a BUILD file stands beside it.",
    id="a source of another folder",
  ),
]


@pytest.mark.parametrize(("changes", "message"), _PLANTED)
def test_catches_the_planted_violation(tmp_path, changes, message):
  assert planted.found_by(target_rules.check, tmp_path, changes) == [message]


def test_allows_the_clean_workspace(tmp_path):
  assert planted.found_by(target_rules.check, tmp_path, {}) == []


def test_a_program_may_have_the_name_of_its_module(tmp_path):
  changes = planted.build("learners", 'name = "adamw"', 'name = "lib"')
  changes["learners/BUILD"] = (
    changes["learners/BUILD"].replace('":adamw"', '":lib"')
    + 'paxon_main(name = "adamw", deps = [":lib"])\n'
  )
  assert planted.found_by(target_rules.check, tmp_path, changes) == []


def test_a_module_may_be_tested_through_another(tmp_path):
  inner = 'py_library(name = "inner", srcs = ["inner.py"])\n'
  changes = planted.build("learners", "deps = []", 'deps = [":inner"]')
  changes["learners/BUILD"] += inner
  assert planted.found_by(target_rules.check, tmp_path, changes) == []
