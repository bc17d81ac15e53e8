"""Tests for documents in text files."""

import pickle

import pytest

from paxon.inputs.sources import text_files

_FILES = {
  "a.txt": b"one\n\n\ntwo\nthree \n \t\r\n\n\xff four",
  "b/c.txt": b"five\r\n\r\nsix\n",
  "blank.txt": b" \n\n",
  "empty.txt": b"",
}


@pytest.fixture
def folder(tmp_path):
  (tmp_path / "b").mkdir()
  for name, data in _FILES.items():
    (tmp_path / name).write_bytes(data)
  return tmp_path


@pytest.mark.parametrize(
  ("documents", "expected"),
  [
    ("FILE", [_FILES["a.txt"], _FILES["b/c.txt"]]),
    ("LINE", [b"one", b"two", b"three ", b"\xff four", b"five\r", b"six"]),
    ("PARAGRAPH", [b"one", b"two\nthree ", b"\xff four", b"five\r", b"six\n"]),
  ],
)
def test_documents(folder, documents, expected):
  source = text_files.TextFiles(
    files=f"{folder}/**/*.txt", documents=text_files.Documents[documents]
  )
  assert [source[i] for i in range(len(source))] == expected
  copy = pickle.loads(pickle.dumps(source))
  assert "_parts" not in copy.__dict__
  assert copy[1] == expected[1]
  with pytest.raises(IndexError, match=rf"no document {len(expected)} of"):
    _ = source[len(expected)]


@pytest.mark.parametrize(
  ("files", "error", "message"),
  [
    ("", ValueError, r"files must not be empty"),
    ("*.rst", FileNotFoundError, r"no file has the name '.*rst'; give a path"),
    ("[be]*.txt", ValueError, r"holds no documents, only files that are empty"),
  ],
)
def test_nothing_to_read_is_an_error(folder, files, error, message):
  with pytest.raises(error, match=message):
    len(text_files.TextFiles(files=f"{folder}/{files}" if files else ""))


def test_a_file_that_becomes_shorter_is_an_error(folder):
  source = text_files.TextFiles(
    files=f"{folder}/a.txt", documents=text_files.Documents.LINE
  )
  assert len(source) == 4
  (folder / "a.txt").write_bytes(_FILES["a.txt"][:8])
  assert source[0] == b"one"
  with pytest.raises(
    ValueError, match=r"a\.txt has become shorter since .*cut"
  ):
    _ = source[1]
