"""The checkout is found from a link into it, and its files are listed."""

import pytest

from paxon.tools.dependencies import source_tree


def _touch(root, *paths):
  for path in paths:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).touch()


def test_a_link_leads_back_to_the_workspace(tmp_path):
  _touch(tmp_path, "checkout/WORKSPACE", "checkout/tools/a.py", "runfiles/b.py")
  link = tmp_path / "runfiles/a.py"
  link.symlink_to(tmp_path / "checkout/tools/a.py")
  assert source_tree.find_root(link) == tmp_path / "checkout"
  with pytest.raises(FileNotFoundError, match=r"no folder above .*/runfiles/b"):
    source_tree.find_root(tmp_path / "runfiles/b.py")


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
  assert source_tree.files(tmp_path) == [
    "BUILD",
    "layers/a.py",
    "layers/runs/b.py",
  ]
