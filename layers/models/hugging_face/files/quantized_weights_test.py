"""Tests for quantized weights, with files of the libraries of each format."""

import json

from etils import epath
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers.models.hugging_face.files import (
  quantized_config,
  quantized_weights,
  safetensors_file,
)
from paxon.layers.models.hugging_face.golden_models import golden_case

_FILE = golden_case.FOLDER / "quantized" / "weights.npz"
_STEM = "model.layers.0.mlp.up_proj"
_NAME = f"{_STEM}.weight"
_CASES = sorted(
  name
  for name in np.load(_FILE).files
  if not name.endswith(("dtype", "values"))
)


def _config(content):
  length = int.from_bytes(content[:8], "little")
  header = json.loads(content[8 : 8 + length])
  return json.loads(header["__metadata__"]["config"])


def _find(folder, config, *, shape, dtype=None, names=(_NAME,)):
  entries = {}
  for path in epath.Path(folder).iterdir():
    for name, entry in safetensors_file.read_header(path).items():
      entries[name] = path, entry
  return quantized_weights.find(
    entries,
    quantized_config.parse({"quantization_config": config}),
    shapes=dict.fromkeys(names, shape),
    dtype=dtype,
  )


@pytest.mark.parametrize("case", _CASES)
def test_equals_the_library(case, tmp_path):
  stored = np.load(_FILE)
  content = stored[case].tobytes()
  (tmp_path / "model.safetensors").write_bytes(content)
  dtype = jnp.dtype(str(stored[f"{case}/dtype"]))
  expected = stored[f"{case}/values"].astype(dtype)
  # With the shape that the model has, and without.
  for names in ((_NAME,), ()):
    found, used = _find(
      tmp_path,
      _config(content),
      shape=expected.shape,
      dtype=dtype,
      names=names,
    )
    weight = found[_NAME]
    assert weight.shape == expected.shape
    assert weight.stored[1].numpy_dtype == dtype
    assert all(name.startswith(_STEM) for name in used)
    rows = weight.read_rows(0, len(expected))
    assert rows.dtype == dtype
    np.testing.assert_array_equal(
      rows.astype(np.float32), expected.astype(np.float32)
    )
  # Parts of words and of blocks.
  for start, stop in ((1, 4), (3, len(expected)), (2, 2)):
    np.testing.assert_array_equal(
      weight.read_rows(start, stop).astype(np.float32),
      expected[start:stop].astype(np.float32),
    )
