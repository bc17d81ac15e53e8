"""Regenerates the golden beam searches with transformers.

  python -m paxon.layers.models.hugging_face.golden_models.make_beam_goldens

It needs torch and transformers 5.
"""

import json
from typing import Any

import numpy as np
import torch  # pyrefly: ignore[missing-import]

from paxon.layers.models.hugging_face.golden_models import (
  golden_case,
  make_goldens,
)

_CASES = ("gpt2", "gpt_neox", "llama2", "qwen3")
_PENALTIES = (0.0, 1.0, 2.0)
_STOPS = {"bound": "never", "heuristic": False, "full": True}
_BEAMS = 3
_NEW_IDS = 10
# Random models end rarely.
_NUM_END_IDS = 6
# Scores of beams that are closer depend on rounding.
_MARGIN = 1e-4


def _search(
  model: Any, ids: torch.Tensor, end_ids: list[int]
) -> list[dict[str, Any]]:
  """Returns the result of each length penalty and stop."""
  results = []
  for penalty in _PENALTIES:
    for stop, early_stopping in _STOPS.items():
      found = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=_NEW_IDS,
        num_beams=_BEAMS,
        num_return_sequences=_BEAMS,
        do_sample=False,
        length_penalty=penalty,
        early_stopping=early_stopping,
        eos_token_id=end_ids,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
      )
      new = found.sequences[:, ids.shape[1] :].tolist()
      lengths = [
        next((i + 1 for i, x in enumerate(row) if x in end_ids), len(row))
        for row in new
      ]
      results.append(
        {
          "end_ids": end_ids,
          "length_penalty": penalty,
          "stop": stop,
          "ids": [row[:n] for row, n in zip(new, lengths, strict=True)],
          "scores": [round(x, 6) for x in found.sequences_scores.tolist()],
        }
      )
  return results


def _is_telling(results: list[dict[str, Any]]) -> bool:
  """Returns whether stops and penalties differ, and no beams are close."""
  scores = np.asarray([each["scores"] for each in results])
  gaps = -np.diff(scores.reshape(-1, _BEAMS))
  by_penalty = [
    [str(each["ids"]) for each in results[i : i + 3]] for i in (0, 3, 6)
  ]
  lengths = {len(row) for each in results for row in each["ids"]}
  differ = sum(len(set(stops)) > 1 for stops in by_penalty)
  return (
    gaps.min() > _MARGIN
    and differ > 1
    and by_penalty[0] != by_penalty[2]
    and len(lengths) > 3
  )


def main() -> None:
  """Writes the searches of each case, with the first telling end ids."""
  lines = []
  for name in _CASES:
    model = make_goldens.torch_model(name)
    ids = golden_case.ids(name, vocab_size=model.config.vocab_size)
    prompts = torch.from_numpy(ids[:, : golden_case.PROMPT_LENGTH]).long()
    random = np.random.default_rng(0)
    while True:
      size = model.config.vocab_size
      end_ids = random.choice(np.arange(1, size), _NUM_END_IDS, replace=False)
      results = _search(model, prompts, sorted(end_ids.tolist()))
      if _is_telling(results):
        break
    lines += [json.dumps({"case": name, **each}) for each in results]
  text = "[\n" + ",\n".join(lines) + "\n]\n"
  (golden_case.FOLDER / "beams.json").write_text(text)


if __name__ == "__main__":
  main()
