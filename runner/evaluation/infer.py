"""Predictions of every evaluation split as JSON lines (`--mode=infer`).

A line has the number of its example in the split, from 0, the example's id if
the input gives ids, and what `Task.predictions` returns for it; by default the
outputs of the model's `loss` with one value per example, such as `row_nll`.
Examples that only pad a batch have no line: those of weight 0, or, in batches
with `is_example`, where it is 0. The files are `infer/STEP-SPLIT.jsonl` in the
run directory. They are made in parts, so the same command resumes a stopped
one. Texts that the input has cut (`cut_tokens`) are counted.
"""

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import itertools
import os
from typing import Any

from etils import epath
import jax
import jax.numpy as jnp
import numpy as np

from paxon.inputs import base_input
from paxon.learners import train_state
from paxon.runner import files, user_error
from paxon.runner import job as job_lib
from paxon.runner import run_dir as run_dirs
from paxon.runner import task as task_lib
from paxon.runner.generation import generation_limits
from paxon.runner.hosts import agreement
from paxon.runner.session import model_loss, output_parts, prefetch, restore
from paxon.runner.session import session as session_lib

_FORMAT = "paxon infer 1"
# Batches of a part.
_PART = 16
_IDS = "example_ids"
_CUT = "cut_tokens"


def run(
  job: job_lib.Job, run_dir: epath.Path, *, step: int | None = None
) -> int:
  """Writes the predictions of a checkpoint.

  Args:
    job: Its evaluation splits are read once.
    run_dir: The directory of its run.
    step: Step of the checkpoint; None for the newest.

  Raises:
    UserError: There is no such checkpoint or no split, the model has no outputs
      of examples, or an output has another origin.
  """
  if not job.eval_inputs:
    raise user_error.UserError(
      f"{job.experiment} has no split to predict; set the files of one, such as"
      " --fdl.infer_files=FILE of encoders, or add one to its datasets."
    )
  with contextlib.closing(job):
    generation_limits.check_splits(job)
    prefetch.check_data(job.eval_inputs, needs_targets=False)
    session, state = restore.open_trained(
      job, run_dir, step=step, splits=job.eval_inputs
    )
    predict = make_predict(session)
    for note in job.notes if agreement.is_first() else ():
      print(note, flush=True)
    for split, source in job.eval_inputs.items():
      name = f"{int(state.step)}-{split}.jsonl"
      writer = output_parts.Parts(
        run_dir / run_dirs.INFER / name,
        {
          "format": _FORMAT,
          "step": int(state.step),
          "split": split,
          "experiment": job.experiment,
          "batch_size": source.global_batch_size,
          # Only of the first data, because positions may be large.
          "data": source.get_state().get("data"),
          "predictions": _describe(job.task.predictions),
        },
      )
      if not writer.is_finished:
        _write(session, state, predict, source, writer)
      if not agreement.is_first():
        continue
      about = writer.read_about()
      cut = about.get(_CUT)
      print(
        f"step {writer.step}: {split}: {about['examples']:,} examples"
        + (f", {cut:,} of them cut" if cut else "")
        + f": {os.fspath(writer.path)}",
        flush=True,
      )
  return 0


def make_predict(session: session_lib.Session) -> Any:
  """Returns the compiled function from state and batch to predictions.

  It returns arrays [B,...] by name, which examples are not padding, bool [B],
  and the ids of the examples or None; each process has all of them.
  """
  task = session.job.task
  loss_fn = model_loss.make_loss_fn(
    task.model, specs=session.specs, deterministic=True
  )

  def predict(
    state: train_state.TrainState, batch: Mapping[str, jax.Array]
  ) -> tuple[dict[str, jax.Array], jax.Array, jax.Array | None]:
    outputs = loss_fn(session.evaluation_variables(state), batch, {}).outputs
    size = jax.tree.leaves(dict(batch))[0].shape[0]
    if task.predictions is not None:
      found = dict(task.predictions(batch, outputs))
    else:
      found = {k: v for k, v in outputs.items() if v.shape == (size,)}
    wrong = [k for k, v in found.items() if v.shape[:1] != (size,)]
    if wrong or not found:
      raise user_error.UserError(
        "Task.predictions must return arrays with an entry for each of the"
        f" {size} examples of a batch, got {wrong[0] if wrong else 'nothing'}."
      )
    ones = jnp.ones(size, jnp.float32)
    weights = batch.get("example_weights", outputs.get("row_weight", ones))
    return found, batch.get("is_example", weights) > 0, batch.get(_IDS)

  return session.layout.jit(
    predict,
    out_shardings=session.layout.replicated,
    compiler_options=session.compiler_options,
  )


def _describe(predictions: Any) -> Any:
  if isinstance(predictions, task_lib.DescribedPredictions):
    return predictions.description
  return None


def _write(
  session: session_lib.Session,
  state: train_state.TrainState,
  predict: Any,
  source: base_input.BaseInput,
  writer: output_parts.Parts,
) -> None:
  """Writes the parts of a split that do not exist, and joins them."""
  source.reset()
  state = session_lib.strip_for_evaluation(state)
  predictions, names = session.job.task.predictions, {}
  if isinstance(predictions, task_lib.NamedPredictions):
    names = predictions.names
  count = session.layout.jit(
    jnp.count_nonzero, out_shardings=session.layout.replicated
  )
  first = cut = 0
  with prefetch.Prefetcher(
    source, place=session.place, limit=source.eval_loop_num_batches
  ) as batches:
    iterator = iter(batches)
    for number in itertools.count():
      part = [*itertools.islice(iterator, _PART)]
      if not part:
        break
      if number not in writer.found:
        made = jax.device_get([predict(state, each.arrays) for each in part])
        lines = format_lines(made, first, names, size=source.global_batch_size)
        writer.write(number, "".join(f"{line}\n" for line in lines))
      first += len(part) * source.global_batch_size
      cut += sum(int(count(x.arrays[_CUT])) for x in part if _CUT in x.arrays)
  writer.finish(lambda text: {"examples": text.count("\n"), _CUT: cut})


def format_lines(
  made: list[Any],
  first: int,
  names: Mapping[str, Sequence[str]],
  *,
  size: int,
) -> Iterator[str]:
  """Yields the lines of batches, of what `make_predict` returns for each.

  `first` is the number of their first one, `names` those of `Task.predictions`.
  A batch has `size` examples, and then any padding of `Session.place`.
  """
  for values, is_kept, ids in made:
    for i in np.flatnonzero(is_kept[:size]).tolist():
      line: dict[str, Any] = {"example": first + i}
      if ids is not None:
        line["id"] = np.asarray(ids[i]).tolist()
      for name, value in values.items():
        item = np.asarray(value[i]).tolist()
        line[name] = names[name][item] if name in names else item
      yield files.to_json(line)
    first += size
