"""Tests for the evaluation of a text file."""

import dataclasses
import hashlib
import json
import math

from etils import epath
import jax
import numpy as np
import pytest

from paxon.runner import user_error
from paxon.runner.evaluation import text_evaluation
from paxon.runner.session import restore, serving
from paxon.runner.session import session as session_lib
from paxon.runner.training import testing, train

_TEXT = "Größe: the fox \U0001f98a and the hound\r\n\n"
_LENGTH, _STRIDE = 16, 8


@pytest.fixture(scope="module", name="run")
def make_run(tmp_path_factory):
  """The job and the directory of a trained run."""
  folder = epath.Path(tmp_path_factory.mktemp("run"))
  job, config = testing.make(
    num_train_steps=2, checkpoint_every_steps=2, eval_every_steps=None
  )
  train.run(job, config, folder)
  return testing.make(num_train_steps=2)[0], folder


def _result(job, folder, path):
  before = folder / "eval" / "files.jsonl"
  if before.exists():
    before.unlink()
  assert text_evaluation.run(job, folder, str(path)) == 0
  (line,) = before.read_text().splitlines()
  return json.loads(line)


def _nll(job, folder, ids):
  """Returns the sum over targets, each from its own context, in float64.

  The context of a target is that of the first window with it; windows start
  at multiples of `_STRIDE`.
  """
  session = session_lib.open_session(job)
  session, state = restore.read_for_evaluation(
    session, serving.checkpoints(job, folder), step=None
  )
  variables = session.evaluation_variables(state)
  apply = jax.jit(job.task.model.apply)
  total = 0.0
  for target in range(1, len(ids)):
    start = max(0, math.ceil((target - _LENGTH) / _STRIDE)) * _STRIDE
    context = ids[start:target]
    inputs, segments = np.zeros((2, 1, _LENGTH), np.int32)
    inputs[0, : len(context)], segments[0, : len(context)] = context, 1
    positions = np.arange(_LENGTH, dtype=np.int32)[None]
    logits = apply(
      variables, *map(jax.device_put, (inputs, positions, segments))
    )
    row = np.asarray(logits[0, len(context) - 1], np.float64)
    total += (
      np.log(np.exp(row - row.max()).sum()) + row.max() - row[ids[target]]
    )
  return total


# One window, several, and more than a batch of 8.
@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("copies", [0, 1, 3])
def test_the_negative_log_likelihood_is_that_of_the_definition(
  copies, run, tmp_path
):
  job, folder = run
  text = _TEXT * copies or "fox"
  path = tmp_path / "text.txt"
  path.write_bytes(text.encode())
  result = _result(job, folder, path)
  ids = [job.task.tokenizer.begin_id, *job.task.tokenizer.encode(text)]
  size = len(text.encode())
  nll = _nll(job, folder, ids)
  assert result["nll"] == pytest.approx(nll, rel=1e-5)
  assert result["perplexity"] == pytest.approx(math.exp(nll / size), rel=1e-5)
  assert result["bits_per_byte"] == pytest.approx(
    nll / math.log(2) / size, rel=1e-5
  )
  expected = {
    "step": 2,
    "file": str(path),
    "sha256": hashlib.sha256(text.encode()).hexdigest(),
    # Bytes, and a begin token that is not predicted.
    "tokens": size,
    "bytes": size,
    "length": _LENGTH,
    "stride": _STRIDE,
    "tokenizer": "ByteTokenizer",
  }
  assert {key: result[key] for key in expected} == expected


@pytest.mark.parametrize("size", [2, 16, 17, 18, 25, 26, 100])
def test_every_token_but_the_first_is_a_target_once(size):
  ids = np.arange(100, 100 + size, dtype=np.int32)
  windows = text_evaluation.TextWindows(
    global_batch_size=3, length=_LENGTH, ids=ids, stride=_STRIDE
  )
  targets = []
  for _ in range(2):
    targets = []
    for batch in iter(windows.get_next, None):
      counted = batch["weights"] > 0
      targets += batch["targets"][counted].tolist()
      # Each follows its input, inside of the text.
      assert (batch["inputs"][counted] == batch["targets"][counted] - 1).all()
      assert (batch["segment_ids"][counted] == 1).all()
      if windows.get_state()["next"] >= windows.num_windows:
        break
    with pytest.raises(StopIteration):
      windows.get_next()
    windows.reset()
  assert targets == ids[1:].tolist()


@pytest.mark.parametrize(
  ("content", "message"),
  [
    (None, r"--eval_file=.*text.txt cannot be read \(No such file"),
    (b"", "--eval_file=.*text.txt has no token to predict"),
    (b"ab\xff", r"--eval_file=.*text.txt is not UTF-8 text \(byte 2\)"),
  ],
)
def test_a_file_that_is_no_text_is_one_clear_error(
  content, message, run, tmp_path
):
  job, folder = run
  path = tmp_path / "text.txt"
  if content is not None:
    path.write_bytes(content)
  with pytest.raises(user_error.UserError, match=message):
    text_evaluation.run(job, folder, str(path))
  with pytest.raises(user_error.UserError, match="cannot be read"):
    text_evaluation.run(job, folder, str(tmp_path))


def test_another_tokenizer_or_none_is_an_error(run, tmp_path):
  job, folder = run
  path = tmp_path / "text.txt"
  path.write_text("abc")
  without = dataclasses.replace(
    job, task=dataclasses.replace(job.task, tokenizer=None)
  )
  with pytest.raises(user_error.UserError, match="task has no tokenizer"):
    text_evaluation.run(without, folder, str(path))
  facts = folder / "tokenizer_facts.json"
  stored = facts.read_text()
  facts.write_text(json.dumps({**json.loads(stored), "probe": "0"}))
  with pytest.raises(user_error.UserError, match="tokenizer with probe 0"):
    text_evaluation.run(job, folder, str(path))
  facts.write_text(stored)
  with pytest.raises(user_error.UserError, match="step 7"):
    text_evaluation.run(job, folder, str(path), step=7)
