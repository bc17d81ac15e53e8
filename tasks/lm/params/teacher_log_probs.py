r"""Computes what a teacher predicts once, for the training of students.

  tools/python -m paxon.tasks.lm.params.teacher_log_probs FOLDER --top=64 \
      --exp=tasks.lm.params.distillation.HuggingFaceStudent \
      --fdl.weights=runs/small --fdl.teacher=runs/large \
      --fdl.train_files=text.jsonl --fdl.num_train_steps=1000

Give the flags of the training; then train with --fdl.teacher_log_probs=FOLDER
in addition, which needs no teacher in memory. The folder has the most likely
tokens of each position of the batches that the training reads, 8 bytes each,
computed on one device. The training rejects a folder of other data, of another
teacher or of another temperature.
"""

import argparse
from collections.abc import Sequence
import os
import sys
from typing import Any

import jax
import numpy as np

from paxon.inputs import teacher_input
from paxon.layers import precision
from paxon.runner import run_dir, user_error
from paxon.runner.configuration import resolving, tree
from paxon.tasks.lm.params import reference_log_probs


def main(argv: Sequence[str]) -> int:
  """Runs the command and returns its exit status."""
  parser = argparse.ArgumentParser(
    prog="teacher_log_probs", description=__doc__, allow_abbrev=False
  )
  parser.add_argument("folder", metavar="FOLDER", help="folder to write")
  parser.add_argument("--exp", required=True, help="the experiment")
  parser.add_argument(
    "--top", type=int, default=64, help="tokens of each position; default: 64"
  )
  known, config = reference_log_probs.parse(parser, argv)
  if known.top <= 0:
    raise user_error.UserError(f"--top must be positive, got {known.top}.")
  teacher = tree.find_value(config.task.model, "teacher")
  if teacher is None or config.warm_start is None:
    raise user_error.UserError(
      f"{known.exp} has no teacher with these flags; give those of training"
      " with a teacher and weights, without teacher_log_probs."
    )
  values, name = reference_log_probs.read_values(
    config.warm_start.others[0].checkpoint
  )
  job = resolving.build(config)
  model: Any = job.task.model
  predict = _make_predict(model.teacher.model, known.top, model.temperature)
  folder = os.fspath(run_dir.resolve(known.folder, os.environ))
  steps = job.num_train_steps
  try:
    with teacher_input.writing(
      folder, num_batches=steps, teacher=name, temperature=model.temperature
    ) as writer:
      for index in range(steps):
        batch = job.train_input.get_next()
        log_probs, ids = predict(values, batch)
        writer.write(
          index, batch, ids=np.asarray(ids), log_probs=np.asarray(log_probs)
        )
  except FileExistsError:
    raise user_error.UserError(
      f"{folder} exists; pass another folder, or delete it."
    ) from None
  print(f"wrote the {known.top} most likely tokens of {steps} batches")
  return 0


def _make_predict(model: Any, top: int, temperature: float) -> Any:
  """Returns a function of values and a batch to log probabilities and ids."""

  @jax.jit
  def predict(values: Any, batch: dict[str, jax.Array]) -> Any:
    names = ("inputs", "positions", "segment_ids")
    logits = model.apply(values, *(batch[name] for name in names))
    if top > logits.shape[-1]:
      raise user_error.UserError(
        f"--top must be at most the vocabulary ({logits.shape[-1]}), got {top}."
      )
    found = jax.nn.log_softmax(precision.widen(logits) / temperature)
    return jax.lax.top_k(found, top)

  return predict


if __name__ == "__main__":
  try:
    sys.exit(main(sys.argv[1:]))
  except user_error.UserError as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(2)
