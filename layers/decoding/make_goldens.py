"""Regenerates the goldens of samplers with transformers' logits processors.

  python -m paxon.layers.decoding.make_goldens

It needs torch and transformers 5.
"""

import json
import os
from typing import Any

import numpy as np
import torch  # pyrefly: ignore[missing-import]
from transformers.generation import (  # pyrefly: ignore[missing-import]
  logits_process,
)

from paxon.layers.decoding import sampling_cases

_PATH = os.path.join(os.path.dirname(__file__), "goldens", "sampling.json")


def _processors(settings: dict[str, Any]) -> list[Any]:
  """Returns the processors in the order in which `generate` applies them."""
  made = {
    "repetition_penalty": logits_process.RepetitionPenaltyLogitsProcessor,
    "temperature": logits_process.TemperatureLogitsWarper,
    "top_k": logits_process.TopKLogitsWarper,
    "top_p": logits_process.TopPLogitsWarper,
    "min_p": logits_process.MinPLogitsWarper,
    "typical_p": logits_process.TypicalLogitsWarper,
    "epsilon": logits_process.EpsilonLogitsWarper,
  }
  return [made[name](settings[name]) for name in made if name in settings]


def main() -> None:
  """Writes the log probabilities that each case leaves; null is removed."""
  found = []
  prompts = torch.from_numpy(sampling_cases.prompts()).long()
  for case in sampling_cases.CASES:
    scores = torch.from_numpy(sampling_cases.logits())
    for processor in _processors(case):
      scores = processor(prompts, scores)
    log_probs = np.asarray(torch.log_softmax(scores.double(), dim=-1))
    found.append(
      [
        [None if np.isinf(x) else round(float(x), 6) for x in row]
        for row in log_probs
      ]
    )
  with open(_PATH, "w", encoding="utf-8") as file:
    file.write("[\n" + ",\n".join(json.dumps(x) for x in found) + "\n]\n")


if __name__ == "__main__":
  main()
