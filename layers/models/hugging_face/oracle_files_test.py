"""Reads what transformers writes, and lets it read what we write.

Run as `oracle_test`, and skipped where torch is not installed.
"""

import importlib.util
import json

from etils import epath
from flax import traverse_util
import jax
import numpy as np
import pytest

from paxon.layers.models.hugging_face import families
from paxon.layers.models.hugging_face.files import (
  quantized_layouts,
  safetensors_file,
  weight_files,
)
from paxon.layers.models.hugging_face.golden_models import (
  golden_case,
  testing,
)

pytestmark = [
  pytest.mark.skipif(
    importlib.util.find_spec("torch") is None
    or importlib.util.find_spec("transformers") is None,
    reason="torch and transformers are not here; --config=oracle brings them",
  ),
  pytest.mark.filterwarnings("ignore"),
]

_CASES = sorted(path.stem for path in golden_case.FOLDER.glob("*.npz"))
# A head that is not tied has no use for the bias of one that is, which only
# transformers has then; the pooler is ignored.
_UNUSED = {
  "bert_encoder": {"pooler.dense.bias", "pooler.dense.weight"},
  "bert_untied": {"cls.predictions.bias"},
}


def _model(name):
  from paxon.layers.models.hugging_face.golden_models import make_goldens

  return make_goldens.torch_model(name)


@pytest.mark.parametrize("name", _CASES)
def test_files_of_transformers_are_read(name, tmp_path):
  # Small enough for several files and an index.
  _model(name).save_pretrained(tmp_path, max_shard_size="20KB")
  assert (tmp_path / weight_files.INDEX).exists()
  config = json.loads((tmp_path / "config.json").read_text())
  names = families.find(config).names(config)
  files = weight_files.find(epath.Path(tmp_path), names=names)
  files.check()
  for tensor in names.tensors.values():
    rows = files.read_rows(tensor.name, 0, tensor.shape[0])
    expected = golden_case.weight(tensor.name, tensor.shape)
    np.testing.assert_array_equal(rows, expected, err_msg=tensor.name)


def test_mxfp4():
  import torch  # pyrefly: ignore[missing-import]
  from transformers.integrations import (  # pyrefly: ignore[missing-import]
    mxfp4,
  )

  random = np.random.RandomState(0)
  blocks = random.randint(0, 256, (3, 8, 4, 16)).astype(np.uint8)
  scales = random.randint(100, 140, (3, 8, 4)).astype(np.uint8)
  expected = mxfp4.convert_moe_packed_tensors(
    torch.from_numpy(blocks), torch.from_numpy(scales)
  )
  found = quantized_layouts.from_mxfp4(blocks, scales)
  np.testing.assert_array_equal(
    found.astype(np.float32), expected.float().numpy()
  )


def test_t5_without_a_head_in_the_file(tmp_path):
  import transformers  # pyrefly: ignore[missing-import]

  from paxon.layers.models.hugging_face.golden_models import make_goldens

  golden = golden_case.read("t5_v1_1")
  cls = transformers.T5ForConditionalGeneration
  tied = cls(cls.config_class(**golden.config)).eval()
  make_goldens.set_weights(tied, {})
  tied.save_pretrained(tmp_path)
  of = families.find(golden.config)
  names = of.names(golden.config)
  files = weight_files.find(epath.Path(tmp_path), names=names)
  assert "lm_head.weight" not in files.entries
  files.check()
  weights = {
    name: jax.device_put(leaf.from_tensors(files.read_rows))
    for name, leaf in names.leaves.items()
  }
  found = of.model(golden.config).apply(
    traverse_util.unflatten_dict(weights, sep="/"),
    *testing.model_args(golden.arrays),
  )
  expected = make_goldens.logits(tied, golden.arrays)
  np.testing.assert_allclose(found, expected, rtol=0, atol=testing.TOLERANCE)
  assert np.abs(expected - golden.arrays["logits"]).max() > 0.1


@pytest.mark.parametrize("name", _CASES)
def test_transformers_reads_our_files(name, tmp_path):
  import torch  # pyrefly: ignore[missing-import]

  model, stored = _model(name), golden_case.read(name)
  tensors = families.find(stored.config).names(stored.config).tensors
  shapes = {each.name: (np.float32, each.shape) for each in tensors.values()}
  path = epath.Path(tmp_path) / weight_files.WEIGHTS
  with safetensors_file.Writer(path, shapes) as writer:
    for tensor, (_, shape) in shapes.items():
      writer.write_rows(tensor, 0, golden_case.weight(tensor, shape))
  model.config.save_pretrained(tmp_path)
  again, report = type(model).from_pretrained(
    tmp_path, output_loading_info=True, dtype=torch.float32
  )
  problems = {kind: set(found) for kind, found in report.items() if found}
  assert problems.pop("missing_keys", set()) == _UNUSED.get(name, set())
  assert not problems
  found = dict(again.named_parameters())
  for parameter, value in model.named_parameters():
    if parameter not in _UNUSED.get(name, set()):
      assert torch.equal(found[parameter], value), parameter
