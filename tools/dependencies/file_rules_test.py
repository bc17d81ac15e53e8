"""Files that are out of place are caught."""

import pytest

from paxon.tools.dependencies import file_rules, planted

_PLANTED = [
  pytest.param(
    {
      "sharding/random.py": "",
      **planted.build(
        "sharding",
        "readme_test(",
        'py_library(name = "random", srcs = ["random.py"], testonly = True)\n'
        "readme_test(",
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
        "readme_test(",
        'py_library(name = "flax", srcs = ["flax.py"], testonly = True)\n'
        "readme_test(",
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
      "readme_test(",
      'py_binary(name = "run", srcs = ["adamw.py"])\nreadme_test(',
    ),
    "learners/adamw.py: is in //learners:adamw and //learners:run; keep one,"
    " and depend on it.",
    id="in two targets",
  ),
  pytest.param(
    {"layers/__init__.py": "VALUE = 1\n"},
    "layers/__init__.py: holds a docstring and nothing else; import modules"
    " directly.",
    id="code in __init__",
  ),
  pytest.param(
    {"layers/__init__.py": None},
    "layers/__init__.py: is missing; add one that holds a docstring only.",
    id="no __init__",
  ),
]


@pytest.mark.parametrize(("changes", "message"), _PLANTED)
def test_catches_the_planted_violation(tmp_path, changes, message):
  assert planted.found_by(file_rules.check, tmp_path, changes) == [message]


def test_allows_the_clean_workspace(tmp_path):
  assert planted.found_by(file_rules.check, tmp_path, {}) == []
