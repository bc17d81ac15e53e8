"""Weights that a model does not use are in its export, as in the import."""

import json
import os

import numpy as np
import pytest
from safetensors import numpy as safetensors_numpy

from paxon.layers.models.hugging_face import families, golden_case
from paxon.tools import hf_main

_FILE = "model.safetensors"


def _run(*argv):
  return hf_main.main([os.fspath(arg) for arg in argv])


@pytest.mark.parametrize(
  ("case", "unused"),
  [
    ("bert_untied", {"cls.predictions.bias": (64,)}),
    (
      "bert_encoder",
      {"pooler.dense.bias": (8,), "pooler.dense.weight": (8, 8)},
    ),
    ("bert", {"cls.seq_relationship.weight": (2, 8)}),
    ("wav2vec2", {"wav2vec2.masked_spec_embed": (8,)}),
  ],
)
def test_weights_without_a_use_are_exported(case, unused, tmp_path, capsys):
  source, run, back = (tmp_path / name for name in ("source", "run", "back"))
  config = {**golden_case.read(case).config, "dtype": "float32"}
  tensors = families.find(config).names(config).tensors
  shapes = {name: tensor.shape for name, tensor in tensors.items()} | unused
  source.mkdir()
  safetensors_numpy.save_file(
    {name: golden_case.weight(name, shape) for name, shape in shapes.items()},
    source / _FILE,
    metadata={"format": "pt"},
  )
  (source / "config.json").write_text(json.dumps(config))
  assert _run("import", source, "--to", run) == 0
  printed = capsys.readouterr().out
  assert f"not used by the model: {', '.join(unused)}\n" in printed
  assert _run("export", run, "--to", back) == 0
  assert (back / _FILE).read_bytes() == (source / _FILE).read_bytes()
  half = tmp_path / "half"
  assert _run("export", run, "--to", half, "--dtype=bfloat16") == 0
  found = safetensors_numpy.load_file(half / _FILE)
  assert found.keys() == shapes.keys()
  assert {value.dtype for value in found.values()} == {np.dtype("bfloat16")}
