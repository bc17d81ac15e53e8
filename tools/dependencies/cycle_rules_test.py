"""Cycles of targets and of folders are caught."""

import pytest

from paxon.tools.dependencies import cycle_rules, planted

_PLANTED = [
  pytest.param(
    {
      "sharding/axes.py": "import numpy\nfrom paxon.sharding import rules\n",
      "sharding/rules.py": "from paxon.sharding import axes\n",
      "sharding/BUILD": planted.CLEAN["sharding/BUILD"].replace(
        '"@pypi//:numpy"', '"@pypi//:numpy", ":rules"'
      )
      + 'py_library(name = "rules", srcs = ["rules.py"], testonly = True,'
      ' deps = [":axes"])\n',
    },
    "sharding/BUILD:7: //sharding:axes: depends on itself: //sharding:axes ->"
    " //sharding:rules -> //sharding:axes; move what both need into a target of"
    " its own.",
    id="targets",
  ),
  pytest.param(
    {
      **planted.package(
        "layers/moe",
        "router",
        "from paxon.layers.attention import mask\n",
        '"//layers/attention:mask"',
      ),
      **planted.package("layers/attention", "mask", "VALUE = 1\n"),
      "layers/attention/kernel.py": "from paxon.layers.moe import router\n",
      "layers/attention/BUILD": planted.build_text("mask")
      + 'py_library(name = "kernel", srcs = ["kernel.py"],'
      ' deps = ["//layers/moe:router"])\n'
      'py_test(name = "kernel_test", srcs = ["kernel_test.py"],'
      ' size = "small", deps = [":kernel"])\n',
      "layers/attention/kernel_test.py": (
        "from paxon.layers.attention import kernel\n"
      ),
    },
    "layers/attention/BUILD: the folder depends on itself: layers/attention ->"
    " layers/moe -> layers/attention; move what both need into one below them.",
    id="folders",
  ),
]


@pytest.mark.parametrize(("changes", "message"), _PLANTED)
def test_catches_the_planted_violation(tmp_path, changes, message):
  assert planted.found_by(cycle_rules.check, tmp_path, changes) == [message]


def test_allows_the_clean_workspace(tmp_path):
  assert planted.found_by(cycle_rules.check, tmp_path, {}) == []


def test_allows_a_program_what_uses_its_folder(tmp_path):
  main = 'paxon_main(name = "main", experiments = ["//tasks:quickstart"])\n'
  changes = {
    **planted.package(
      "tasks",
      "quickstart",
      "from paxon.runner import task\n",
      '"//runner:task"',
    ),
    "runner/BUILD": planted.CLEAN["runner/BUILD"] + main,
  }
  assert planted.found_by(cycle_rules.check, tmp_path, changes) == []
