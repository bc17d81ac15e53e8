"""Tests for the fields of `quantization_config`."""

import jax.numpy as jnp
import pytest

from paxon.layers.models.hugging_face import (
  families,
  family,
)
from paxon.layers.models.hugging_face.files import quantized_config
from paxon.layers.models.hugging_face.golden_models import golden_case

Form = quantized_config.Form
_GPTQ = {"quant_method": "gptq", "bits": 4}
_WEIGHTS = {"num_bits": 4, "strategy": "group", "group_size": 32}
_PACKED = {
  "quant_method": "compressed-tensors",
  "format": "pack-quantized",
  "config_groups": {"group_0": {"targets": ["Linear"], "weights": _WEIGHTS}},
}


def _with_weights(**changes):
  group = {"targets": ["Linear"], "weights": _WEIGHTS | changes}
  return {"config_groups": {"group_0": group}}


def _parse(given, **config):
  return quantized_config.parse({"quantization_config": given, **config})


# As published on the Hub.
_PUBLISHED = {
  "gptq": {
    "batch_size": 1,
    "bits": 4,
    "block_name_to_quantize": None,
    "cache_block_outputs": True,
    "damp_percent": 0.01,
    "dataset": None,
    "desc_act": False,
    "exllama_config": {"version": 1},
    "group_size": 128,
    "max_input_length": None,
    "model_seqlen": None,
    "module_name_preceding_first_block": None,
    "modules_in_block_to_quantize": None,
    "pad_token_id": None,
    "quant_method": "gptq",
    "sym": True,
    "tokenizer": None,
    "true_sequential": True,
    "use_cuda_fp16": False,
    "use_exllama": True,
  },
  "gptqmodel": {
    "bits": 4,
    "checkpoint_format": "gptq",
    "desc_act": True,
    "dynamic": {
      r"-:.*\.experts\..*": {},
      r"+:.*\.down_proj": {"bits": 8, "group_size": 64},
    },
    "group_size": 32,
    "lm_head": False,
    "meta": {"damp_percent": 0.1, "quantizer": ["gptqmodel:1.4.4"]},
    "pack_dtype": "int32",
    "quant_method": "gptq",
    "sym": True,
  },
  "awq": {
    "bits": 4,
    "group_size": 128,
    "modules_to_not_convert": None,
    "quant_method": "awq",
    "version": "gemm",
    "zero_point": True,
  },
  "auto-round": {
    "amp": True,
    "autoround_version": "0.5.1",
    "bits": 4,
    "data_type": "int",
    "group_size": 128,
    "iters": 200,
    "packing_format": "auto_round:auto_gptq",
    "quant_method": "auto-round",
    "sym": True,
  },
  "bitsandbytes": {
    "_load_in_4bit": True,
    "_load_in_8bit": False,
    "bnb_4bit_compute_dtype": "bfloat16",
    "bnb_4bit_quant_storage": "uint8",
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True,
    "llm_int8_enable_fp32_cpu_offload": False,
    "llm_int8_has_fp16_weight": False,
    "llm_int8_skip_modules": None,
    "llm_int8_threshold": 6.0,
    "load_in_4bit": True,
    "load_in_8bit": False,
    "quant_method": "bitsandbytes",
  },
  "bitsandbytes without a method": {"load_in_8bit": True},
  "deepseek": {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "scale_fmt": "ue8m0",
    "weight_block_size": [128, 128],
  },
  "autofp8": {
    "activation_scheme": "static",
    "ignored_layers": ["lm_head"],
    "kv_cache_scheme": "static",
    "quant_method": "fp8",
  },
  "fbgemm": {
    "activation_scale_ub": 1200.0,
    "modules_to_not_convert": ["model.layers.0.mlp"],
    "quant_method": "fbgemm_fp8",
  },
  "compressed": {
    "config_groups": {
      "group_0": {
        "input_activations": {
          "dynamic": True,
          "num_bits": 8,
          "strategy": "token",
          "type": "float",
        },
        "output_activations": None,
        "targets": ["Linear"],
        "weights": {
          "actorder": None,
          "block_structure": None,
          "dynamic": False,
          "group_size": None,
          "num_bits": 8,
          "observer": "minmax",
          "observer_kwargs": {},
          "strategy": "channel",
          "symmetric": True,
          "type": "float",
        },
      }
    },
    "format": "float-quantized",
    "global_compression_ratio": 1.4,
    "ignore": ["re:.*lm_head", "re:vision_model.*"],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "frozen",
    "sparsity_config": {"format": "dense", "global_sparsity": 0.1},
    "transform_config": {},
    "version": "0.12.2",
  },
}


@pytest.mark.parametrize("name", _PUBLISHED)
def test_published_fields_are_read(name):
  config = golden_case.read("llama2").config
  given = config | {"quantization_config": _PUBLISHED[name]}
  assert families.find(config).names(given).quantization.forms


