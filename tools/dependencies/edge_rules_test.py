"""Deps and imports that are not each other's are caught."""

import pytest

from paxon.tools.dependencies import edge_rules, planted

_PLANTED = [
  pytest.param(
    {"learners/adamw.py": "import scipy.stats\n"},
    "learners/adamw.py:1: //learners:adamw: imports `scipy.stats`, which is not"
    ' in deps; add "@pypi//:scipy" to its deps in learners/BUILD.',
    id="undeclared wheel",
  ),
  pytest.param(
    {"learners/adamw.py": "def f():\n  from absl import logging\n"},
    "learners/adamw.py:2: //learners:adamw: imports `absl.logging`, which is"
    ' not in deps; add "@pypi//:absl_py" to its deps in learners/BUILD.',
    id="undeclared wheel in a function",
  ),
  pytest.param(
    {"runner/task.py": "from paxon.layers import block\nimport seqio\n"},
    "runner/task.py:2: //runner:task: imports `seqio`, which is not in deps;"
    ' add "@pypi_tf//:seqio" to its deps in runner/BUILD.',
    id="undeclared wheel of another lock",
  ),
  pytest.param(
    {
      "runner/task.py": (
        "import importlib\n\nfrom paxon.layers import block\n"
        'importlib.import_module("scipy")\n'
      )
    },
    "runner/task.py:4: //runner:task: imports `scipy`, which is not in deps;"
    ' add "@pypi//:scipy" to its deps in runner/BUILD.',
    id="undeclared wheel by name",
  ),
  pytest.param(
    {"learners/adamw.py": "from paxon.sharding import axes\n"},
    "learners/adamw.py:1: //learners:adamw: imports `paxon.sharding.axes`,"
    ' which is not in deps; add "//sharding:axes" to its deps in'
    " learners/BUILD.",
    id="undeclared module of ours",
  ),
  pytest.param(
    {
      "runner/task.py": (
        "from paxon.layers import block\nfrom paxon.sharding import axes\n"
      )
    },
    "runner/task.py:2: //runner:task: imports `paxon.sharding.axes`, which is"
    ' only a transitive dependency; add "//sharding:axes" to its deps in'
    " runner/BUILD.",
    id="transitive module of ours",
  ),
  pytest.param(
    {"runner/task.py": "import numpy\nfrom paxon.layers import block\n"},
    "runner/task.py:1: //runner:task: imports `numpy`, which is only a"
    ' transitive dependency; add "@pypi//:numpy" to its deps in runner/BUILD.',
    id="transitive wheel",
  ),
  pytest.param(
    planted.edit(
      "layers/README.md",
      "import block\n",
      "import block\nimport numpy as np\n",
    ),
    "layers/README.md:10: //layers:readme_test: imports `numpy`, which is"
    ' only a transitive dependency; add "@pypi//:numpy" to its deps in'
    " layers/BUILD.",
    id="undeclared wheel in an example",
  ),
  pytest.param(
    {"sharding/axes.py": "VALUE = 1\n"},
    'sharding/BUILD:7: //sharding:axes: "@pypi//:numpy" is in deps but no'
    " source imports it; remove it, or list it in runtime_deps if it is"
    " imported by name at run time.",
    id="unused wheel",
  ),
  pytest.param(
    {"layers/block.py": "VALUE = 1\n"},
    'layers/BUILD:7: //layers:block: "//sharding:axes" is in deps but no'
    " source imports it; remove it, or list it in runtime_deps if it is"
    " imported by name at run time.",
    id="unused module of ours",
  ),
  pytest.param(
    planted.build(
      "layers", '"//sharding:axes"', '"//sharding:axes", "//sharding:a"'
    ),
    'layers/BUILD:7: //layers:block: the target "//sharding:a" does not'
    " exist; check the spelling.",
    id="no such target",
  ),
  pytest.param(
    planted.build(
      "layers", '"//sharding:axes"', '"//sharding:axes", "@pypi//:torch"'
    ),
    'layers/BUILD:7: //layers:block: "@pypi//:torch" is in no lock of'
    " third_party/python; check the spelling, or add it to a requirements file"
    " there.",
    id="no such wheel",
  ),
  pytest.param(
    planted.build(
      "layers",
      '_test.py"],\n  deps = [":block"],',
      '_test.py"],\n  deps = [":block", "@pypi//:pytest"],',
    ),
    'layers/BUILD:14: //layers:block_test: "@pypi//:pytest" is added by the'
    " macro; remove it.",
    id="added by the macro",
  ),
  pytest.param(
    {"learners/adamw.py": "import torch\n"},
    "learners/adamw.py:1: //learners:adamw: `torch` is neither ours, nor of the"
    " standard library, nor in a lock of third_party/python; add it to a"
    " requirements file there.",
    id="import of an unknown wheel",
  ),
  pytest.param(
    {"learners/adamw.py": "from paxon.sharding import axis\n"},
    "learners/adamw.py:1: //learners:adamw: there is no module"
    " `paxon.sharding.axis`; check the spelling.",
    id="import of an unknown module",
  ),
]


_STYLES = [
  pytest.param(
    "from sharding import axes\n",
    "`sharding` without `paxon.` makes a second copy of the module; write"
    " `paxon.sharding`.",
    id="bare import",
  ),
  pytest.param(
    "from . import task\n",
    "relative import; write `from paxon.learners import ...`.",
    id="relative import",
  ),
  pytest.param(
    "from paxon.sharding.axes import BATCH\n",
    "imports a name; import the module, `from paxon.sharding import axes`, and"
    " write `axes.BATCH`.",
    id="import of a name",
  ),
  pytest.param(
    "from paxon import sharding\n",
    "`paxon.sharding` is a package, which is empty; import a module of it.",
    id="import of a package",
  ),
  pytest.param(
    "from jax._src import core\n",
    "`jax._src` is private; use the public API.",
    id="private import",
  ),
  pytest.param(
    "__import__(input())\n",
    "imports a name computed at run time, which hides an edge; import the"
    " module, or take it as an argument.",
    id="computed import",
  ),
]


@pytest.mark.parametrize(("changes", "message"), _PLANTED)
def test_catches_the_planted_violation(tmp_path, changes, message):
  assert planted.found_by(edge_rules.check, tmp_path, changes) == [message]


def test_allows_the_clean_workspace(tmp_path):
  assert planted.found_by(edge_rules.check, tmp_path, {}) == []


@pytest.mark.parametrize(("source", "message"), _STYLES)
def test_catches_the_planted_import(tmp_path, source, message):
  assert planted.found_by(
    edge_rules.check, tmp_path, {"learners/adamw.py": source}
  ) == [f"learners/adamw.py:1: //learners:adamw: {message}"]


def test_allows_an_aggregate_without_sources(tmp_path):
  library = 'py_library(name = "lib", deps = [":task"])\n'
  changes = {"runner/BUILD": planted.CLEAN["runner/BUILD"] + library}
  assert planted.found_by(edge_rules.check, tmp_path, changes) == []
