"""Misplaced files and targets, and fragments, are caught."""

import pytest

from paxon.tools.dependencies import file_rules, planted

_PLANTED = [
  pytest.param(
    {
      "sharding/random.py": "",
      **planted.build(
        "sharding",
        "py_test(",
        'py_library(name = "random", srcs = ["random.py"], testonly = True)\n'
        "py_test(",
      ),
    },
    "sharding/random.py: `random` is a module of the standard library; rename"
    " it.",
    id="standard library's name",
  ),
  pytest.param(
    {
      "sharding/flax.py": "",
      **planted.build(
        "sharding",
        "py_test(",
        'py_library(name = "flax", srcs = ["flax.py"], testonly = True)\n'
        "py_test(",
      ),
    },
    "sharding/flax.py: `flax` is a third-party package; rename it.",
    id="a wheel's name",
  ),
  pytest.param(
    {"learners/adamw.py": "\n" * 601},
    "learners/adamw.py: has 601 lines, the limit is 600; split it by ideas.",
    id="too long",
  ),
  pytest.param(
    {"sharding/goldens/new.json": "{}"},
    "sharding/goldens/new.json: is in no target; list it in sharding/BUILD.",
    id="data in no target",
  ),
  pytest.param(
    {"sharding/rules.py": ""},
    "sharding/rules.py: is in no target; add one to sharding/BUILD.",
    id="in no target",
  ),
  pytest.param(
    {
      "sharding/mesh/rules.py": "",
      "sharding/mesh/__init__.py": '"""Meshes."""',
    },
    "sharding/mesh/BUILD: is missing; add one with a target for each module.",
    id="in no package",
  ),
  pytest.param(
    planted.build(
      "learners",
      "py_test(",
      'py_binary(name = "run", srcs = ["adamw.py"])\npy_test(',
    ),
    "learners/adamw.py: is in //learners:adamw and //learners:run; keep one,"
    " and depend on it.",
    id="in two targets",
  ),
  pytest.param(
    {"layers/__init__.py": "VALUE = 1\n"},
    "layers/__init__.py: must hold a docstring and nothing else; import"
    " modules directly.",
    id="code in __init__",
  ),
  pytest.param(
    {"layers/__init__.py": '"""Layers."""\n__version__ = "1"\n'},
    "layers/__init__.py: must hold a docstring and nothing else; import"
    " modules directly.",
    id="version of a part",
  ),
  pytest.param(
    {"layers/__init__.py": None},
    "layers/__init__.py: is missing; add one that holds a docstring only.",
    id="no __init__",
  ),
]


@pytest.mark.parametrize(("changes", "message"), _PLANTED)
def test_catches_the_planted_violation(tmp_path, changes, message):
  assert planted.found_by(file_rules.check_files, tmp_path, changes) == [
    message
  ]


def test_allows_the_clean_workspace(tmp_path):
  assert planted.found_by(file_rules.check_files, tmp_path, {}) == []


_TARGETS = [
  pytest.param(
    planted.build(
      "learners", '  size = "small",\n  srcs = ["adamw_', '  srcs = ["adamw_'
    ),
    "learners/BUILD:14: //learners:adamw_test: a test needs a size;"
    ' add size = "small" or "medium".',
    id="no size",
  ),
  pytest.param(
    planted.build("learners", 'name = "adamw",', 'name = "adam",'),
    "learners/BUILD:7: //learners:adam: a library is named after its"
    ' module; call it "adamw".',
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
    'learners/BUILD:7: //learners:adamw: "adam/adamw.py" is in another'
    " folder; add a BUILD file there.",
    id="a source of another folder",
  ),
]


@pytest.mark.parametrize(("changes", "message"), _TARGETS)
def test_catches_the_planted_target(tmp_path, changes, message):
  assert planted.found_by(file_rules.check_targets, tmp_path, changes) == [
    message
  ]


def test_allows_the_clean_targets(tmp_path):
  assert planted.found_by(file_rules.check_targets, tmp_path, {}) == []


def test_a_program_may_have_the_name_of_its_module(tmp_path):
  changes = planted.build("learners", 'name = "adamw"', 'name = "lib"')
  changes["learners/BUILD"] = (
    changes["learners/BUILD"].replace('":adamw"', '":lib"')
    + 'paxon_main(name = "adamw", deps = [":lib"])\n'
  )
  assert planted.found_by(file_rules.check_targets, tmp_path, changes) == []


def test_a_module_may_be_tested_through_another(tmp_path):
  inner = 'py_library(name = "inner", srcs = ["inner.py"])\n'
  changes = planted.build("learners", "deps = []", 'deps = [":inner"]')
  changes["learners/BUILD"] += inner
  assert planted.found_by(file_rules.check_targets, tmp_path, changes) == []


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
  assert planted.found_by(file_rules.check_fragments, tmp_path, changes) == [
    "learners/adamw.py: has 79 lines, and only learners/lion/lion.py imports"
    " it; move its code there."
  ]


def test_a_module_of_80_lines_may_have_one_importer(tmp_path):
  changes = _two_modules(lines=80)
  assert planted.found_by(file_rules.check_fragments, tmp_path, changes) == []


def test_a_small_module_may_have_two_importers(tmp_path):
  changes = {
    **_two_modules(lines=1),
    "runner/task.py": "from paxon.learners import adamw\n",
  }
  assert planted.found_by(file_rules.check_fragments, tmp_path, changes) == []


def test_a_small_module_may_serve_another_package(tmp_path):
  assert planted.found_by(file_rules.check_fragments, tmp_path, {}) == []