def test_storages():
  scheme = _parse(_PUBLISHED["gptqmodel"], torch_dtype="float16")
  assert scheme.dtype == jnp.float16
  found = {
    name: scheme.find(f"model.layers.0.mlp.{name}", [Form.GPTQ])
    for name in ("up_proj", "down_proj", "experts.0.down_proj")
  }
  blocks = {name: (each.bits, each.blocks) for name, each in found.items()}
  assert blocks == {
    "up_proj": (4, ((1, 32),)),
    "down_proj": (8, ((1, 64),)),
    # The first pattern decides.
    "experts.0.down_proj": (4, ((1, 32),)),
  }
  assert {each.zero_offset for each in found.values()} == {1}
  (storage,) = [
    each for _, each in _parse({**_GPTQ, "format": "gptq_v2"}).storages
  ]
  assert storage.zero_offset == 0
  assert _parse(_GPTQ, text_config={"dtype": "float32"}).dtype == jnp.float32


def test_groups_are_found_as_compressed_tensors_does():
  def group(targets, bits):
    return {"targets": targets, "weights": _WEIGHTS | {"num_bits": bits}}

  groups = {
    "a": group(["Linear"], 4),
    "b": group(["re:.*down_proj", "re:.*gate"], 8),
    "c": group(["model.layers.1.mlp.down_proj"], 3),
    "d": {"targets": ["re:.*self_attn$"], "weights": None},
  }
  scheme = _parse(_PACKED | {"config_groups": groups})
  for name, bits in (
    ("model.layers.0.mlp.up_proj", 4),
    ("model.layers.0.mlp.down_proj", 8),
    ("model.layers.1.mlp.down_proj", 3),
    ("model.layers.11.mlp.down_proj", 8),
  ):
    found = scheme.find(name, [Form.PACKED])
    assert found.bits == bits, name
  groups = {"b": group(["re:.*down_proj"], 8)}
  scheme = _parse(_PACKED | {"config_groups": groups})
  assert scheme.find("model.layers.0.mlp.up_proj", [Form.PACKED]) is None


@pytest.mark.parametrize(
  ("given", "message"),
  [
    ({}, r"quantization_config is \{\}; llama supports only a quant_method of"),
    ("gptq", "quantization_config is 'gptq'"),
    (
      {"quant_method": "hqq"},
      "quant_method is 'hqq'; llama supports only auto",
    ),
    ({"quant_method": ["gptq"]}, r"quant_method is .*'gptq'"),
    (_GPTQ | {"bits": 5}, "bits is 5; gptq supports only 2 or 3 or 4 or 8"),
    (_GPTQ | {"bits": None}, "bits is None; gptq supports only 2"),
    (_GPTQ | {"group_size": 0}, "group_size is 0; .* positive integer or -1"),
    (_GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'"),
    (_GPTQ | {"is_marlin_format": True}, "is_marlin_format is True, an unkn"),
    (_GPTQ | {"rotation": "hadamard"}, "rotation is 'hadamard', an unknown"),
    (_GPTQ | {"pack_dtype": "int16"}, "pack_dtype is 'int16'; .* 'int32'"),
    (_GPTQ | {"dynamic": {"(": {}}}, r"dynamic is .*valid patterns, and '\('"),
    (_GPTQ | {"dynamic": {"a": {"bits": 7}}}, r"dynamic\['a'\].bits is 7"),
    ({"quant_method": "awq", "bits": 8}, "bits is 8; awq supports only 4"),
    ({"quant_method": "awq", "version": "gemv_fast"}, "version is 'gemv_fast'"),
    ({"quant_method": "awq", "backend": "llm-awq"}, "backend is 'llm-awq'"),
    (
      {"quant_method": "bitsandbytes", "bnb_4bit_quant_type": "int4"},
      "bnb_4bit_quant_type is 'int4'",
    ),
    ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt is 'e5m2'; fp8 supports"),
    (
      {"quant_method": "fp8", "weight_block_size": [128]},
      r"weight_block_size is \[128\]; fp8 supports only two positive integers",
    ),
    (
      {"quant_method": "fp8", "modules_to_not_convert": "lm_head"},
      "modules_to_not_convert is 'lm_head'; fp8 supports only a list of names",
    ),
    (_PACKED | {"format": "marlin-24"}, "format is 'marlin-24'; compressed"),
    (_PACKED | {"format": "nvfp4-pack-quantized"}, "is 'nvfp4-pack-quantized'"),
    (
      _PACKED | {"sparsity_config": {"format": "sparse-24-bitmask"}},
      "sparsity_config.format is 'sparse-24-bitmask'; .* only 'dense'",
    ),
    (
      _PACKED | {"transform_config": {"config_groups": {"R1": {}}}},
      "transform_config is .* supports only an empty one",
    ),
    (
      _PACKED | {"config_groups": {"W4A16": ["Linear"]}},
      r"config_groups.W4A16 is \['Linear'\]; .* supports only an object",
    ),
    (_PACKED | _with_weights(num_bits=9), "weights.num_bits is 9"),
    (_PACKED | _with_weights(type="float"), "weights.type is 'float'"),
    (_PACKED | _with_weights(strategy="tensor_group"), "is 'tensor_group'"),
    (_PACKED | _with_weights(actorder=True), "actorder is True"),
    (_PACKED | _with_weights(dynamic=True), "dynamic is True"),
    (_PACKED | _with_weights(block_size=3), "block_size is 3, an unknown"),
  ],
)
def test_other_values_are_rejected_by_name(given, message):
  config = golden_case.read("llama2").config
  with pytest.raises(family.UnsupportedConfigError, match=message) as error:
    families.find(config).names(config | {"quantization_config": given})
  assert str(error.value).startswith("config.json: quantization_config")
