"""Regenerates the golden quantized weights with the libraries of each format.

  P=paxon.layers.models.hugging_face.golden_models
  python -m $P.make_quantized_goldens

It needs torch, transformers, autoawq 0.2.9, bitsandbytes 0.50,
compressed-tensors 0.20 and gptqmodel 7.7, which run on CPUs. Each case is a
safetensors file with one weight, as the library packs it, whose metadata has
the `quantization_config`; and the weight as the library dequantizes it.
"""

from collections.abc import Mapping
import io
import json
import pkgutil
from typing import Any

import compressed_tensors  # pyrefly: ignore[missing-import]
from compressed_tensors import (  # pyrefly: ignore[missing-import]
  quantization,
)
from compressed_tensors.quantization.utils import (  # pyrefly: ignore[missing-import]
  helpers,
)
import numpy as np
from safetensors import torch as safetensors_torch
import torch  # pyrefly: ignore[missing-import]
from transformers.integrations import (  # pyrefly: ignore[missing-import]
  finegrained_fp8,
)

from paxon.layers.models.hugging_face.golden_models import golden_case

FILE = golden_case.FOLDER / "quantized" / "weights.npz"
# Libraries without a lock are found by name: only this module needs them.
_STEM = "model.layers.0.mlp.up_proj"

# Tensors by the ends of their names, the configuration, and the weight.
_Case = tuple[Mapping[str, Any], Mapping[str, Any], Any]


def _weight(rows: int, columns: int) -> Any:
  random = np.random.RandomState(rows * columns)
  return torch.from_numpy(random.normal(0, 0.1, (rows, columns))).float()


def _asymmetric(weight: Any, bits: int, groups: Any) -> tuple[Any, Any]:
  """Returns float16 scales and integer zero points, both [R,G]."""
  scales, zeros = [], []
  for group in range(int(groups.max()) + 1):
    part = weight[:, groups == group]
    low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
    scale = ((high - low) / (2**bits - 1)).half().float()
    scales.append(scale)
    # One zero point of each kind that wraps around.
    zero = torch.round(-low / scale).clamp(0, 2**bits - 1)
    zero[0], zero[1] = 0, 2**bits - 1
    zeros.append(zero)
  return torch.stack(scales, 1), torch.stack(zeros, 1)


def _gptq(bits: int, *, desc_act: bool, version: str) -> _Case:
  linear = pkgutil.resolve_name("gptqmodel.nn_modules.qlinear.torch")
  model = pkgutil.resolve_name("gptqmodel.utils.model_dequant")
  plain = torch.nn.Linear(32, 32, bias=False)
  plain.weight.data = _weight(32, 32)
  groups = torch.arange(32) // 16
  if desc_act:
    groups = groups[torch.from_numpy(np.random.RandomState(0).permutation(32))]
  scales, zeros = _asymmetric(plain.weight.data, bits, groups)
  made = linear.TorchLinear(
    bits=bits,
    group_size=16,
    sym=False,
    desc_act=desc_act,
    in_features=32,
    out_features=32,
  )
  made.pack_original(plain, scales, zeros, groups.int())
  made.post_init()
  parts = {
    name: getattr(made, name).clone()
    for name in ("qweight", "qzeros", "scales", "g_idx")
  }
  if version == "gptq":
    # As the first format stores them.
    zeros = model._revert_gptq_v1_qzeros_correction(parts["qzeros"], bits)
    parts["qzeros"] = zeros.contiguous()
  config = {
    "quant_method": "gptq",
    "bits": bits,
    "group_size": 16,
    "desc_act": desc_act,
    "sym": False,
    "checkpoint_format": version,
  }
  return parts, config, made.dequantize_weight().T


