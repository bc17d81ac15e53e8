"""A workspace is read from disk, and its imports lead to targets."""

import pytest

from paxon.tools.dependencies import planted, workspace


def _load(root, changes) -> workspace.Workspace:
  planted.write(root, changes)
  return workspace.load(root)


def test_the_closure_follows_deps_to_the_wheels(tmp_path):
  tree = _load(tmp_path, {})
  assert tree.closure(["//runner:task"]) == {
    "//runner:task",
    "//layers:block",
    "//sharding:axes",
    "@pypi//:numpy",
  }


def test_what_only_a_setting_adds_can_be_left_out(tmp_path):
  deps = (
    'deps = select({"//third_party/python:cuda": ["@pypi_cuda//:plugin"],'
    ' "//conditions:default": []})'
  )
  build = f'py_library(name = "muon", srcs = ["muon.py"], {deps})'
  tree = _load(tmp_path, {"learners/BUILD": build, "learners/muon.py": ""})
  label = "//learners:muon"
  assert tree.closure([label]) == {label, "@pypi_cuda//:plugin"}
  assert tree.closure([label], optional=False) == {label}


def test_uses_of_a_target_are_the_imports_of_its_sources(tmp_path):
  tree = _load(tmp_path, {})
  uses = list(tree.uses(tree.targets["//layers:block"]))
  assert uses == [
    workspace.Use("layers/block.py", 1, "math"),
    workspace.Use(
      "layers/block.py", 3, "paxon.sharding.axes", ("//sharding:axes",)
    ),
  ]


def test_sources_of_one_target_may_import_each_other(tmp_path):
  tree = _load(
    tmp_path,
    {
      **planted.build("learners", '["adamw.py"]', '["adamw.py", "sgd.py"]'),
      "learners/adamw.py": "from paxon.learners import sgd\n",
      "learners/sgd.py": "",
    },
  )
  assert list(tree.uses(tree.targets["//learners:adamw"])) == []


def test_a_lock_is_called_like_its_repository(tmp_path):
  tree = _load(
    tmp_path,
    {
      "third_party/python/requirements_cuda_lock.txt": planted.lock("jax", "x"),
      "third_party/python/requirements_dev_lock.txt": planted.lock("ruff"),
    },
  )
  repositories = tree.distributions.repositories
  assert repositories["x"] == "pypi_cuda"
  assert repositories["seqio"] == "pypi_tf"
  assert repositories["jax"] == "pypi"
  assert "ruff" not in repositories


def test_what_cannot_be_parsed_is_said(tmp_path):
  tree = _load(
    tmp_path,
    {
      **planted.build("learners", '["adamw.py"]', 'glob(["*.py"])'),
      "runner/task.py": "\nx = (\n",
    },
  )
  assert [str(found) for found in tree.unreadable] == [
    "learners/BUILD:9: glob hides files; list them.",
    "runner/task.py:2: '(' was never closed.",
  ]


def test_folders_named_in_bazelignore_are_no_part_of_the_workspace(tmp_path):
  tree = _load(
    tmp_path,
    {
      ".bazelignore": "tools/consumer\n",
      "tools/consumer/trainer.py": "import torch\n",
    },
  )
  assert not any(path.startswith("tools/") for path in tree.files)


def _touch(root, *paths):
  for path in paths:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).touch()


def test_a_link_leads_back_to_the_workspace(tmp_path):
  _touch(tmp_path, "checkout/WORKSPACE", "checkout/tools/a.py", "runfiles/b.py")
  link = tmp_path / "runfiles/a.py"
  link.symlink_to(tmp_path / "checkout/tools/a.py")
  assert workspace.find_root(link) == tmp_path / "checkout"
  with pytest.raises(FileNotFoundError, match=r"no folder above .*/runfiles/b"):
    workspace.find_root(tmp_path / "runfiles/b.py")


def test_lists_sources_and_nothing_else(tmp_path):
  (tmp_path / ".bazelignore").write_text("# Others.\n\nthird_party/other/\n")
  _touch(
    tmp_path,
    "BUILD",
    "layers/a.py",
    "layers/runs/b.py",
    # Left out:
    ".git/c.py",
    "layers/.hidden.py",
    "layers/__pycache__/a.cpython-311.pyc",
    "build/lib/a.py",
    "runs/1/a.py",
    "third_party/other/d.py",
  )
  (tmp_path / "bazel-bin").symlink_to(tmp_path / "layers")
  assert workspace.find_files(tmp_path) == [
    "BUILD",
    "layers/a.py",
    "layers/runs/b.py",
  ]
