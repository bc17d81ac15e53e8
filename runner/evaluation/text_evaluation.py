"""Perplexity and bits per byte of a text file (`--mode=eval --eval_file`).

The file is one text. Its tokens are those that the model's tokenizer makes of a
prompt: with a begin-of-document token if the model expects one. Every token is
predicted once, from the tokens before it; without a begin token, the first one
is only context. A text longer than `length` is read in windows of `length`
tokens, each half a window after the one before, and only the tokens that no
earlier window predicted count. So every token after the first window is
predicted from at least half a window.

  perplexity    = exp(nll / tokens)
  bits_per_byte = nll / ln 2 / bytes of the predicted tokens

A line of JSON with these is added to `eval/files.jsonl`.
"""

import contextlib
import dataclasses
import hashlib
import math
import os
from typing import Any

from etils import epath
import numpy as np
import numpy.typing as npt

from paxon.inputs import base_input, tokenizer_protocol
from paxon.quantization import recipes
from paxon.runner import files, user_error
from paxon.runner import job as job_lib
from paxon.runner import run_dir as run_dirs
from paxon.runner.evaluation import evaluation
from paxon.runner.generation import generation_limits, generation_program
from paxon.runner.hosts import agreement
from paxon.runner.session import restore, serving

_SPLIT = "file"
_RESULTS = "files.jsonl"
_METRIC = "log_pplx"


