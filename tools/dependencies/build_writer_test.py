"""BUILD files get what imports determine, and keep what was written by hand."""

import pytest

from paxon.tools.dependencies import (
  build_file,
  build_writer,
  edge_rules,
  file_rules,
  planted,
  workspace,
)

_BLOCK = "import jax\nimport math\nfrom paxon.sharding import axes\n"


def _write(root, changes):
  """Returns the changed BUILD files; new targets need two turns."""
  planted.write(root, changes)
  written = {}
  for _ in range(2):
    texts = build_writer.find_updates(workspace.load(root))
    for path, text in texts.items():
      (root / path).write_text(text)
    written |= texts
  assert not build_writer.find_updates(workspace.load(root))
  return written


def _violations(root):
  tree = workspace.load(root)
  rules = (edge_rules.check, file_rules.check_files, file_rules.check_targets)
  return [str(found) for rule in rules for found in rule(tree)]


def test_a_workspace_without_violations_is_not_changed(tmp_path):
  assert not _write(tmp_path, {})


@pytest.mark.parametrize(
  ("build", "expected"),
  [
    # Added, sorted, in the form of buildifier.
    (
      planted.CLEAN["layers/BUILD"],
      planted.CLEAN["layers/BUILD"].replace(
        '["//sharding:axes"]',
        '[\n        "//sharding:axes",\n        "@pypi//:jax",\n    ]',
      ),
    ),
    # What nothing imports goes; a comment, data and visibility stay.
    (
      'py_library(\n    # Why.\n    name = "block",\n    srcs = ["block.py"],\n'
      '    data = ["x.txt"],\n    deps = ["@pypi//:scipy"],\n)\n',
      'py_library(\n    # Why.\n    name = "block",\n    srcs = ["block.py"],\n'
      '    data = ["x.txt"],\n    deps = [\n        "//sharding:axes",\n'
      '        "@pypi//:jax",\n    ],\n)\n',
    ),
    # Without deps.
    (
      'py_library(name = "block", srcs = ["block.py"])\n',
      'py_library(name = "block", srcs = ["block.py"],    deps = [\n'
      '        "//sharding:axes",\n        "@pypi//:jax",\n    ],\n)\n',
    ),
    # What a select chooses is written by hand.
    (
      'py_library(\n    name = "block",\n    srcs = ["block.py"],\n'
      '    deps = [] + select({":x": ["@pypi//:jax"]}),\n)\n',
      'py_library(\n    name = "block",\n    srcs = ["block.py"],\n'
      '    deps = ["//sharding:axes"] + select({":x": ["@pypi//:jax"]}),\n)\n',
    ),
  ],
)
def test_deps_become_the_imports(build, expected, tmp_path):
  changes = {
    "layers/BUILD": build,
    "layers/block.py": _BLOCK,
    "layers/block_test.py": None,
  }
  written = _write(tmp_path, changes)
  # The test's target goes with its file.
  text = written["layers/BUILD"]
  assert text.startswith(expected.partition("py_test(")[0])
  assert "block_test" not in text


def test_new_files_get_targets(tmp_path):
  written = _write(
    tmp_path,
    {
      "layers/BUILD": 'load("//tools:py.bzl", "py_library")\n',
      "layers/norm.py": "from paxon.layers import block\n",
      "layers/testing.py": "import numpy\n",
      "layers/norm_test.py": "from paxon.layers import norm, testing\n",
      "layers/vision/__init__.py": '"""Layers of images.\n\nMore."""\n',
      "layers/vision/pool.py": "from paxon.layers import norm\n",
      "layers/vision/pool_test.py": "from paxon.layers.vision import pool\n",
    },
  )
  assert (
    'load("//tools:py.bzl", "py_library", "py_test")'
    in (written["layers/BUILD"])
  )
  assert written["layers/vision/BUILD"].startswith(
    '# layers/vision: Layers of images.\n\nload("//tools:py.bzl", "py_library",'
  )
  targets = {
    target.label: target
    for folder in ("layers", "layers/vision")
    for target in build_file.parse(written[f"{folder}/BUILD"], folder)
  }
  assert [label for label in targets if "_test" not in label] == [
    "//layers:block",
    "//layers:norm",
    "//layers:testing",
    "//layers/vision:pool",
  ]
  assert targets["//layers:norm"].deps == ("//layers:block",)
  assert targets["//layers:testing"].testonly
  assert set(targets["//layers:norm_test"].deps) == {
    "//layers:norm",
    "//layers:testing",
  }
  assert targets["//layers/vision:pool"].deps == ("//layers:norm",)
  assert targets["//layers/vision:pool_test"].has_size
  assert not _violations(tmp_path)


def test_a_moved_module_takes_its_edges_along(tmp_path):
  _write(
    tmp_path,
    {
      "sharding/axes.py": None,
      "sharding/axes_test.py": "from paxon.sharding import names\n",
      "sharding/names.py": planted.CLEAN["sharding/axes.py"],
      "layers/block.py": "import math\n\nfrom paxon.sharding import names\n",
    },
  )
  assert '"//sharding:names"' in (tmp_path / "layers/BUILD").read_text()
  assert '":axes"' not in (tmp_path / "sharding/BUILD").read_text()
  assert not [x for x in _violations(tmp_path) if "README" not in x]


def test_what_no_target_can_satisfy_is_left_to_the_rules(tmp_path):
  assert not _write(
    tmp_path,
    {"learners/adamw.py": "import unheard_of\nfrom paxon.layers import x\n"},
  )
  assert len(_violations(tmp_path)) == 2


def test_nothing_is_written_beside_an_unreadable_file(tmp_path):
  assert not _write(tmp_path, {"layers/BUILD": "x = [y for y in z]\n"})
