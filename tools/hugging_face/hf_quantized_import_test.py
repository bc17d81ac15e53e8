"""Tests for imports of quantized weights, packed from the definitions."""

import json
import os

from etils import epath
import numpy as np
import pytest
from safetensors import numpy as safetensors_numpy

from paxon.layers.models.hugging_face import families
from paxon.layers.models.hugging_face.golden_models import golden_case
from paxon.runner.checkpoints import stored_checkpoint
from paxon.tools.hugging_face import hf_main

_LAYER = "model.layers.1.mlp.up_proj"
_GPTQ = {
  "quant_method": "gptq",
  "bits": 4,
  "group_size": 8,
  "desc_act": True,
  "sym": False,
}
_PACKED = {
  "quant_method": "compressed-tensors",
  "format": "pack-quantized",
  "ignore": ["lm_head", "re:.*gate$"],
  "config_groups": {
    "group_0": {
      "targets": ["Linear"],
      "weights": {"num_bits": 4, "strategy": "group", "group_size": 8},
    }
  },
}
_NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True}


def _pack(values, bits):
  """Packs values along the first axis, the first in the lowest bits."""
  each = 32 // bits
  words = values.reshape(-1, each, *values.shape[1:]).astype(np.uint64)
  shifts = np.arange(each, dtype=np.uint64) * np.uint64(bits)
  shifts = shifts.reshape(each, *([1] * (values.ndim - 1)))
  return (words << shifts).sum(1).astype(np.uint32).view(np.int32)


