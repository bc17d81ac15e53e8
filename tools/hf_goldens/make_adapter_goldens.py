"""Writes the goldens of adapters: losses and PEFT folders after 20 steps.

Run it with a Python that has torch, transformers, peft (0.21.2) and
bitsandbytes (0.50.2), which the oracle's lock does not have:

  python -m paxon.tools.hf_goldens.make_adapter_goldens
"""

import base64
import importlib
import json
import pathlib
from typing import Any

import numpy as np

from paxon.layers.models.hugging_face.golden_models import golden_case

FOLDER = pathlib.Path(__file__).parent / "testdata"
CASE = "llama3"
KINDS = ("lora", "rslora", "dora")
# LoRA of linear layers that bitsandbytes stores in NF4.
QLORA = "qlora"
# On CPUs, bitsandbytes 0.50.2 dequantizes blocks that cross rows differently
# than it quantizes them, and rounds scales of blocks within 1e-5 of the middle
# of two values the other way, which this one layer does not have.
QLORA_SIZES = {
  "hidden_size": 64,
  "intermediate_size": 64,
  "num_hidden_layers": 1,
  "head_dim": 16,
  "attention_bias": False,
}
# Of a weight [outputs, inputs] with two blocks of blocks, the last incomplete.
WEIGHT = ("nf4", (130, 127))
RANK, ALPHA, STEPS, LEARNING_RATE = 4, 6.0, 20, 3e-3
# Attention and feed-forward layers, with all shapes of kernels.
TARGETS = ("q_proj", "k_proj", "o_proj", "down_proj")
# Imported when they are used: peft is in no lock of the build.
_PACKAGES = ("torch", "peft", "transformers")


def initial_a(name: str, shape: tuple[int, ...]) -> np.ndarray:
  """Returns the initial lora_A [rank, inputs] of a module, float32."""
  return golden_case.weight(f"{name}.lora_A", shape)


def _quantize(model: Any) -> None:
  """Replaces the linear layers of all blocks by those of bitsandbytes."""
  torch, bitsandbytes = map(importlib.import_module, ("torch", "bitsandbytes"))
  for block in model.model.layers:
    for parent in (block.self_attn, block.mlp):
      for name, layer in list(parent.named_children()):
        if not isinstance(layer, torch.nn.Linear):
          continue
        made = bitsandbytes.nn.Linear4bit(
          layer.in_features,
          layer.out_features,
          bias=False,
          compute_dtype=torch.float32,
          compress_statistics=True,
          quant_type="nf4",
        )
        made.weight = bitsandbytes.nn.Params4bit(
          layer.weight.data,
          requires_grad=False,
          compress_statistics=True,
          quant_type="nf4",
        )
        made.to("cpu")
        assert made.weight.quant_state is not None
        setattr(parent, name, made)


def _quantized_weight() -> dict[str, Any]:
  """Returns the parts of a weight in NF4 with double quantization."""
  torch, bitsandbytes = map(importlib.import_module, ("torch", "bitsandbytes"))
  weight = torch.from_numpy(golden_case.weight(*WEIGHT))
  packed, state = bitsandbytes.functional.quantize_4bit(
    weight, blocksize=64, compress_statistics=True, quant_type="nf4"
  )
  values = bitsandbytes.functional.dequantize_4bit(packed, state)

  def encode(x: Any) -> str:
    return base64.b64encode(x.numpy().tobytes()).decode()

  return {
    "table": state.code.tolist(),
    "dynamic_table": state.state2.code.tolist(),
    "packed": encode(packed),
    "block_values": encode(state.absmax),
    "block_scale": state.state2.absmax.tolist(),
    "block_mean": state.offset.item(),
    "dequantized": values.sum(dim=0).tolist(),
  }


def _run(kind: str) -> None:
  torch, peft, transformers = map(importlib.import_module, _PACKAGES)
  golden = golden_case.read(CASE)
  sizes = QLORA_SIZES if kind == QLORA else {}
  config = transformers.LlamaConfig(**{**golden.config, **sizes})
  model = transformers.LlamaForCausalLM(config)
  with torch.no_grad():
    # Tied parameters once, as in files.
    for name, value in model.named_parameters():
      array = golden_case.weight(name, tuple(value.shape))
      value.copy_(torch.from_numpy(array))
  if kind == QLORA:
    _quantize(model)
  adapted = peft.get_peft_model(
    model,
    peft.LoraConfig(
      r=RANK,
      lora_alpha=ALPHA,
      target_modules=list(TARGETS),
      use_rslora=kind == "rslora",
      use_dora=kind == "dora",
      task_type="CAUSAL_LM",
    ),
  )
  with torch.no_grad():
    for name, value in adapted.named_parameters():
      if ".lora_A." in name:
        module = name.removeprefix("base_model.model.").split(".lora_A")[0]
        array = initial_a(module, tuple(value.shape))
        value.copy_(torch.from_numpy(array))
  trained = [p for p in adapted.parameters() if p.requires_grad]
  optimizer = torch.optim.Adam(trained, lr=LEARNING_RATE)
  ids = torch.from_numpy(golden.arrays["ids"]).long()
  losses = []
  for _ in range(STEPS):
    loss = adapted(input_ids=ids, labels=ids).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
  folder = FOLDER / f"peft_{kind}"
  adapted.save_pretrained(folder)
  (folder / "README.md").unlink(missing_ok=True)
  logits = adapted(input_ids=ids).logits.detach().numpy()
  found = {"losses": losses, "logits": logits[0, -1].tolist()}
  if kind == QLORA:
    found["weight"] = _quantized_weight()
  (folder / "results.json").write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
  for each in (*KINDS, QLORA):
    _run(each)
