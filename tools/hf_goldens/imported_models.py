"""Tiny imported models with tokenizers, compared with transformers."""

from collections.abc import Mapping
import contextlib
import io
import json
import os
import pathlib
import shutil
from typing import Any

from etils import epath
import fiddle as fdl
import numpy as np
import pytest

from paxon.layers.models.hugging_face import families
from paxon.layers.models.hugging_face.files import safetensors_file
from paxon.layers.models.hugging_face.golden_models import golden_case
from paxon.runner import main
from paxon.tasks.lm.params import hugging_face
from paxon.tools.hugging_face import hf_main

FOLDER = pathlib.Path(__file__).parent / "testdata"
# The tokenizer of each model; the names are those of `golden_cases`. To add a
# family, add a line and run `make_goldens`.
TOKENIZERS: Mapping[str, str] = {
  "llama2": "pieces",
  "llama3": "bytes",
  "mistral": "pieces",
  "qwen2": "bytes",
  "qwen3": "bytes",
  "phi3": "pieces",
  "gpt2": "bytes",
  "gpt_neox": "bytes",
  "gemma": "pieces",
  "gemma2": "pieces",
  "gemma3": "pieces",
  "mixtral": "pieces",
  "qwen2_moe": "bytes",
  "qwen3_moe": "bytes",
  "olmoe": "bytes",
  "gpt_oss": "bytes",
  "deepseek_v2": "bytes",
  "deepseek_v3": "bytes",
}
PROMPT = "The quick brown fox, naïve 🦊"
MESSAGES = [
  {"role": "user", "content": "What is 2 + 2? "},
  {"role": "assistant", "content": "4"},
  {"role": "user", "content": "Und 你好 + 3?"},
]
TEXT = (
  "The quick brown fox jumps over the lazy dog. 1 + 1 = 2, and 2 + 2 = 4.\n"
  "def add(x, y):\n  return x + y\n"
  "Der schnelle braune Fuchs springt über den faulen Hund. 🦊 你好。\n"
)
LENGTH = 32
STEPS = 3
# Knobs of the fine-tuning that is compared.
KNOBS: Mapping[str, Any] = {
  "length": LENGTH,
  "global_batch_size": 8,
  "num_train_steps": STEPS,
  "learning_rate": 1e-3,
  "warmup_steps": 1,
}


def write(folder: pathlib.Path, name: str, config: Mapping[str, Any]) -> None:
  """Writes a Hugging Face folder: configuration, weights and tokenizer."""
  shutil.copytree(FOLDER / TOKENIZERS[name], folder, dirs_exist_ok=True)
  (folder / "config.json").write_text(json.dumps(config))
  names = families.find(config).names(config)
  described = {
    each.name: (np.dtype(np.float32), each.shape)
    for each in names.tensors.values()
  }
  with safetensors_file.Writer(
    epath.Path(folder / "model.safetensors"), described
  ) as writer:
    for tensor, (_, shape) in described.items():
      writer.write_rows(tensor, 0, golden_case.weight(tensor, shape))


def import_model(
  folder: pathlib.Path, name: str, config: Mapping[str, Any]
) -> pathlib.Path:
  """Imports a model into `folder/run`; also writes `folder/train.jsonl`.

  Without modules that predict further tokens: transformers has none, and their
  loss is a part of the training loss.
  """
  if "num_nextn_predict_layers" in config:
    config = {**config, "num_nextn_predict_layers": 0}
  write(folder / "original", name, config)
  run = folder / "run"
  convert("import", os.fspath(folder / "original"), "--to", os.fspath(run))
  row = {"text": TEXT * 16}
  (folder / "train.jsonl").write_text(json.dumps(row) + "\n")
  return run


def export_quantized(
  folder: pathlib.Path, run: pathlib.Path, recipe: str, *options: str
) -> tuple[pathlib.Path, pathlib.Path]:
  """Quantizes the weights of a model tuned in `folder`, and exports them.

  `options` are those of the export.

  Returns:
    The folder of the served weights, and the exported one.
  """
  call(
    *("--mode=eval", f"--job_log_dir={run}"),
    f"--fdl.quantization={recipe}:convert",
    f"--fdl.validation_files={folder}/train.jsonl",
  )
  served, out = run / "serving" / recipe, folder / f"exported_{recipe}"
  convert("export", os.fspath(served), "--to", os.fspath(out), *options)
  return served, out


