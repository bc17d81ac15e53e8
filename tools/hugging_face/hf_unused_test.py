"""What an export has of its run: unused weights, and adapters."""

import json
import os
from unittest import mock

from etils import epath
import numpy as np
import pytest
from safetensors import numpy as safetensors_numpy

from paxon.layers.models.hugging_face import families
from paxon.layers.models.hugging_face.golden_models import golden_case
from paxon.quantization import lora
from paxon.runner.checkpoints import stored_checkpoint
from paxon.tools.hugging_face import hf_export, hf_main

_FILE = "model.safetensors"


def _run(*argv):
  return hf_main.main([os.fspath(arg) for arg in argv])


@pytest.mark.nightly(keep=1)
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


def test_stored_kernels_without_an_adapter_are_no_kind_of_it(tmp_path):
  """Experts of QLoRA: their kernels are stored quantized, without adapters."""
  einsum = "task.model.stack.blocks[0]."
  lines = (
    f"{einsum}attention.einsum.lora = paxon.quantization.lora.Lora(rank=2,"
    " alpha=3.0, kind=paxon.quantization.lora.Kind.RSLORA)",
    f"{einsum}feed_forward.experts.einsum.lora = None",
  )
  (tmp_path / "config.txt").write_text("\n".join([*lines, ""]))
  checkpoint = mock.create_autospec(
    stored_checkpoint.StoredCheckpoint,
    instance=True,
    run_path=epath.Path(tmp_path),
  )
  checkpoint.variables.return_value = {
    "params/stack/attention/query/lora_a": None
  }
  found = hf_export.find_adapter(checkpoint)
  assert found == lora.Lora(rank=2, alpha=3.0, kind=lora.Kind.RSLORA)
