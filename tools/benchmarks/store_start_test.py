"""Tests of the comparison of starts."""

import json

import fsspec
import pytest

from paxon.inputs.sources import stored_file
from paxon.tools.benchmarks import store_start


@pytest.fixture(name="files")
def _files(tmp_path, monkeypatch):
  """The same files on a disk and in a store, with small chunks."""
  monkeypatch.setattr(stored_file, "_CHUNK", 50_000)
  monkeypatch.setenv("PAXON_DATA_CACHE_BYTES", "120000")
  # The command sets it.
  monkeypatch.setenv("PAXON_DATA_CACHE", str(tmp_path))
  store = fsspec.filesystem("memory")
  for name in "ab":
    lines = [json.dumps({"text": f"{name} {i} " * 90}) for i in range(500)]
    (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    store.put(str(tmp_path / f"{name}.jsonl"), f"/bench/{name}.jsonl")
  yield f"{tmp_path}/*.jsonl", "memory://bench/*.jsonl"
  store.rm("/bench", recursive=True)


def test_reads_the_first_chunks_and_keeps_the_bound(files, capsys):
  assert store_start.main([*files, "--window=20", "--batches=50"]) == 0
  found = capsys.readouterr().out
  assert "after 50,000 bytes" in found
  assert "50, 0 different" in found
  assert "at most 120,000" not in found
  assert "of 120,000 bytes" in found


def test_other_batches_are_an_error(files, capsys):
  with fsspec.open("memory://bench/a.jsonl", "wb") as file:
    file.write(b'{"text": "other"}\n' * 1000)
  assert store_start.main([*files, "--window=20", "--batches=50"]) == 1
  assert " 0 different" not in capsys.readouterr().out
