"""Regenerates `testdata/lm_eval.json` with the harness's own model `HFLM`.

  python -m paxon.tools.hf_goldens.make_lm_eval_goldens

It needs lm-eval, torch, transformers 5 and accelerate.
"""

import json
import pathlib
import tempfile
from typing import Any

import lm_eval  # pyrefly: ignore[missing-import]
from lm_eval import tasks  # pyrefly: ignore[missing-import]
from lm_eval.models import huggingface  # pyrefly: ignore[missing-import]

from paxon.tools.hf_goldens import harness_tasks, imported_models


def make(name: str, folder: pathlib.Path) -> dict[str, Any]:
  """Returns the metrics, requests and answers of a model."""
  config = imported_models.read_goldens()[name]["config"]
  original = folder / "original"
  imported_models.write(original, name, config)
  harness_tasks.write(folder)
  results = lm_eval.simple_evaluate(
    model=huggingface.HFLM(
      str(original), dtype="float32", device="cpu", batch_size=2
    ),
    tasks=list(harness_tasks.TASKS),
    task_manager=tasks.TaskManager(include_path=str(folder)),
    log_samples=True,
    bootstrap_iters=0,
  )
  answers = {
    task: [
      [list(args), answer]
      for sample in results["samples"][task]
      for args, answer in zip(
        sample["arguments"], _flatten(sample["resps"]), strict=True
      )
    ]
    for task in harness_tasks.TASKS
  }
  return {"metrics": harness_tasks.summarize(results), "answers": answers}


def _flatten(answers: list[list[Any]]) -> list[Any]:
  return [answer for inner in answers for answer in inner]


def main() -> None:
  """Writes the goldens."""
  found = {}
  for name in harness_tasks.MODELS:
    with tempfile.TemporaryDirectory() as folder:
      found[name] = make(name, pathlib.Path(folder))
  text = json.dumps(found, indent=1, sort_keys=True, ensure_ascii=False)
  harness_tasks.PATH.write_text(text + "\n")


if __name__ == "__main__":
  main()
