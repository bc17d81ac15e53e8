"""Tests for weights in fp8, and for damaged indices."""

import json

from etils import epath
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import numpy as safetensors_numpy

from paxon.layers.models.hugging_face import deepseek
from paxon.layers.models.hugging_face.files import weight_files
from paxon.layers.models.hugging_face.golden_models import golden_case

_NAME = "model.layers.1.mlp.experts.3.gate_proj.weight"


def _names():
  # More than one block of 128 x 128, and parts of blocks.
  config = {
    **golden_case.read("deepseek_v3").config,
    "hidden_size": 160,
    "moe_intermediate_size": 136,
    "quantization_config": {
      "quant_method": "fp8",
      "weight_block_size": [128, 128],
    },
  }
  return deepseek.DEEPSEEK_V3.names(config)


def _write(folder):
  """Writes a model with projections in fp8; returns tensors and values."""
  random, stored, expected = np.random.RandomState(0), {}, {}
  for name, tensor in _names().tensors.items():
    x = golden_case.weight(name, tensor.shape)
    if not name.endswith("_bias"):
      x = x.astype(jnp.bfloat16)
    stored[name] = expected[name] = x
    if "_proj" in name:
      scales = random.uniform(0.5, 2, [-(-size // 128) for size in x.shape])
      stored[name] = x.astype(jnp.float8_e4m3fn)
      stored[f"{name}_scale_inv"] = scales.astype(np.float32)
      factors = np.kron(scales.astype(np.float32), np.ones((128, 128)))
      factors = factors[: x.shape[0], : x.shape[1]]
      product = stored[name].astype(np.float64) * factors
      expected[name] = product.astype(np.float32).astype(jnp.bfloat16)
  _save(folder, stored)
  return stored, expected


def _save(folder, tensors):
  safetensors_numpy.save_file(tensors, folder / "model.safetensors")


def test_fp8_is_read_as_its_values(tmp_path):
  _, expected = _write(tmp_path)
  files = weight_files.find(epath.Path(tmp_path), names=_names())
  files.check()
  for name, x in expected.items():
    assert files.entry(name).numpy_dtype == x.dtype
    rows = files.read_rows(name, 0, x.shape[0])
    np.testing.assert_array_equal(rows, x, err_msg=name)
  # Rows that begin within a block.
  rows = files.read_rows(_NAME, 120, 136)
  np.testing.assert_array_equal(rows, expected[_NAME][120:])


@pytest.mark.parametrize(
  ("name", "value", "message"),
  [
    (f"{_NAME}_scale_inv", None, f"fp8 and has no {_NAME}_scale_inv"),
    (_NAME, None, f"{_NAME}_scale_inv has no {_NAME}"),
    (
      f"{_NAME}_scale_inv",
      np.ones((2, 1), np.float32),
      r"has shape \[136, 160\] and .*_scale_inv \[2, 1\]",
    ),
  ],
)
def test_fp8_that_does_not_fit(tmp_path, name, value, message):
  stored, _ = _write(tmp_path)
  changed = {**stored, name: value}
  _save(tmp_path, {k: v for k, v in changed.items() if v is not None})
  with pytest.raises(weight_files.WeightsError, match=message):
    weight_files.find(epath.Path(tmp_path), names=_names())


@pytest.mark.parametrize(
  "name", ["../outside/x.safetensors", "/etc/x.safetensors", "a/b", "..", 5]
)
def test_an_index_names_files_of_its_folder_only(tmp_path, name):
  index = {"weight_map": {"a": name}}
  (tmp_path / weight_files.INDEX).write_text(json.dumps(index))
  with pytest.raises(weight_files.WeightsError, match="in the same folder"):
    weight_files.find(epath.Path(tmp_path), names=_names())


def test_the_number_of_an_expert_has_any_number_of_digits(tmp_path):
  stored, _ = _write(tmp_path)
  name = f"model.layers.1.mlp.experts.{'9' * 5000}.x"
  _save(tmp_path, {**stored, name: np.ones(1, np.float32)})
  found = weight_files.find(epath.Path(tmp_path), names=_names())
  with pytest.raises(
    weight_files.WeightsError, match=r"9\.x is not part of the"
  ):
    found.check()
