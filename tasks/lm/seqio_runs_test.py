"""Tests of training on a SeqIO mixture by two processes, killed and resumed."""

import json
import os
import re
import time

import pytest
import sentencepiece

from paxon.inputs.seqio_tasks import testing as seqio_testing
from paxon.runner import run_dir
from paxon.runner.hosts import testing as forks_lib
from paxon.runner.monitoring import metrics_file
from paxon.tasks.lm import seqio_run

MAIN = "command_line"
STEPS = 8
_MEASURED = re.compile("_second|goodput|mfu|tflops|memory|straggler").search


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
  """Folder with the files of the tasks."""
  folder = tmp_path_factory.mktemp("texts")
  for seed, name in enumerate(("text", "other")):
    for split, count in (("train", 30), ("validation", 5)):
      seqio_testing.write_texts(
        folder / f"{name}-{split}-0",
        seqio_testing.texts(count, seed=10 * seed + count),
      )
  seqio_testing.train_sentencepiece(folder)
  return folder


@pytest.fixture(scope="module")
def forks(tmp_path_factory):
  folder = tmp_path_factory.mktemp("processes")
  with forks_lib.Forks(seqio_run.__name__, folder) as made:
    yield made


def _start(forks, folder, texts, **knobs):
  knobs = {
    "folder": texts,
    "num_train_steps": STEPS,
    "checkpoint_every_steps": 2,
    "eval_every_steps": STEPS,
    "mesh": "data=2",
    "predict_every_steps": 4,
  } | knobs
  address = f"localhost:{forks_lib.free_port()}"
  flags = [
    "--exp=tasks.lm.seqio_run.TinySeqIo",
    f"--job_log_dir={os.fspath(folder)}",
    *(f"--fdl.{name}={value}" for name, value in knobs.items()),
    f"--coordinator_address={address}",
    "--num_processes=2",
    "--host_timeout=100",
  ]
  return [
    forks.start(MAIN, [*flags, f"--process_id={index}"], devices=1)
    for index in range(2)
  ]


def _figures(folder):
  return {
    (record.step, record.split, name): value
    for record in metrics_file.read(folder / run_dir.METRICS)
    for name, value in record.values.items()
    if not _MEASURED(name)
  }


def test_two_processes_that_are_killed_go_on_as_if_they_were_not(
  forks, texts, tmp_path
):
  expected, killed = tmp_path / "expected", tmp_path / "killed"
  whole = _start(forks, expected, texts)
  assert [forks.wait(p) for p in whole] == [0, 0], [p.output() for p in whole]

  # Slow enough to be killed before the end.
  first = _start(forks, killed, texts, delay=0.6)
  checkpoints = killed / run_dir.CHECKPOINTS
  while not (checkpoints / "2").exists():
    assert all(p.poll() is None for p in first), [p.output() for p in first]
    time.sleep(0.05)
  for process in first:
    process.kill()
  assert [forks.wait(p) for p in first] == [-9, -9], [p.output() for p in first]
  assert (STEPS, "train", "loss") not in _figures(killed)
  again = _start(forks, killed, texts, delay=0.6)
  assert [forks.wait(p) for p in again] == [0, 0], [p.output() for p in again]
  found, wanted = _figures(killed), _figures(expected)
  assert {k: v for k, v in found.items() if k[0] == STEPS} == {
    k: v for k, v in wanted.items() if k[0] == STEPS
  }
  assert wanted[STEPS, "train", "loss"] < wanted[1, "train", "loss"]

  # The task's metrics: of the log likelihoods of its five texts.
  values = {k[2]: v for k, v in wanted.items() if k[1] == "made_text"}
  processor = sentencepiece.SentencePieceProcessor(
    model_file=str(texts / "pieces.model")
  )
  given = seqio_testing.texts(5, seed=5)
  tokens = sum(len(processor.encode(text)) + 1 for text in given)
  assert values["mean_score"] == pytest.approx(
    -values["loss"] * tokens / 5, rel=1e-5
  )
  assert values["target_length"] == sum(map(len, given)) / 5
  assert "exact_match" not in values

  # The metrics of texts, at their own interval, and by a program of decoding.
  both = _decoded(expected, "metrics.jsonl")
  assert sorted({step for step, _ in both}) == [STEPS // 2, STEPS]
  decoding = forks.start(
    MAIN,
    [
      "--exp=tasks.lm.seqio_run.TinySeqIo",
      f"--job_log_dir={os.fspath(expected)}",
      "--mode=decode",
    ],
    devices=2,
  )
  assert forks.wait(decoding) == 0, decoding.output()
  last = {key: x for key, x in both.items() if key[0] == STEPS}
  assert _decoded(expected, "eval/metrics.jsonl") == last
  path = expected / "decode" / f"{STEPS}-decode_made_both.jsonl"
  lines = [json.loads(line) for line in path.read_text().splitlines()]
  assert [line["targets"] for line in lines if line["task"] == "made_text"] == (
    given
  )
  for task in ("made_text", "made_other"):
    texts = [line["prediction"] for line in lines if line["task"] == task]
    length = last[STEPS, "decode_made_both"][f"{task}/predicted_length"]
    assert length == sum(map(len, texts)) / 5


def _decoded(folder, name):
  """Returns the metrics of texts by step and split."""
  return {
    (record.step, record.split): record.values
    for record in metrics_file.read(folder / name)
    if record.split.startswith("decode_")
  }
