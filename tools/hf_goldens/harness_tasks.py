"""Local tasks of the evaluation harness, and what its own `HFLM` computes.

`write` makes a folder with three tasks on JSON lines: multiple choice,
generation and perplexity of texts. One context is empty, and some contexts and
texts are longer than the models read. `testdata/lm_eval.json` has, for each
model, the metrics of the tasks and the requests with their answers, as
`make_lm_eval_goldens` has stored them.
"""

import json
import pathlib
from typing import Any

from paxon.tools.hf_goldens import imported_models

# A vocabulary with a begin token and spaces in front, and a byte-level one
# without.
MODELS = ("llama2", "qwen3")
TASKS = ("tiny_choice", "tiny_generation", "tiny_text")
PATH = imported_models.FOLDER / "lm_eval.json"
_ROWS = (
  ("The quick brown fox jumps over the lazy", ["dog", "add(x, y)", "2 = 4"], 0),
  ("1 + 1 =", ["2", "fox", " the lazy dog."], 0),
  (
    "Der schnelle braune Fuchs springt \u00fcber den faulen",
    ["\u4f60", "Hund"],
    1,
  ),
  ("The lazy dog jumps over the quick brown fox. " * 12, ["fox", "dog"], 1),
  ("def add(x, y):\n  return x +", ["y", "\U0001f98a"], 0),
  ("", ["The quick brown fox", "lazy lazy"], 0),
)
_COMMON = """\
task: {task}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {folder}/{task}.jsonl
test_split: test
output_type: {kind}
"""
_CHOICE = """\
doc_to_text: "{% if question %}Q: {{question}}\\nA:{% endif %}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list:
  - metric: acc
  - metric: acc_norm
"""
_GENERATION = """\
doc_to_text: "{{question}}"
doc_to_target: "{{target}}"
generation_kwargs:
  until: ["\\n", "qu"]
  max_gen_toks: 24
metric_list:
  - metric: exact_match
"""
_TEXT = """\
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list:
  - metric: word_perplexity
  - metric: byte_perplexity
  - metric: bits_per_byte
"""


def write(folder: pathlib.Path) -> None:
  """Writes the tasks and their data to a folder that exists."""
  choice = [
    {"question": question, "choices": choices, "answer": answer}
    for question, choices, answer in _ROWS
  ]
  generation = [
    {"question": question, "target": choices[answer]}
    for question, choices, answer in _ROWS
    if question
  ]
  texts = [imported_models.TEXT, imported_models.TEXT * 3, "The fox"]
  text = [{"text": each} for each in texts]
  for task, kind, more, rows in (
    ("tiny_choice", "multiple_choice", _CHOICE, choice),
    ("tiny_generation", "generate_until", _GENERATION, generation),
    ("tiny_text", "loglikelihood_rolling", _TEXT, text),
  ):
    common = _COMMON.format(task=task, folder=folder, kind=kind)
    (folder / f"{task}.yaml").write_text(common + more)
    lines = [json.dumps(row) + "\n" for row in rows]
    (folder / f"{task}.jsonl").write_text("".join(lines))


def summarize(results: dict[str, Any]) -> dict[str, dict[str, float]]:
  """Returns the metrics of each task in results of the harness."""
  return {
    task: {
      name.partition(",")[0]: value
      for name, value in results["results"][task].items()
      if isinstance(value, float) and "stderr" not in name
    }
    for task in TASKS
  }


def read_goldens() -> dict[str, Any]:
  """Returns the results of `HFLM`, by model."""
  return json.loads(PATH.read_text())
