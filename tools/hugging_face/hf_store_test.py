"""Tests for weights of Hugging Face in a store and of the Hub."""

import json
import os

import fsspec
import numpy as np
import pytest
from safetensors import numpy as safetensors_numpy

from paxon.inputs import stores
from paxon.inputs.store_servers import servers
from paxon.layers.models.hugging_face import families
from paxon.layers.models.hugging_face.files import safetensors_file
from paxon.layers.models.hugging_face.golden_models import golden_case
from paxon.tools.hugging_face import hf_main


@pytest.fixture(scope="module", name="bucket")
def _bucket(tmp_path_factory):
  """The URL of a bucket."""
  with servers.run("s3", tmp_path_factory.mktemp("s3")) as store:
    yield store.url


def _write(folder) -> None:
  config = {**golden_case.read("llama3").config, "dtype": "float32"}
  names = families.find(config).names(config)
  tensors = {
    name: golden_case.weight(name, tensor.shape).astype(np.float32)
    for name, tensor in names.tensors.items()
  }
  folder.mkdir()
  safetensors_numpy.save_file(
    tensors, folder / "model.safetensors", metadata={"format": "pt"}
  )
  (folder / "config.json").write_text(json.dumps(config))
  (folder / "tokenizer.json").write_text("{}")


def _run(*argv) -> int:
  return hf_main.main([os.fspath(arg) for arg in argv])


def test_round_trip_through_a_store(tmp_path, bucket, capsys, monkeypatch):
  source, run = tmp_path / "source", tmp_path / "run"
  _write(source)
  store = fsspec.filesystem("s3")
  store.put(str(source), f"{bucket}/source", recursive=True)
  read = []
  read_range = safetensors_file._read_range

  def record(path, begin, end):
    if "://" in os.fspath(path):
      read.append(end - begin)
    return read_range(path, begin, end)

  monkeypatch.setattr(safetensors_file, "_read_range", record)
  assert _run("import", f"{bucket}/source", "--to", run) == 0
  size = (source / "model.safetensors").stat().st_size
  # Each tensor is read once, and not the file for each.
  assert size * 0.9 < sum(read) < size * 1.2
  stored = json.loads((run / "hugging_face" / "source.json").read_text())
  assert stored == {"source": f"{bucket}/source"}

  uploaded = []
  upload = stores.upload

  def record_upload(file, path):
    uploaded.append(path.rpartition("/")[2])
    upload(file, path)

  monkeypatch.setattr(stores, "upload", record_upload)
  capsys.readouterr()
  assert _run("export", run, "--to", f"{bucket}/back") == 0
  assert f"to {bucket}/back" in capsys.readouterr().out
  assert uploaded[-1] == "config.json"
  names = {path.name for path in source.iterdir()}
  assert {n.rpartition("/")[2] for n in store.ls(f"{bucket}/back")} == names
  for name in names:
    assert store.cat(f"{bucket}/back/{name}") == (source / name).read_bytes()
  assert _run("export", run, "--to", f"{bucket}/back") == 2
  assert "holds weights; pass another" in capsys.readouterr().err


def test_a_missing_bucket_is_one_line(bucket, tmp_path, capsys):
  del bucket
  assert _run("import", "s3://none/model", "--to", tmp_path / "run") == 2
  (line,) = capsys.readouterr().err.splitlines()
  assert line.startswith("s3://none/model")
  assert "exist" in line


def test_a_model_of_the_hub_is_its_snapshot(tmp_path, capsys, monkeypatch):
  source = tmp_path / "models--org--name" / "snapshots" / "1"
  source.parent.mkdir(parents=True)
  _write(source)
  asked = []

  def find_snapshot(path):
    asked.append(path)
    return str(source)

  monkeypatch.setattr(stores, "find_snapshot", find_snapshot)
  monkeypatch.setattr(stores, "check_package", lambda path: None)
  run = tmp_path / "run"
  assert _run("import", "hf://org/name", "--to", run) == 0
  assert asked == ["hf://org/name"]
  assert "llama" in capsys.readouterr().out
  stored = json.loads((run / "hugging_face" / "source.json").read_text())
  assert stored == {"source": "org/name"}


@pytest.mark.parametrize("name", ["hf://name", "hf://"])
def test_rejects_names_that_are_no_models(name, tmp_path, capsys):
  pytest.importorskip("huggingface_hub", reason="needs huggingface_hub")
  assert _run("import", name, "--to", tmp_path / "run") == 2
  (line,) = capsys.readouterr().err.splitlines()
  assert line.startswith(f"{name} is no model of the Hub")