def _to_gptq(random, shape):
  outputs, inputs = shape
  groups = random.permutation(np.arange(inputs) // 8)
  codes = random.randint(0, 16, shape)
  zeros = random.randint(0, 16, (outputs, inputs // 8))
  scales = random.uniform(0.01, 0.02, zeros.shape).astype(np.float16)
  parts = {
    "qweight": _pack(codes.T, 4),
    # Minus one, around zero.
    "qzeros": _pack((zeros - 1) % 16, 4).T,
    "scales": scales.T,
    "g_idx": groups.astype(np.int32),
  }
  values = (codes - zeros[:, groups]) * scales.astype(np.float64)[:, groups]
  return parts, values


def _to_packed(random, shape):
  outputs, inputs = shape
  codes = random.randint(-8, 8, shape)
  scales = random.uniform(0.01, 0.02, (outputs, inputs // 8))
  scales = scales.astype(np.float32)
  parts = {
    "weight_packed": _pack((codes + 8).T, 4).T,
    "weight_scale": scales,
    "weight_shape": np.array(shape, np.int64),
  }
  return parts, codes * np.repeat(scales.astype(np.float64), 8, axis=1)


def _to_nf4(random, shape):
  """Any table of 16 values; a byte has the first in its high bits."""
  table = np.sort(random.uniform(-1, 1, 16)).astype(np.float32)
  codes = random.randint(0, 16, shape)
  flat = codes.reshape(-1)
  absmax = random.uniform(0.1, 0.2, -(-flat.size // 64)).astype(np.float32)
  state = {"quant_type": "nf4", "blocksize": 64, "shape": shape}
  parts = {
    "weight": (flat[::2] << 4 | flat[1::2]).astype(np.uint8)[:, None],
    "weight.absmax": absmax,
    "weight.quant_map": table,
    "weight.quant_state.bitsandbytes__nf4": np.frombuffer(
      json.dumps(state).encode(), np.uint8
    ),
  }
  blocks = np.arange(flat.size) // 64
  values = table.astype(np.float64)[flat] * absmax[blocks]
  return parts, values.reshape(shape)


def _write(folder, case, quantization, pack, *, is_quantized, transposed=False):
  """Writes a model; returns its tensors and the values of all weights."""
  config = golden_case.read(case).config
  config = config | {"dtype": "float32", "quantization_config": quantization}
  random, stored, values = np.random.RandomState(0), {}, {}
  for name, tensor in families.find(config).names(config).tensors.items():
    if is_quantized(name):
      shape = tensor.shape[::-1] if transposed else tensor.shape
      parts, found = pack(random, shape)
      values[name] = found.T if transposed else found
      stem = name.removesuffix("weight")
      stored |= {stem + end: x for end, x in parts.items()}
    else:
      stored[name] = values[name] = golden_case.weight(name, tensor.shape)
  folder.mkdir(exist_ok=True)
  (folder / "config.json").write_text(json.dumps(config))
  _save(folder, stored)
  return stored, values


def _save(folder, tensors):
  kept = {
    name: np.ascontiguousarray(x)
    for name, x in tensors.items()
    if x is not None
  }
  safetensors_numpy.save_file(kept, folder / "model.safetensors")


def _run(*argv):
  return hf_main.main([os.fspath(arg) for arg in argv])


def _is_projection(name):
  return "_proj.weight" in name


@pytest.mark.parametrize(
  ("case", "quantization", "pack", "is_quantized", "form"),
  [
    ("llama2", _GPTQ, _to_gptq, _is_projection, "GPTQ"),
    # One tensor for each expert; routers are plain.
    ("qwen3_moe", _PACKED, _to_packed, _is_projection, "pack-quantized"),
    # Layers whose kernels are stored as [inputs, outputs].
    (
      "gpt2",
      _NF4,
      _to_nf4,
      lambda name: ".c_" in name and "weight" in name,
      "bitsandbytes in 4 bits",
    ),
  ],
)
def test_values_are_imported(
  case, quantization, pack, is_quantized, form, tmp_path, capsys
):
  source, run, back = (tmp_path / name for name in ("source", "run", "back"))
  _, values = _write(
    source,
    case,
    quantization,
    pack,
    is_quantized=is_quantized,
    transposed=case == "gpt2",
  )
  assert _run("import", source, "--to", run) == 0
  count = sum(map(is_quantized, values))
  assert (
    f"dequantized: {count} tensors in {form} to float32; activations are not"
    " quantized\n" in capsys.readouterr().out
  )
  assert _run("export", run, "--to", back) == 0
  found = safetensors_numpy.load_file(back / "model.safetensors")
  assert found.keys() == values.keys()
  for name, x in values.items():
    np.testing.assert_allclose(found[name], x, rtol=1e-6, err_msg=name)
  config = json.loads((back / "config.json").read_text())
  assert "quantization_config" not in config


def test_values_have_the_dtype_of_the_model_or_the_flag(tmp_path):
  source = tmp_path / "source"
  _, values = _write(
    source, "llama2", _GPTQ, _to_gptq, is_quantized=_is_projection
  )
  config = json.loads((source / "config.json").read_text())
  text = json.dumps(config | {"dtype": "bfloat16"})
  (source / "config.json").write_text(text)
  name = "params/stack/layers/blocks_0/feed_forward/up"
  for flags, dtype, rtol in (
    ((), "bfloat16", 2**-8),
    (("--dtype", "float32"), "float32", 1e-6),
  ):
    run = tmp_path / dtype
    assert _run("import", source, "--to", run, *flags) == 0
    stored = stored_checkpoint.find_checkpoint(epath.Path(run))
    found = stored_checkpoint.read_numpy(stored, [name])[name]
    assert found.dtype == dtype
    expected = values[f"{_LAYER}.weight"].T
    found = found[1].astype(np.float64)
    np.testing.assert_allclose(found, expected, rtol=rtol)


def test_tensors_that_do_not_fit(tmp_path, capsys):
  source, to = tmp_path / "source", tmp_path / "run"
  stored, _ = _write(
    source, "llama2", _GPTQ, _to_gptq, is_quantized=_is_projection
  )
  qweight = stored[f"{_LAYER}.qweight"]
  for end, value, message in (
    ("scales", None, f"{_LAYER}.qweight has no {_LAYER}.scales"),
    ("qweight", None, f"{_LAYER}.g_idx has no {_LAYER}.qweight"),
    (
      "qweight",
      qweight[:-1],
      f"{_LAYER}.qweight has shape [3, 48]; GPTQ needs [4, 48] for the weight"
      " [48, 32]",
    ),
    ("qweight", qweight.astype(np.float32), "has dtype F32; GPTQ needs I32"),
    (
      "scales",
      stored[f"{_LAYER}.scales"][:-1],
      f"has shape [4, 48] and {_LAYER}.scales [3, 48]; GPTQ needs [4, 48]",
    ),
    (
      "g_idx",
      np.full(32, 4, np.int32),
      f"{_LAYER}.g_idx has groups 4 to 4, and there are scales of 4",
    ),
    ("weight", np.ones((48, 32), np.float32), f"and {_LAYER}.weight are both"),
    (
      "scales",
      np.full((4, 48), np.nan, np.float16),
      f"{_LAYER}.weight[0, 0] is nan; weights must be finite",
    ),
  ):
    _save(source, stored | {f"{_LAYER}.{end}": value})
    assert _run("import", source, "--to", to) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert f"{source / 'model.safetensors'}: " in line
    assert not (to / "checkpoints" / "0").exists()
  # Without the field, nothing says what they are.
  config = json.loads((source / "config.json").read_text())
  del config["quantization_config"]
  (source / "config.json").write_text(json.dumps(config))
  assert _run("import", source, "--to", to) == 2
  assert "o_proj.weight [32, 32] is missing" in capsys.readouterr().err
