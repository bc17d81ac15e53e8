r"""Computes the log probabilities of a reference once, for preference training.

  tools/python -m paxon.tasks.lm.params.reference_log_probs FILE \
      --exp=tasks.lm.params.preferences.HuggingFacePreferences \
      --fdl.weights=runs/qwen3 --fdl.train_files=pairs.jsonl

Give the flags of the training; then train with --fdl.reference_log_probs=FILE
in addition, which needs no reference in memory. The file has the values of all
pairs by their index. The training rejects a file of other data or of another
reference.

The model is sharded by --fdl.mesh over all devices. Several processes, started
with --coordinator_address, --num_processes and --process_id as for the runner,
or by a cluster, compute together, and process 0 writes. The same command
resumes an interrupted one from FILE.unfinished.
"""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import os
import pathlib
import sys
import time
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from paxon.inputs.tokenizers import scored_pairs
from paxon.layers.models import preference_lm
from paxon.runner import run_dir, user_error
from paxon.runner.checkpoints import stored_checkpoint
from paxon.runner.configuration import overrides, resolving, tree
from paxon.runner.hosts import agreement, joining, process_settings
from paxon.runner.session import batch_padding
from paxon.runner.session import session as session_lib
from paxon.sharding import arrays, axes, variables

_NAMES = ("inputs", "targets", "weights", preference_lm.IS_TOKEN)
_PROCESSES: Final[Mapping[str, Callable[[str], Any]]] = {
  "coordinator_address": str,
  "num_processes": int,
  "process_id": int,
}
# Between writes of what is done.
SAVE_SECONDS: Final = 60.0

_Scores = dict[str, tuple[np.ndarray, np.ndarray]]


def main(argv: Sequence[str]) -> int:
  """Runs the command and returns its exit status."""
  parser = argparse.ArgumentParser(
    prog="reference_log_probs", description=__doc__, allow_abbrev=False
  )
  parser.add_argument("file", metavar="FILE", help="file to write")
  with parse(parser, argv) as (known, config):
    _run(known, config)
  return 0


def _run(known: argparse.Namespace, config: Any) -> None:
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
  session = session_lib.open_session(job)
  fixed = task_model.reference.model
  values, name = read_values(session, fixed, folder, method="token_nll")
  inputs: dict[str, Any] = {"train": job.train_input, **job.eval_inputs}
  file = os.fspath(run_dir.resolve(known.file, os.environ))
  scoring = _Scoring(
    score=_make_score(session, fixed, values),
    place=lambda batch: place(session, batch),
    file=f"{file}.unfinished",
    reference=name,
  )
  scoring.resume({k: each.examples.source for k, each in inputs.items()})
  for split, each in inputs.items():
    scoring.score_split(split, each.examples.source, each.global_batch_size)
  if agreement.is_first():
    scored_pairs.write(file, scoring.found, reference=name)
    pathlib.Path(scoring.file).unlink(missing_ok=True)
  total = sum(len(each) for each, _ in scoring.found.values())
  print(f"wrote the log probabilities of {total} pairs to {file}")


def place(
  session: session_lib.Session, batch: Mapping[str, np.ndarray]
) -> dict[str, jax.Array]:
  """Returns sharded arrays of a batch that each process has whole.

  They end with empty examples if the mesh does not divide the batch.
  """
  # Strings never reach a device.
  numbers = {k: v for k, v in batch.items() if v.dtype != object}
  session.check_ids(numbers)
  shards = session.layout.shards(axes.BATCH)
  return arrays.split_batch(batch_padding.pad(numbers, shards), session.layout)


@contextlib.contextmanager
def parse(
  parser: argparse.ArgumentParser, argv: Sequence[str]
) -> Iterator[tuple[argparse.Namespace, Any]]:
  """Joins the other processes; returns arguments and the experiment.

  The context yields the arguments, with `exp`, and the configuration with
  `--fdl` flags. At its end the processes wait for each other.

  Raises:
    user_error.UserError: An argument is unknown.
  """
  parser.add_argument("--exp", required=True, help="the experiment")
  for name, kind in _PROCESSES.items():
    parser.add_argument(f"--{name}", type=kind, help="as for the runner")
  known, rest = parser.parse_known_args(list(argv))
  given, unknown = overrides.split_arguments(rest)
  if unknown:
    raise user_error.UserError(f"{unknown[0]} is no flag of this command.")
  settings = {name: getattr(known, name) for name in _PROCESSES}
  joining.join(process_settings.ProcessSettings(**settings), os.environ)
  with joining.exit_together():
    yield (
      known,
      resolving.resolve(known.exp, given, packages=("paxon",)).config,
    )


