"""Writes the goldens of adapters: losses and PEFT folders after 20 steps.

Run it with a Python that has torch, transformers and peft (0.21.2), which the
oracle's lock does not have:

  python -m paxon.tools.hf_goldens.make_adapter_goldens
"""

import importlib
import json
import pathlib

import numpy as np

from paxon.layers.models.hugging_face import golden_case

FOLDER = pathlib.Path(__file__).parent / "testdata"
CASE = "llama3"
KINDS = ("lora", "rslora", "dora")
RANK, ALPHA, STEPS, LEARNING_RATE = 4, 6.0, 20, 3e-3
# Attention and feed-forward layers, with all shapes of kernels.
TARGETS = ("q_proj", "k_proj", "o_proj", "down_proj")
# Imported when they are used: peft is in no lock of the build.
_PACKAGES = ("torch", "peft", "transformers")


def initial_a(name: str, shape: tuple[int, ...]) -> np.ndarray:
  """Returns the initial lora_A [rank, inputs] of a module, float32."""
  return golden_case.weight(f"{name}.lora_A", shape)


def _run(kind: str) -> None:
  torch, peft, transformers = map(importlib.import_module, _PACKAGES)
  golden = golden_case.read(CASE)
  config = transformers.LlamaConfig(**golden.config)
  model = transformers.LlamaForCausalLM(config)
  with torch.no_grad():
    # Tied parameters once, as in files.
    for name, value in model.named_parameters():
      array = golden_case.weight(name, tuple(value.shape))
      value.copy_(torch.from_numpy(array))
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
  (folder / "results.json").write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
  for each in KINDS:
    _run(each)