@dataclasses.dataclass(kw_only=True, eq=False)
class TextWindows(base_input.BaseInput):
  """A text in overlapping windows; each token but the first is a target once.

  Attributes:
    ids: The tokens of the text, int32 [N], N at least 2.
    stride: Distance of windows, from 1 to `length`. The weights of a window's
      first `length - stride` targets are 0 in all windows but the first.
  """

  ids: npt.NDArray[np.int32]
  stride: int
  _next: int = dataclasses.field(default=0, init=False)

  @property
  def num_windows(self) -> int:
    """The number of windows."""
    beyond = max(0, len(self.ids) - 1 - self.length)
    return 1 + -(-beyond // self.stride)

  def batch_shapes(self) -> base_input.Shapes:
    """Returns the shapes and dtypes of the arrays of `get_next`."""
    shape = self.per_host_batch_size, self.length
    keys = ("inputs", "targets", "positions", "segment_ids", "target_bytes")
    integers = {key: (shape, np.dtype(np.int32)) for key in keys}
    return {**integers, "weights": (shape, np.dtype(np.float32))}

  def get_next(self) -> base_input.Batch:
    """Returns this host's windows; the last batch is padded.

    Raises:
      StopIteration: All windows were returned.
    """
    if self._next >= self.num_windows:
      raise StopIteration
    batch: base_input.Batch = {
      name: np.zeros(shape, dtype)
      for name, (shape, dtype) in self.batch_shapes().items()
    }
    first = self._next + self.infeed_host_index * self.per_host_batch_size
    for i in range(self.per_host_batch_size):
      self._fill(batch, i, first + i)
    self._next += self.global_batch_size
    return batch

  def _fill(self, batch: base_input.Batch, i: int, window: int) -> None:
    """Writes a window to sequence `i` of a batch, if there is such a window."""
    if window >= self.num_windows:
      return
    start = window * self.stride
    ids = self.ids[start : start + self.length + 1]
    n = len(ids) - 1
    batch["inputs"][i, :n], batch["targets"][i, :n] = ids[:-1], ids[1:]
    batch["positions"][i] = np.arange(self.length)
    batch["segment_ids"][i, :n] = 1
    known = self.length - self.stride if window else 0
    batch["weights"][i, known:n] = 1

  def reset(self) -> None:
    """Returns to the first batch."""
    self._next = 0

  def get_state(self) -> base_input.State:
    """Returns the number of windows that were returned."""
    return {"next": self._next}

  def set_state(self, state: base_input.State) -> None:
    """Sets a position from `get_state`."""
    self._next = state["next"]


def run(
  job: job_lib.Job, run_dir: epath.Path, given: str, *, step: int | None = None
) -> int:
  """Evaluates a text file with a checkpoint; prints and writes the result.

  Args:
    job: The job of a decoder with a tokenizer.
    run_dir: The directory of its run.
    given: Path of the file, UTF-8.
    step: Of the checkpoint; None for the newest.

  Raises:
    UserError: There is no such checkpoint, the file cannot be read as text, the
      model is not a decoder with a tokenizer, or the run was trained with
      another tokenizer.
  """
  reason = generation_program.generation_problem(job, decoder_only=True)
  if reason is not None:
    raise user_error.UserError(
      f"--eval_file: {job.experiment} cannot predict a text: {reason}."
    )
  if serving.get_mode(job) is recipes.Mode.CONVERT:
    raise user_error.UserError(
      f"--eval_file does not convert weights (quantization={job.weights!r});"
      " leave out one of them."
    )
  tokenizer = job.task.tokenizer
  assert tokenizer is not None
  path = run_dirs.resolve(given, os.environ)
  data = files.read_input(path, flag="--eval_file")
  ids = _encode(tokenizer, data, path)
  generation_limits.check_ids(job, ids)
  length = job.train_input.length
  source = TextWindows(
    global_batch_size=job.train_input.global_batch_size,
    length=length,
    ids=ids,
    stride=max(1, length // 2),
  )
  job = dataclasses.replace(
    job, eval_inputs={_SPLIT: source}, early_stopping=None
  )
  with contextlib.closing(job):
    session, state = restore.open_trained(job, run_dir, step=step)
    results = evaluation.Evaluator(session).evaluate(state)
  assert results is not None
  nll = results[_SPLIT][_METRIC]
  # The tokens of a whole text have its bytes, whatever a tokenizer adds.
  num_bytes = len(data)
  if not _begins(tokenizer, ids):
    num_bytes -= int(tokenizer.byte_counts(ids[:1])[0])
  result = {
    "step": int(state.step),
    "file": os.fspath(path),
    "sha256": hashlib.sha256(data).hexdigest(),
    "tokens": len(ids) - 1,
    "bytes": num_bytes,
    "nll": nll * (len(ids) - 1),
    "perplexity": math.inf if nll >= 700 else math.exp(nll),
    "bits_per_byte": nll * (len(ids) - 1) / math.log(2) / max(num_bytes, 1),
    "length": length,
    "stride": source.stride,
    **tokenizer_protocol.describe(tokenizer),
  }
  _report(result, run_dir)
  return 0


def _report(result: dict[str, Any], run_dir: epath.Path) -> None:
  print(
    f"step {result['step']}: {result['file']}: perplexity"
    f" {result['perplexity']:.6g}, bits_per_byte"
    f" {result['bits_per_byte']:.6g}, {result['tokens']:,} tokens,"
    f" {result['bytes']:,} bytes, windows of {result['length']}, stride"
    f" {result['stride']}"
  )
  if agreement.is_first():
    path = run_dir / run_dirs.EVAL / _RESULTS
    before = ""
    with contextlib.suppress(FileNotFoundError):
      before = files.read_text(path)
    line = files.to_json(result, ensure_ascii=False)
    files.write_text(path, f"{before}{line}\n")
    print(f"results: {os.fspath(path)}", flush=True)


def _encode(
  tokenizer: tokenizer_protocol.Tokenizer, data: bytes, path: epath.Path
) -> npt.NDArray[np.int32]:
  """Returns the ids of a text, at least two."""
  try:
    text = data.decode()
  except UnicodeDecodeError as error:
    raise user_error.UserError(
      f"--eval_file={os.fspath(path)} is not UTF-8 text (byte {error.start})."
    ) from error
  ids = generation_program.encode_prompt(tokenizer, text)
  if len(ids) < 2:
    raise user_error.UserError(
      f"--eval_file={os.fspath(path)} has no token to predict."
    )
  return np.asarray(ids, np.int32)


def _begins(
  tokenizer: tokenizer_protocol.Tokenizer, ids: npt.NDArray[np.int32]
) -> bool:
  """Whether the first id is a begin token, which has no text."""
  return int(tokenizer.byte_counts(ids[:1])[0]) == 0
