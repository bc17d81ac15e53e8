"""Tests for the standard library as a source, on a fake and the real one."""

import hashlib
import os
import pathlib

import pytest

from paxon.inputs.sources import example_source, python_stdlib

_KEPT = {
  "abc.py": b"print()\n",
  "email/header.py": b"# email\n",
  "latin.py": b"# -*- coding: latin-1 -*-\n# caf\xe9\n",
  "test_not_a_folder.py": b"x = 1\n",
}
_LEFT_OUT = (
  "test/test_abc.py",
  "unittest/tests/x.py",
  "idlelib/idle_test/x.py",
  "site-packages/numpy/x.py",
  "dist-packages/x.py",
  "__pycache__/x.py",
  "config-3.11-x86_64-linux-gnu/python-config.py",
  "_sysconfigdata__linux_x86_64-linux-gnu.py",
  "sitecustomize.py",
  "readme.txt",
  "email/header.pyc",
)


def _write(root: pathlib.Path, path: str, data: bytes) -> None:
  (root / path).parent.mkdir(parents=True, exist_ok=True)
  (root / path).write_bytes(data)


@pytest.fixture
def folder(tmp_path):
  root = tmp_path / "python3"
  for path, data in _KEPT.items():
    _write(root, path, data)
  for path in _LEFT_OUT:
    _write(root, path, b"x = 1\n")
  _write(root, "empty.py", b"")
  return root


def _both(folder=None, **kwargs):
  return [
    python_stdlib.PythonStdlib(split=split, folder=folder, **kwargs)
    for split in ("train", "validation")
  ]


def _texts(folder) -> dict[str, bytes]:
  """Returns the documents of both splits by path."""
  return {
    path: source[i]
    for source in _both(folder)
    for i, path in enumerate(source.paths)
  }


def test_documents_are_the_source_files_as_bytes(folder):
  assert _texts(folder) == _KEPT


def test_split_is_a_hash_of_the_path(folder):
  for i in range(300):
    _write(folder, f"package/module_{i}.py", b"x = 1\n")
  train, validation = _both(folder, validation_percent=10)

  def is_held_out(path: str) -> bool:
    digest = hashlib.sha256(path.encode()).digest()
    return int.from_bytes(digest, "big") % 100 < 10

  assert all(is_held_out(path) for path in validation.paths)
  assert not any(is_held_out(path) for path in train.paths)
  assert len(train) + len(validation) == 300 + len(_KEPT)
  assert 10 <= len(validation) <= 60
  assert list(train.paths) == sorted(train.paths)


def test_known_path_stays_in_its_split(tmp_path):
  # sha256("functools.py") % 100 is 0, computed independently.
  _write(tmp_path, "functools.py", b"x\n")
  train, validation = _both(tmp_path)
  assert (train.paths, validation.paths) == ((), ("functools.py",))


def test_a_text_under_two_names_counts_once(folder):
  (folder / "zzz.py").symlink_to("abc.py")
  (folder / "aaa.py").symlink_to("email/header.py")
  expected = dict(_KEPT)
  expected["aaa.py"] = expected.pop("email/header.py")
  assert _texts(folder) == expected


def test_links_to_elsewhere_are_followed(folder, tmp_path):
  _write(tmp_path, "elsewhere/linked.py", b"# linked\n")
  _write(tmp_path, "elsewhere/package/inner.py", b"# inner\n")
  (folder / "linked.py").symlink_to(tmp_path / "elsewhere/linked.py")
  (folder / "package").symlink_to(tmp_path / "elsewhere/package")
  assert _texts(folder) == {
    **_KEPT,
    "linked.py": b"# linked\n",
    "package/inner.py": b"# inner\n",
  }


def test_broken_and_circular_links_are_skipped(folder):
  (folder / "broken.py").symlink_to("nowhere.py")
  (folder / "email" / "circle").symlink_to(folder)
  assert _texts(folder).keys() == _KEPT.keys()


def test_construction_reads_nothing(tmp_path):
  source = python_stdlib.PythonStdlib(split="train", folder=tmp_path / "later")
  _write(tmp_path, "later/abc.py", b"abc\n")
  assert source[0] == b"abc\n"


def test_real_library_is_megabytes_of_python():
  train, validation = _both()
  assert isinstance(train, example_source.DocumentSource)
  sizes = [sum(len(s[i]) for i in range(len(s))) for s in (train, validation)]
  assert sizes[0] > 5e6
  assert 1e5 < sizes[1] < 5e5
  assert not set(train.paths) & set(validation.paths)
  assert {"os.py", "json/decoder.py"} <= {*train.paths, *validation.paths}
  number = train.paths.index("os.py")
  assert train[number] == pathlib.Path(os.__file__).read_bytes()
  for path in (*train.paths, *validation.paths):
    assert not {"test", "tests", "site-packages"} & set(path.split("/"))


def test_a_library_without_source_text_is_an_error(tmp_path):
  _write(tmp_path, "abc.pyc", b"\x00")
  source = python_stdlib.PythonStdlib(split="train", folder=tmp_path)
  with pytest.raises(FileNotFoundError, match=r"No Python source .* was found"):
    len(source)


def test_a_library_in_a_zip_file_is_an_error(tmp_path):
  (tmp_path / "python311.zip").write_bytes(b"PK")
  source = python_stdlib.PythonStdlib(
    split="validation", folder=tmp_path / "python311.zip"
  )
  with pytest.raises(FileNotFoundError, match=r"is in a zip file"):
    source[0]


def test_rejects_another_split():
  with pytest.raises(ValueError, match=r"'train' or 'validation', got 'test'"):
    python_stdlib.PythonStdlib(split="test")


@pytest.mark.parametrize("percent", [0, 100])
def test_rejects_an_empty_split(percent):
  with pytest.raises(ValueError, match=rf"between 1 and 99, got {percent}"):
    python_stdlib.PythonStdlib(split="train", validation_percent=percent)