def training_setup(
  folder: pathlib.Path, name: str, config: Mapping[str, Any]
) -> tuple[list[dict[str, Any]], list[float], float]:
  """Returns the batches, learning rates and epsilon of the fine-tuning."""
  run = import_model(folder, name, config)
  made = hugging_face.HuggingFaceLm(
    weights=os.fspath(run), train_files=f"{folder}/train.jsonl", **KNOBS
  ).job()
  job = fdl.build(made)
  optimizer: Any = job.task.only_learner.optimizer
  rates = [float(optimizer.schedule(step)) for step in range(STEPS)]
  batches = [job.train_input.get_next() for _ in range(STEPS)]
  return batches, rates, optimizer.epsilon


def read_goldens() -> dict[str, Any]:
  """Returns the results of transformers, by model."""
  return json.loads((FOLDER / "goldens.json").read_text())


def convert(*arguments: str) -> None:
  """Runs `tools/hf`."""
  with contextlib.redirect_stdout(io.StringIO()):
    assert hf_main.main(arguments) == 0


def call(*arguments: str, status: int = 0) -> str:
  """Runs the command line; checks its status, returns what it prints."""
  output = io.StringIO()
  with (
    contextlib.redirect_stdout(output),
    contextlib.redirect_stderr(output),
    pytest.raises(SystemExit) as ended,
  ):
    main.run(("paxon.tasks",), ["main", *arguments])
  assert ended.value.code == status, output.getvalue()
  return output.getvalue()


def check(folder: pathlib.Path, name: str) -> tuple[pathlib.Path, pathlib.Path]:
  """Compares a model's texts, chats, perplexity and losses with the goldens.

  Returns:
    The run directories of the imported and of the fine-tuned model.
  """
  golden = read_goldens()[name]
  run = import_model(folder, name, golden["config"])
  at = f"--job_log_dir={run}"
  decode = ("--mode=decode", at, "--fdl.max_new_tokens=24")
  prompt = PROMPT
  printed = call(*decode, f"--prompt={prompt}")
  assert f"{golden['text']}\nsamples: " in printed
  messages = json.dumps(MESSAGES)
  call(*decode, "--chat", f"--prompt={messages}")
  lines = (run / "decode" / "0.jsonl").read_text().split("\n")
  plain, chat = (json.loads(line) for line in lines if line)
  assert plain["prompt"] + plain["continuation"] == golden["text"]
  assert chat["prompt"] == golden["chat_prompt"]
  assert chat["continuation"] == golden["reply"]

  file = folder / "text.txt"
  file.write_bytes(TEXT.encode())
  length = f"--fdl.length={LENGTH}"
  call("--mode=eval", at, length, f"--eval_file={file}")
  result = json.loads((run / "eval" / "files.jsonl").read_text())
  assert result["tokens"] == golden["tokens"]
  assert result["perplexity"] == pytest.approx(golden["perplexity"], rel=1e-4)
  num_bytes = len(TEXT.encode())
  assert num_bytes - 4 <= result["bytes"] <= num_bytes
  bits = np.log2(golden["perplexity"]) * golden["tokens"] / result["bytes"]
  assert result["bits_per_byte"] == pytest.approx(bits, rel=1e-4)

  tuned = folder / "tuned"
  knobs = [f"--fdl.{k}={v}" for k, v in KNOBS.items()]
  experiment = hugging_face.HuggingFaceLm.import_path()
  call(
    *(f"--exp={experiment}", f"--job_log_dir={tuned}", *knobs),
    # Stored as absolute.
    f"--fdl.weights={os.path.relpath(run)}",
    f"--fdl.train_files={folder}/train.jsonl",
    *("--fdl.summary_every_steps=1", "--fdl.prompts=None"),
    "--fdl.max_new_tokens=None",
  )
  records = (tuned / "metrics.jsonl").read_text().splitlines()
  losses = [
    record["loss"]
    for record in map(json.loads, records)
    if record["split"] == "train"
  ]
  assert losses == pytest.approx(golden["losses"], rel=1e-4)
  return run, tuned