def _awq(version: str) -> _Case:
  module = pkgutil.resolve_name(f"awq.modules.linear.{version}")
  plain = torch.nn.Linear(64, 32, bias=False)
  plain.weight.data = _weight(32, 64)
  scales, zeros = _asymmetric(plain.weight.data, 4, torch.arange(64) // 32)
  is_gemm = version == "gemm"
  cls = module.WQLinear_GEMM if is_gemm else module.WQLinear_GEMV
  # The kernel of gemv has no dequantization; the definition does, below.
  codes = torch.round(
    plain.weight.data / scales.repeat_interleave(32, 1)
  ) + zeros.repeat_interleave(32, 1)
  codes = codes.clamp(0, 15)
  values = (codes - zeros.repeat_interleave(32, 1)) * scales.repeat_interleave(
    32, 1
  )
  plain.weight.data = values
  args = (
    (scales.T.contiguous(), zeros.T.contiguous())
    if is_gemm
    else (
      scales,
      zeros,
    )
  )
  made = cls.from_linear(plain, 4, 32, scales=args[0], zeros=args[1])
  parts = {x: getattr(made, x) for x in ("qweight", "qzeros", "scales")}
  config = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": 32,
    "zero_point": True,
    "version": version,
  }
  if not is_gemm:
    return parts, config, values.half()
  packing = pkgutil.resolve_name("awq.utils.packing_utils")
  arguments = *parts.values(), 4, 32
  return parts, config, packing.dequantize_gemm(*arguments).T


def _bitsandbytes(kind: str, *, nested: bool, dtype: str = "uint8") -> _Case:
  functional = pkgutil.resolve_name("bitsandbytes").functional
  # A part of a block at the end.
  weight = _weight(6, 50)
  packed, state = functional.quantize_4bit(
    weight,
    blocksize=64,
    quant_type=kind,
    compress_statistics=nested,
    quant_storage=getattr(torch, dtype),
  )
  parts = {f"weight.{k}": v for k, v in state.as_dict(packed=True).items()}
  config = {
    "quant_method": "bitsandbytes",
    "load_in_4bit": True,
    "bnb_4bit_quant_type": kind,
    "bnb_4bit_use_double_quant": nested,
    "bnb_4bit_quant_storage": dtype,
    "llm_int8_skip_modules": ["lm_head"],
  }
  values = functional.dequantize_4bit(packed, state)
  return {"weight": packed, **parts}, config, values


def _bitsandbytes_8() -> _Case:
  functional = pkgutil.resolve_name("bitsandbytes").functional
  weight = _weight(6, 40)
  codes, largest, _ = functional.int8_vectorwise_quant(weight.half())
  parts = {
    "weight": codes,
    "SCB": largest,
    "weight_format": torch.zeros((), dtype=torch.uint8),
  }
  config = {"quant_method": "bitsandbytes", "load_in_8bit": True}
  return parts, config, functional.int8_vectorwise_dequant(codes, largest)


def _compress(layout: str, **fields: Any) -> _Case:
  args = quantization.QuantizationArgs(**fields)
  scheme = quantization.QuantizationScheme(
    targets=["Linear"], weights=args, format=layout
  )
  # Rows and columns that end within an int32, or a block.
  rows = 5 if args.group_size and args.symmetric else 11
  weight = _weight(rows, 64 if args.group_size else 36).bfloat16()
  blocks = weight.reshape(rows, -1, args.group_size or weight.shape[1])
  if args.strategy == "tensor":
    blocks = weight.reshape(1, 1, -1)
  low, high = blocks.amin(-1), blocks.amax(-1)
  if args.strategy == "block":
    low, high = (
      torch.stack(
        [
          torch.stack([function(part) for part in rows.split(16, 1)])
          for rows in weight.split(8, 0)
        ]
      )
      for function in (torch.amin, torch.amax)
    )
  scale, zero = helpers.calculate_qparams(low, high, args)
  if args.strategy == "tensor":
    scale, zero = scale.reshape(1), zero.reshape(1)
  state = {
    "weight": weight,
    "weight_scale": scale.bfloat16(),
    "weight_zero_point": zero,
  }
  compressor = compressed_tensors.BaseCompressor.get_value_from_registry(layout)
  packed = compressor.compress(state, scheme)
  values = compressor.decompress(packed, scheme)["weight"]
  config = quantization.QuantizationConfig(
    config_groups={"group_0": scheme},
    format=layout,
    quantization_status="compressed",
    ignore=["lm_head", "re:.*gate$"],
  )
  return packed, json.loads(config.model_dump_json()), values