def read_values(
  session: session_lib.Session,
  model: Any,
  folder: str,
  *,
  method: str = "__call__",
) -> tuple[Any, str]:
  """Reads the parameters of a run's newest checkpoint onto the devices.

  Args:
    session: Has the layout, and a batch of the training.
    model: A model whose variables are all parameters.
    folder: The directory of the run.
    method: Of the model; it takes a batch, or `__call__`, which takes token
      ids, positions and segment ids.

  Returns:
    The variables, float32 and sharded, and the name of their values.

  Raises:
    user_error.UserError: The checkpoint has other parameters.
  """
  path = run_dir.resolve(folder, os.environ)
  stored = stored_checkpoint.find_checkpoint(path)
  stored_checkpoint.verify(stored)
  names = ("inputs", "positions", "segment_ids", "targets")
  tokens = jax.ShapeDtypeStruct((1, session.job.train_input.length), jnp.int32)
  batch = dict.fromkeys(names, tokens)
  given = (batch,) if method != "__call__" else (tokens,) * 3
  shapes = jax.eval_shape(
    lambda *args: model.init(jax.random.key(0), *args, method=method), *given
  )
  specs = variables.get_specs({"params": shapes["params"]})
  for spec in jax.tree.leaves(specs):
    found = stored.arrays.get(spec.name)
    if found is None or found.shape != spec.shape:
      raise user_error.UserError(
        f"{folder} must have {spec.name} of shape {spec.shape}, and has"
        f" {'none' if found is None else found.shape}."
      )
  wanted = {
    spec.name: jax.ShapeDtypeStruct(spec.shape, jnp.float32, sharding=sharding)
    for spec, sharding in zip(
      jax.tree.leaves(specs),
      jax.tree.leaves(session.layout.shardings(specs)),
      strict=True,
    )
  }
  values = stored_checkpoint.read_arrays(stored, wanted)
  nested = jax.tree.map(lambda spec: values[spec.name], specs)
  return nested, stored_checkpoint.fingerprint(stored)


def _make_score(session: session_lib.Session, model: Any, nested: Any) -> Any:
  """Returns a function of batches, [batch, 2T], to log probabilities."""

  def score(values: Any, batch: dict[str, jax.Array]) -> jax.Array:
    halves = preference_lm.split_pairs(batch)
    nll: Any = model.apply(values, halves, method="token_nll")
    weights = halves["weights"].astype(jnp.float32)
    return jnp.stack(preference_lm.sum_answers(nll, weights), axis=1)

  compiled = session.layout.jit(
    score,
    out_shardings=session.layout.replicated,
    compiler_options=session.compiler_options,
  )
  return lambda batch: compiled(nested, batch)


@dataclasses.dataclass(kw_only=True, eq=False)
class _Scoring:
  """The values of all pairs, and a file with those that are done.

  Attributes:
    score: The function of `_make_score`.
    place: Returns the arrays of a batch that each process has whole.
    file: The file; process 0 writes it.
    reference: Name of the reference's values.
    found: Log probabilities [pairs, 2] and digests [pairs] of each split; on
      other processes than 0, zeros for those that were resumed.
  """

  score: Any
  place: Callable[[dict[str, np.ndarray]], dict[str, jax.Array]]
  file: str
  reference: str
  found: _Scores = dataclasses.field(default_factory=dict)
  _saved: float = dataclasses.field(default_factory=time.monotonic)

  def resume(self, sources: Mapping[str, Any]) -> None:
    """Finds the pairs that an earlier command has scored."""

    def find() -> dict[str, int]:
      if os.path.exists(self.file):
        self.found = self._read(sources)
      return {split: len(each) for split, (each, _) in self.found.items()}

    for split, count in agreement.from_first(find).items():
      zeros = np.zeros((count, 2), np.float32), np.zeros(count, np.uint32)
      self.found.setdefault(split, zeros)
    total = sum(len(each) for each, _ in self.found.values())
    if total:
      print(f"resuming after {total} pairs of {self.file}")

  def _read(self, sources: Mapping[str, Any]) -> _Scores:
    """Returns the stored values, or none if they are of other pairs."""
    found: _Scores = {}
    for split, source in sources.items():
      try:
        stored = scored_pairs.read(self.file, split, reference=self.reference)
      except ValueError:
        break  # Interrupted in the split before, or of another reference.
      if len(stored[1]) > len(source) or any(
        scored_pairs.digest(source[index]) != value
        for index, value in enumerate(stored[1].tolist())
      ):
        found = {}
        break
      found[split] = stored
    if not found:
      print(
        f"{self.file} is of other pairs or another reference: starting over"
      )
    return found

  def score_split(self, split: str, source: Any, batch_size: int) -> None:
    """Computes the values of a split that are missing."""
    empty = np.zeros((0, 2), np.float32), np.zeros(0, np.uint32)
    log_probs, digests = ([each] for each in self.found.get(split, empty))
    # Whole batches, so that each is that of an uninterrupted command.
    for start in range(len(digests[0]), len(source), batch_size):
      indices = range(start, min(start + batch_size, len(source)))
      examples = [source[index] for index in indices]
      # A last batch of another size would be compiled again.
      padded = examples + examples[-1:] * (batch_size - len(examples))
      batch = {n: np.stack([each[n] for each in padded]) for n in _NAMES}
      scores = self.score(self.place(batch))
      log_probs.append(np.asarray(scores)[: len(examples)])
      found = [scored_pairs.digest(each) for each in examples]
      digests.append(np.asarray(found, np.uint32))
      self._save(split, log_probs, digests)
    self.found[split] = np.concatenate(log_probs), np.concatenate(digests)

  def _save(
    self, split: str, log_probs: list[np.ndarray], digests: list[np.ndarray]
  ) -> None:
    if time.monotonic() - self._saved < SAVE_SECONDS:
      return
    if agreement.is_first():
      done = np.concatenate(log_probs), np.concatenate(digests)
      found = {**self.found, split: done}
      scored_pairs.write(self.file, found, reference=self.reference)
    self._saved = time.monotonic()


if __name__ == "__main__":
  try:
    sys.exit(main(sys.argv[1:]))
  except user_error.UserError as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(2)
