"""Edges and imports against the order of the folders are caught."""

import pytest

from paxon.tools.dependencies import folder_rules, planted

_PLANTED = [
  pytest.param(
    {
      **planted.build("learners", "deps = []", 'deps = ["//layers:block"]'),
      "learners/adamw.py": "\nfrom paxon.layers import block\n",
    },
    'learners/adamw.py:2: //learners:adamw: uses "//layers:block", but'
    " learners/ may use only sharding/; take it as an argument, or move the"
    " code.",
    id="an import against the table",
  ),
  pytest.param(
    planted.build(
      "learners", "deps = []", 'deps = [], runtime_deps = ["//layers:block"]'
    ),
    'learners/BUILD:7: //learners:adamw: uses "//layers:block", but learners/'
    " may use only sharding/; take it as an argument, or move the code.",
    id="an edge against the table",
  ),
  pytest.param(
    {
      **planted.package("tasks", "quickstart", "VALUE = 1\n"),
      **planted.build(
        "runner",
        '"//layers:block"]',
        '"//layers:block"], runtime_deps = ["//tasks:quickstart"]',
      ),
    },
    'runner/BUILD:7: //runner:task: uses "//tasks:quickstart", but experiments'
    " are edges of //runner:main alone; ask for them by name.",
    id="an edge to an experiment",
  ),
  pytest.param(
    {
      **planted.package("inputs", "packing", "import jax\n", '"@pypi//:jax"'),
    },
    'inputs/packing.py:1: //inputs:packing: "@pypi//:jax": inputs/ is numpy'
    " only; no jax here.",
    id="jax in inputs",
  ),
  pytest.param(
    {
      **planted.package("layers/models", "decoder", "VALUE = 1\n"),
      **planted.build(
        "layers",
        '"//sharding:axes"',
        '"//sharding:axes", "//layers/models:decoder"',
      ),
      "layers/block.py": (
        "from paxon.layers.models import decoder\n"
        "from paxon.sharding import axes\n"
      ),
    },
    'layers/block.py:1: //layers:block: uses "//layers/models:decoder", but no'
    " block imports layers/models or layers/decoding; take it as an argument,"
    " or move the code.",
    id="a model in a block",
  ),
  pytest.param(
    {
      **planted.build(
        "runner", '"//layers:block"]', '"//layers:block", "@pypi//:absl_py"]'
      ),
      "runner/task.py": (
        "from absl import flags\nfrom paxon.layers import block\n"
      ),
    },
    "runner/task.py:1: //runner:task: imports `absl.flags`; flags live in"
    " runner/main.py only. Take the value as an argument.",
    id="flags outside main",
  ),
  pytest.param(
    {
      **planted.package("utilities", "strings", "VALUE = 1\n"),
    },
    "utilities/BUILD: utilities/ is not in the table of"
    " folders; move its targets into one of sharding, quantization, layers,"
    " learners, pipeline, inputs, runner, tasks, third_party, tools.",
    id="a folder outside the table",
  ),
]


@pytest.mark.parametrize(("changes", "message"), _PLANTED)
def test_catches_the_planted_violation(tmp_path, changes, message):
  assert planted.found_by(folder_rules.check, tmp_path, changes) == [message]


def test_allows_the_clean_workspace(tmp_path):
  assert planted.found_by(folder_rules.check, tmp_path, {}) == []


def test_allows_main_the_experiments(tmp_path):
  main = 'paxon_main(name = "main", experiments = ["//tasks:quickstart"])\n'
  changes = {
    **planted.package("tasks", "quickstart", "VALUE = 1\n"),
    "runner/BUILD": planted.CLEAN["runner/BUILD"] + main,
  }
  assert planted.found_by(folder_rules.check, tmp_path, changes) == []