def _fp8_blocks() -> _Case:
  weight = _weight(16, 48).reshape(2, 8, 3, 16)
  scale = weight.abs().amax((1, 3)) / 448
  codes = (weight / scale[:, None, :, None]).reshape(16, 48)
  codes = codes.to(torch.float8_e4m3fn)
  config = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "weight_block_size": [8, 16],
  }
  values = finegrained_fp8.Fp8Dequantize(None)._dequantize_one(codes, scale)
  return {"weight": codes, "weight_scale_inv": scale}, config, values


def make() -> dict[str, _Case]:
  """Returns all cases."""
  cases = {
    f"gptq_{bits}": _gptq(bits, desc_act=False, version="gptq")
    for bits in (2, 3, 4, 8)
  }
  cases["gptq_v2_act_order"] = _gptq(4, desc_act=True, version="gptq_v2")
  cases["awq_gemm"], cases["awq_gemv"] = _awq("gemm"), _awq("gemv")
  cases["nf4"] = _bitsandbytes("nf4", nested=False)
  cases["nf4_nested"] = _bitsandbytes("nf4", nested=True)
  cases["fp4_nested"] = _bitsandbytes("fp4", nested=True, dtype="bfloat16")
  cases["int8_vectors"] = _bitsandbytes_8()
  cases["fp8_blocks"] = _fp8_blocks()
  group = {"strategy": "group", "group_size": 32}
  for name, layout, fields in (
    ("packed_int4", "pack-quantized", {"num_bits": 4, **group}),
    (
      "packed_int4_zeros",
      "pack-quantized",
      {"num_bits": 4, "symmetric": False, **group},
    ),
    (
      "packed_int3_zeros",
      "pack-quantized",
      {"num_bits": 3, "symmetric": False, **group},
    ),
    ("packed_int8", "pack-quantized", {"num_bits": 8, "strategy": "channel"}),
    (
      "int8_zeros",
      "int-quantized",
      {"num_bits": 8, "symmetric": False, "strategy": "channel"},
    ),
    ("int8_group", "naive-quantized", {"num_bits": 8, **group}),
    (
      "fp8_tensor",
      "float-quantized",
      {"num_bits": 8, "type": "float", "strategy": "tensor"},
    ),
    (
      "fp8_channel",
      "float-quantized",
      {"num_bits": 8, "type": "float", "strategy": "channel"},
    ),
    (
      "fp8_edges",
      "float-quantized",
      {
        "num_bits": 8,
        "type": "float",
        "strategy": "block",
        "block_structure": [8, 16],
      },
    ),
  ):
    cases[name] = _compress(layout, **fields)
  return cases


def main() -> None:
  """Writes the file of all cases."""
  arrays: dict[str, Any] = {}
  for name, (parts, config, values) in make().items():
    stored = {
      f"{_STEM}.{end}": x.clone().contiguous() for end, x in parts.items()
    }
    content = safetensors_torch.save(stored, {"config": json.dumps(config)})
    arrays[name] = np.frombuffer(content, np.uint8)
    half = values.dtype == torch.bfloat16
    arrays[f"{name}/dtype"] = np.array(str(values.dtype).split(".")[1])
    arrays[f"{name}/values"] = (values.float() if half else values).numpy()
  buffer = io.BytesIO()
  np.savez_compressed(buffer, **arrays)
  FILE.parent.mkdir(exist_ok=True)
  FILE.write_bytes(buffer.getvalue())
  print(f"{len(arrays) // 3} cases, {len(buffer.getvalue()):,} bytes")


if __name__ == "__main__":
  main()
