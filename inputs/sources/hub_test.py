"""Tests of `hf://` data and models with a server of the Hub's API."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from paxon.inputs import stores
from paxon.inputs.sources import testing

_LINES = b"".join(
  json.dumps({"text": f"document {i}"}).encode() + b"\n" for i in range(40)
)
_REPOSITORIES = {
  "datasets/org/texts": {
    "data/a.jsonl": _LINES,
    "data/b.jsonl": _LINES,
    "README.md": b"x",
  },
  "models/org/model": {
    "config.json": b"{}",
    "model.safetensors": b"weights",
    "pytorch_model.bin": b"not read",
    "part/config.json": b"{}",
  },
}
# Prints the result or the error of each expression, a line each.
_SCRIPT = """
import json, os, sys
from paxon.inputs import stores
from paxon.inputs.sources import json_lines, record_files
find = lambda path: record_files.find(path, field="Mine.files")
def read(path, index):
  lines = json_lines.JsonLines(files=path)
  return len(lines), lines[index].decode()
def first(path):
  _, text, _ = next(json_lines.JsonLines(files=path).read_shard(0, 0))
  return text.decode()
for code in sys.argv[1:]:
  try:
    result = eval(code)
  except ValueError as error:
    result = f"{type(error).__name__}: {error}"
  except FileNotFoundError as error:
    result = f"FileNotFoundError: {error}"
  print("RESULT", json.dumps(result))
"""


@pytest.fixture(name="hub")
def _hub():
  """The address of a server, and its requests."""
  pytest.importorskip("huggingface_hub", reason="needs huggingface_hub")
  with testing.serve(_REPOSITORIES) as found:
    yield found


def _run(folder, endpoint, *codes, **environment):
  """Returns the results of expressions in a process, as a user starts one."""
  done = subprocess.run(
    [sys.executable, "-c", _SCRIPT, *codes],
    env={
      **os.environ,
      "PYTHONPATH": os.pathsep.join(sys.path),
      "HF_ENDPOINT": endpoint,
      "HF_HOME": str(folder / "home"),
      "HF_HUB_DISABLE_PROGRESS_BARS": "1",
      "PAXON_DATA_CACHE": str(folder / "cache"),
      **environment,
    },
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 0, done.stderr
  lines = done.stdout.splitlines()
  return [json.loads(x[7:]) for x in lines if x.startswith("RESULT ")]


def test_data_and_models_of_a_mirror(tmp_path, hub):
  endpoint, requests = hub
  root = "hf://datasets/org/texts"
  found = _run(
    tmp_path,
    endpoint,
    f"find('{root}/data/*.jsonl')",
    f"find('{root}@main/data/b.jsonl')",
    f"find('{root}/data')",
    f"read('{root}/data/*.jsonl', 50)",
    f"first('{root}/data/*.jsonl')",
    "stores.find_snapshot('hf://org/model')",
    "stores.find_snapshot('hf://org/model@main/part')",
  )
  both = [f"{root}/data/a.jsonl", f"{root}/data/b.jsonl"]
  assert found[:3] == [both, [f"{root}@main/data/b.jsonl"], both]
  assert found[3:5] == [[80, "document 10"], "document 0"]
  folder, part = map(pathlib.Path, found[5:])
  assert (folder / "model.safetensors").read_bytes() == b"weights"
  assert part == folder / "part"
  # Only the formats that are read.
  assert not (folder / "pytorch_model.bin").exists()
  # What is in the cache needs no network.
  before = len(requests)
  offline = _run(
    tmp_path,
    endpoint,
    "stores.find_snapshot('hf://org/model')",
    HF_HUB_OFFLINE="1",
  )
  assert offline == found[5:6]
  assert len(requests) == before


def test_errors_are_one_line(tmp_path, hub):
  root = "hf://datasets/org"
  errors = _run(
    tmp_path,
    hub[0],
    f"find('{root}/none/*.jsonl')",
    f"find('{root}/texts/none/*.jsonl')",
    f"find('{root}/texts/none.jsonl')",
    "stores.find_snapshot('hf://org/none')",
    "stores.find_snapshot('hf://org')",
  )
  for error, message in zip(
    errors,
    [
      "StoreError: hf://datasets/org/none/*.jsonl cannot be listed: it, or",
      "FileNotFoundError: Mine.files: no file has the name 'hf://datasets/",
      "FileNotFoundError: Mine.files: no file has the name 'hf://datasets/",
      "StoreError: hf://org/none cannot be downloaded: 404",
      "StoreError: hf://org is no model of the Hub; give hf://org/name, or",
    ],
    strict=True,
  ):
    assert error.startswith(message)
    assert "\n" not in error


def test_an_offline_hub_is_one_line(tmp_path, hub):
  errors = _run(
    tmp_path,
    hub[0],
    "find('hf://datasets/org/texts/data/*.jsonl')",
    "stores.find_snapshot('hf://org/model')",
    HF_HUB_OFFLINE="1",
  )
  for error in errors:
    assert "it is not in the cache of the Hub, which is not asked" in error
    assert error.endswith("(HF_HUB_OFFLINE is set).")


def test_a_hub_that_cannot_be_reached_is_one_line(tmp_path):
  pytest.importorskip("huggingface_hub", reason="needs huggingface_hub")
  (error,) = _run(
    tmp_path, "http://127.0.0.1:9", "stores.find_snapshot('hf://org/model')"
  )
  assert error.startswith("StoreError: hf://org/model cannot be downloaded: it")
  assert "Connection refused" in error
  assert "\n" not in error


@pytest.mark.parametrize("path", ["hf://", "hf://org", "/a/b", "hf://a//b"])
def test_rejects_other_names(path):
  pytest.importorskip("huggingface_hub", reason="needs huggingface_hub")
  with pytest.raises(stores.StoreError, match="is no model of the Hub; give"):
    stores.find_snapshot(path)
