r"""Computes the log probabilities of a reference once, for preference training.

  tools/python -m paxon.tasks.lm.params.reference_log_probs FILE \
      --exp=tasks.lm.params.preferences.HuggingFacePreferences \
      --fdl.weights=runs/qwen3 --fdl.train_files=pairs.jsonl

Give the flags of the training; then train with --fdl.reference_log_probs=FILE
in addition, which needs no reference in memory. The file has the values of all
pairs by their index, on one device. The training rejects a file of other data
or of another reference.
"""

import argparse
from collections.abc import Sequence
import os
import sys
from typing import Any

from flax import traverse_util
import jax
import jax.numpy as jnp
import numpy as np

from paxon.inputs.tokenizers import scored_pairs
from paxon.layers.models import preference_lm
from paxon.runner import run_dir, user_error
from paxon.runner.checkpoints import stored_checkpoint
from paxon.runner.configuration import overrides, resolving, tree

_PARAMS = "params/"
_NAMES = ("inputs", "targets", "weights", preference_lm.IS_TOKEN)


def main(argv: Sequence[str]) -> int:
  """Runs the command and returns its exit status."""
  parser = argparse.ArgumentParser(
    prog="reference_log_probs", description=__doc__, allow_abbrev=False
  )
  parser.add_argument("file", metavar="FILE", help="file to write")
  parser.add_argument("--exp", required=True, help="the experiment")
  known, config = parse(parser, argv)
  model = tree.find_value(config.task, "model")
  if tree.find_value(model, "reference") is None or config.warm_start is None:
    raise user_error.UserError(
      f"{known.exp} has no reference with these flags; give those of training"
      " with a reference and weights, without reference_log_probs."
    )
  start = config.warm_start
  folder = (start.others[0] if start.others else start).checkpoint
  job = resolving.build(config)
  task_model: Any = job.task.model
  values, name = read_values(folder)
  score = _make_score(task_model.reference.model, values)
  inputs: dict[str, Any] = {"train": job.train_input, **job.eval_inputs}
  found = {
    split: _score_all(each.examples.source, score, each.global_batch_size)
    for split, each in inputs.items()
  }
  file = os.fspath(run_dir.resolve(known.file, os.environ))
  scored_pairs.write(file, found, reference=name)
  total = sum(len(each) for each, _ in found.values())
  print(f"wrote the log probabilities of {total} pairs to {file}")
  return 0


def parse(
  parser: argparse.ArgumentParser, argv: Sequence[str]
) -> tuple[argparse.Namespace, Any]:
  """Returns the arguments, with `exp`, and the experiment with `--fdl` flags.

  Raises:
    user_error.UserError: An argument is unknown.
  """
  known, rest = parser.parse_known_args(list(argv))
  given = []
  for argument in rest:
    override = overrides.parse_argument(argument)
    if override is None:
      raise user_error.UserError(f"{argument} is no flag of this command.")
    given.append(override)
  config = resolving.resolve(known.exp, given, packages=("paxon",)).config
  return known, config


def read_values(folder: str) -> tuple[Any, str]:
  """Returns the parameters of a run's newest checkpoint, and their name."""
  path = run_dir.resolve(folder, os.environ)
  stored = stored_checkpoint.find_checkpoint(path)
  stored_checkpoint.verify(stored)
  names = [n for n in stored.variables() if n.startswith(_PARAMS)]
  values = {
    name: jnp.asarray(array, jnp.float32)
    for name, array in stored_checkpoint.read_numpy(stored, names).items()
  }
  nested = traverse_util.unflatten_dict(values, sep="/")
  return nested, stored_checkpoint.fingerprint(stored)


def _make_score(model: Any, nested: Any) -> Any:
  """Returns a function of batches, [batch, 2T], to log probabilities."""

  @jax.jit
  def score(values: Any, batch: dict[str, jax.Array]) -> jax.Array:
    halves = preference_lm.split_pairs(batch)
    nll: Any = model.apply(values, halves, method="token_nll")
    weights = halves["weights"].astype(jnp.float32)
    return jnp.stack(preference_lm.sum_answers(nll, weights), axis=1)

  return lambda batch: score(nested, batch)


def _score_all(
  source: Any, score: Any, batch_size: int
) -> tuple[np.ndarray, np.ndarray]:
  """Returns log probabilities [pairs, 2] and digests [pairs] of a source."""
  digests, log_probs = [], []
  for start in range(0, len(source), batch_size):
    indices = range(start, min(start + batch_size, len(source)))
    examples = [source[index] for index in indices]
    digests += [scored_pairs.digest(each) for each in examples]
    # A last batch of another size would be compiled again.
    padded = examples + examples[-1:] * (batch_size - len(examples))
    batch = {
      name: jnp.asarray(np.stack([each[name] for each in padded]))
      for name in _NAMES
    }
    log_probs.append(np.asarray(score(batch))[: len(examples)])
  return np.concatenate(log_probs), np.asarray(digests, np.uint32)


if __name__ == "__main__":
  try:
    sys.exit(main(sys.argv[1:]))
  except user_error.UserError as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(2)
