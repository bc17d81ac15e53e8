r"""Computes what a teacher predicts once, for the training of students.

  tools/python -m paxon.tasks.lm.params.teacher_log_probs FOLDER --top=64 \
      --exp=tasks.lm.params.distillation.HuggingFaceStudent \
      --fdl.weights=runs/small --fdl.teacher=runs/large \
      --fdl.train_files=text.jsonl --fdl.num_train_steps=1000

Give the flags of the training; then train with --fdl.teacher_log_probs=FOLDER
in addition, which needs no teacher in memory. The folder has the most likely
tokens of each position of the batches that the training reads, 8 bytes each.
The training rejects a folder of other data, of another teacher or of another
temperature.

The model is sharded by --fdl.mesh over all devices, of several processes, too;
see `reference_log_probs`. The same command resumes an interrupted one from
FOLDER.partial.
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
from paxon.runner.hosts import agreement
from paxon.runner.session import session as session_lib
from paxon.tasks.lm.params import reference_log_probs


def main(argv: Sequence[str]) -> int:
  """Runs the command and returns its exit status."""
  parser = argparse.ArgumentParser(
    prog="teacher_log_probs", description=__doc__, allow_abbrev=False
  )
  parser.add_argument("folder", metavar="FOLDER", help="folder to write")
  parser.add_argument(
    "--top", type=int, default=64, help="tokens of each position; default: 64"
  )
  with reference_log_probs.parse(parser, argv) as (known, config):
    _run(known, config)
  return 0


def _run(known: argparse.Namespace, config: Any) -> None:
  if known.top <= 0:
    raise user_error.UserError(f"--top must be positive, got {known.top}.")
  teacher = tree.find_value(config.task.model, "teacher")
  if teacher is None or config.warm_start is None:
    raise user_error.UserError(
      f"{known.exp} has no teacher with these flags; give those of training"
      " with a teacher and weights, without teacher_log_probs."
    )
  folder = os.fspath(run_dir.resolve(known.folder, os.environ))
  if agreement.from_first(lambda: os.path.exists(folder)):
    raise user_error.UserError(
      f"{folder} exists; pass another folder, or delete it."
    )
  job = resolving.build(config)
  session = session_lib.open_session(job)
  model: Any = job.task.model
  values, name = reference_log_probs.read_values(
    session, model.teacher.model, config.warm_start.others[0].checkpoint
  )
  # Each process reads whole batches, whose digests the folder has.
  source, steps = job.train_input, job.num_train_steps
  source.set_infeed_hosts(infeed_host_index=0, num_infeed_hosts=1)
  predict = _make_predict(
    session, model.teacher.model, known.top, model.temperature
  )
  writer = teacher_input.Writer(
    folder,
    num_batches=steps,
    facts={"teacher": name, "temperature": model.temperature},
    top=known.top,
    is_first=agreement.is_first(),
  )
  done, digest = agreement.from_first(lambda: [writer.done, writer.digest])
  found = 0
  for _ in range(done):
    found = teacher_input.add_digest(source.get_next(), found)
  if found != digest:
    print(f"{folder}.partial is of other data: starting over")
    done = 0
    source.reset()
    writer.restart()
  elif done:
    print(f"resuming after {done} batches of {folder}.partial")
  for index in range(done, steps):
    batch = source.get_next()
    placed = reference_log_probs.place(session, batch)
    log_probs, ids = (
      np.asarray(found)[: source.global_batch_size]
      for found in predict(values, placed)
    )
    writer.write(index, batch, ids=ids, log_probs=log_probs)
  writer.finish()
  print(f"wrote the {known.top} most likely tokens of {steps} batches")


def _make_predict(
  session: session_lib.Session, model: Any, top: int, temperature: float
) -> Any:
  """Returns a function of values and a batch to log probabilities and ids."""

  def predict(values: Any, batch: dict[str, jax.Array]) -> Any:
    names = ("inputs", "positions", "segment_ids")
    logits = model.apply(values, *(batch[name] for name in names))
    if top > logits.shape[-1]:
      raise user_error.UserError(
        f"--top must be at most the vocabulary ({logits.shape[-1]}), got {top}."
      )
    found = jax.nn.log_softmax(precision.widen(logits) / temperature)
    return jax.lax.top_k(found, top)

  return session.layout.jit(
    predict,
    out_shardings=session.layout.replicated,
    compiler_options=session.compiler_options,
  )


if __name__ == "__main__":
  try:
    sys.exit(main(sys.argv[1:]))
  except user_error.UserError as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(2)
