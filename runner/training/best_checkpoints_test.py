"""Tests that whole runs keep the best checkpoints by a metric."""

import dataclasses
import json

from etils import epath
import pytest

from paxon.runner.checkpoints import checkpointer
from paxon.runner.settings import training
from paxon.runner.training import testing, train

KNOBS = {
  "checkpoint_every_steps": 1,
  "eval_every_steps": 1,
  "max_new_tokens": 0,
}


def _train(folder, num_train_steps, goal, learning_rate):
  """Trains, or goes on; returns the losses by step and the kept steps."""
  job, config = testing.make(
    num_train_steps=num_train_steps, learning_rate=learning_rate, **KNOBS
  )
  rule = training.Retention(
    newest=1, best=1, metric="validation/loss", goal=goal
  )
  train.run(dataclasses.replace(job, retention=rule), config, folder)
  lines = (folder / "metrics.jsonl").read_text().splitlines()
  records = [json.loads(line) for line in lines]
  losses = {
    record["step"]: record["loss"]
    for record in records
    if record["split"] == "validation"
  }
  path = folder / "checkpoints"
  with checkpointer.Checkpointer(path, read_only=True) as checkpoints:
    return losses, checkpoints.steps()


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize(
  ("goal", "learning_rate", "ends"),
  # The one makes the loss rise, the other makes it fall.
  [(training.Goal.MIN, 3.0, [3]), (training.Goal.MAX, 0.01, [3, 5])],
)
def test_the_best_and_the_newest_remain_also_after_a_restart(
  tmp_path, goal, learning_rate, ends
):
  folder = epath.Path(tmp_path)
  choose = min if goal is training.Goal.MIN else max
  best = last = 0
  for last in ends:
    losses, kept = _train(folder, last, goal, learning_rate)
    assert sorted(losses) == list(range(1, last + 1))
    best = choose(losses, key=losses.__getitem__)
    assert kept == sorted({best, last})
  # Otherwise the newest alone would satisfy the test.
  assert best != last
