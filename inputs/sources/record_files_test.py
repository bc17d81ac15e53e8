"""Tests for the expansion of file patterns."""

import pytest

from paxon.inputs.sources import record_files

_BRACES = ("{x,y}.txt", "{a}.txt")


@pytest.fixture(name="folder")
def _folder(tmp_path, monkeypatch):
  for name in (
    "b.txt",
    "a.txt",
    "in/c.txt",
    "in/deep/a.txt",
    "a[1].txt",
    *_BRACES,
  ):
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
  (tmp_path / "folder.txt").mkdir()
  monkeypatch.setenv("HOME", str(tmp_path))
  return tmp_path


@pytest.mark.parametrize(
  ("files", "expected"),
  [
    pytest.param("b.txt", ["b.txt"], id="path"),
    pytest.param("?.txt", ["a.txt", "b.txt"], id="pattern"),
    pytest.param("[b]*.txt", ["b.txt"], id="some"),
    # As a pattern it would match `a1.txt`.
    pytest.param("a[1].txt", ["a[1].txt"], id="path with brackets"),
    pytest.param("*/*.txt", ["in/c.txt"], id="one folder"),
    pytest.param("in", ["in/c.txt"], id="a folder itself"),
    pytest.param("in/**/*.txt", ["in/c.txt", "in/deep/a.txt"], id="any folder"),
    pytest.param(["b.txt", "?.txt"], ["b.txt", "a.txt"], id="several"),
    pytest.param(("b.txt", "a.txt"), ["b.txt", "a.txt"], id="in their order"),
    pytest.param("{b,a}.txt", ["b.txt", "a.txt"], id="alternatives"),
    pytest.param(
      "{b,{a,in/c}}.txt", ["b.txt", "a.txt", "in/c.txt"], id="nested"
    ),
    pytest.param("{?,in/*}.txt", ["a.txt", "b.txt", "in/c.txt"], id="patterns"),
    # As a pattern it would be `x.txt` and `y.txt`.
    pytest.param("{x,y}.txt", ["{x,y}.txt"], id="path with braces"),
    pytest.param("{a}.txt", ["{a}.txt"], id="no alternatives"),
  ],
)
def test_finds(folder, files, expected):
  def at(start):
    if isinstance(files, str):
      return f"{start}/{files}"
    return [f"{start}/{each}" for each in files]

  for start in (str(folder), "~"):
    found = record_files.find(at(start), field="Mine.files")
    assert found == tuple(str(folder / each) for each in expected)


@pytest.mark.parametrize(
  "pattern", ["none-*", "c.txt", "folder.txt", "{a,none}.txt"]
)
def test_an_error_names_field_and_pattern(folder, pattern):
  name = "none" if "{" in pattern else pattern[:4]
  with pytest.raises(
    FileNotFoundError,
    match=rf"^Mine\.files: no file has the name '.*/{name}.*'; give a",
  ):
    record_files.find(
      [f"{folder}/a.txt", f"{folder}/{pattern}"], field="Mine.files"
    )
