"""Edges against the order of packages and levels, and cycles, are caught."""

import pytest

from paxon.tools.dependencies import order_rules, planted

_PACKAGES = [
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
    'runner/BUILD:7: //runner:task: uses "//tasks:quickstart", but only'
    " //runner:main depends on experiments; find them by name.",
    id="an edge to an experiment",
  ),
  pytest.param(
    {
      **planted.package("inputs", "packing", "import jax\n", '"@pypi//:jax"'),
    },
    'inputs/packing.py:1: //inputs:packing: "@pypi//:jax": inputs/ uses'
    " numpy only, not jax.",
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
    'layers/block.py:1: //layers:block: uses "//layers/models:decoder", but'
    " a layer must not import layers/models or layers/decoding; take it as"
    " an argument, or move the code.",
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
    "runner/task.py:1: //runner:task: imports `absl.flags`; flags are"
    " defined in runner/command_line.py only. Take the value as an argument.",
    id="flags outside main",
  ),
  pytest.param(
    {
      **planted.package("utilities", "strings", "VALUE = 1\n"),
    },
    "utilities/BUILD: utilities/ is not in the table of packages; move its"
    " targets into one of sharding, quantization, layers, learners,"
    " pipeline, inputs, runner, tasks, third_party, tools.",
    id="a folder outside the table",
  ),
]


@pytest.mark.parametrize(("changes", "message"), _PACKAGES)
def test_catches_the_planted_violation(tmp_path, changes, message):
  assert planted.found_by(order_rules.check_packages, tmp_path, changes) == [
    message
  ]


def test_allows_the_clean_workspace(tmp_path):
  assert planted.found_by(order_rules.check_packages, tmp_path, {}) == []


def test_allows_main_the_experiments(tmp_path):
  main = 'paxon_main(name = "main", experiments = ["//tasks:quickstart"])\n'
  changes = {
    **planted.package("tasks", "quickstart", "VALUE = 1\n"),
    "runner/BUILD": planted.CLEAN["runner/BUILD"] + main,
  }
  assert planted.found_by(order_rules.check_packages, tmp_path, changes) == []


@pytest.mark.parametrize(
  ("testonly", "problems"), [("testonly = True, ", 0), ("", 1)]
)
def test_allows_tests_of_tools_the_experiments(tmp_path, testonly, problems):
  changes = {
    **planted.package("tasks", "quickstart", "VALUE = 1\n"),
    **planted.package(
      "tools",
      "imported",
      "from paxon.tasks import quickstart\n",
      '"//tasks:quickstart"',
    ),
  }
  changes["tools/BUILD"] = changes["tools/BUILD"].replace(
    'name = "imported",', f'name = "imported", {testonly}'
  )
  found = planted.found_by(order_rules.check_packages, tmp_path, changes)
  assert len(found) == problems


@pytest.mark.parametrize("mark", ["", "testonly = True, "])
def test_catches_a_library_that_needs_test_support(tmp_path, mark):
  changes = {
    **planted.package("sharding", "support", "VALUE = 1\n"),
    **planted.package("layers", "uses", "VALUE = 1\n", '"//sharding:support"'),
  }
  for path, name, marked in (
    ("sharding/BUILD", "support", "testonly = True, "),
    ("layers/BUILD", "uses", mark),
  ):
    changes[path] = changes[path].replace(
      f'name = "{name}",', f'name = "{name}", {marked}'
    )
  found = planted.found_by(order_rules.check_test_support, tmp_path, changes)
  assert len(found) == (not mark)
  assert all('uses "//sharding:support", which is testonly' in x for x in found)


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
  assert planted.found_by(order_rules.check_levels, tmp_path, changes) == [
    "runner/plan/memory.py:1: //runner/plan:memory: imports"
    " runner/training/train.py, which is on a higher level of runner/; pass it"
    " as an argument, or move the code."
  ]


@pytest.mark.parametrize(
  ("lower", "higher"),
  [
    ("runner/user_error.py", "runner/job.py"),
    ("runner/settings/retention.py", "runner/configuration/dump.py"),
    ("runner/experiment.py", "runner/plan/estimate/prediction.py"),
    ("runner/checkpoints/manifest.py", "runner/training/train.py"),
    ("runner/training/train.py", "runner/planning/measure.py"),
    ("runner/planning/measure.py", "runner/main.py"),
  ],
)
def test_levels_follow_the_order_of_the_folders(lower, higher):
  first, second = (
    order_rules.runner_level(lower),
    order_rules.runner_level(higher),
  )
  assert first is not None
  assert second is not None
  assert first < second


def test_other_folders_have_no_levels():
  assert order_rules.runner_level("layers/block.py") is None
  assert order_rules.runner_level("runner_tools/main.py") is None


_CYCLES = [
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
    " //sharding:rules -> //sharding:axes; move what both need into a"
    " separate target.",
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


@pytest.mark.parametrize(("changes", "message"), _CYCLES)
def test_catches_the_planted_cycle(tmp_path, changes, message):
  assert planted.found_by(order_rules.check_cycles, tmp_path, changes) == [
    message
  ]


def test_allows_a_workspace_without_cycles(tmp_path):
  assert planted.found_by(order_rules.check_cycles, tmp_path, {}) == []


def test_allows_a_program_that_uses_its_folder(tmp_path):
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
  assert planted.found_by(order_rules.check_cycles, tmp_path, changes) == []
