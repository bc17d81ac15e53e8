"""Tests that averaged parameters are what is evaluated and decoded with."""

import json
import math

from etils import epath
import jax
import numpy as np
import pytest

from paxon.runner.checkpoints import checkpointer
from paxon.runner.evaluation import evaluate
from paxon.runner.generation import decode
from paxon.runner.session import session as session_lib
from paxon.runner.training import testing, train

DECAY = 0.75
STEPS = 3
KNOBS = {
  "num_train_steps": STEPS,
  "checkpoint_every_steps": 1,
  "average_decay": DECAY,
  # Far enough that the average and the last parameters differ.
  "learning_rate": 0.05,
  "max_new_tokens": 6,
  "mesh": "fsdp=4,tensor=2",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  """The folder of a run with averaging."""
  path = epath.Path(tmp_path_factory.mktemp("averaged"))
  train.run(*testing.make(**KNOBS), path)
  return path


@pytest.fixture(scope="module")
def session():
  return session_lib.open_session(testing.make(**KNOBS)[0])


@pytest.fixture(scope="module")
def apply(session):
  return jax.jit(session.job.task.model.apply)


@pytest.fixture(scope="module")
def params(folder, session):
  """The parameters of every step, from the checkpoints, as they are stored."""
  result = [session.initial_state().variables["params"]]
  path = folder / "checkpoints"
  with checkpointer.Checkpointer(path, read_only=True) as checkpoints:
    for step in range(1, STEPS + 1):
      tree = checkpoints.restore(
        step, specs=session.state_specs, shardings=session.state_shardings
      ).tree
      result.append(tree.variables["params"])
  return result


@pytest.fixture(scope="module")
def averaged(params):
  """The definition, in float64."""
  result = jax.tree.map(lambda x: np.asarray(x, np.float64), params[0])
  for step in params[1:]:
    result = jax.tree.map(
      lambda a, p: DECAY * a + (1 - DECAY) * np.asarray(p, np.float64),
      result,
      step,
    )
  return jax.tree.map(lambda x: np.asarray(x, np.float32), result)


def _loss(session, apply, params):
  """The mean loss of the validation split, in float64 from logits."""
  nats, weight = 0.0, 0.0
  source = session.job.eval_inputs["validation"]
  source.reset()
  for batch in source:
    logits = apply(
      {"params": params},
      *(batch[name] for name in ("inputs", "positions", "segment_ids")),
    )
    logits = np.asarray(logits, np.float64)
    at_target = np.take_along_axis(logits, batch["targets"][..., None], -1)
    nll = np.log(np.sum(np.exp(logits), -1)) - at_target[..., 0]
    nats += np.sum(nll * batch["weights"])
    weight += np.sum(batch["weights"])
  assert math.isfinite(nats)
  return nats / weight


def _figures(path):
  lines = map(json.loads, path.read_text().splitlines())
  return {(line["step"], line["split"]): line for line in lines}


@pytest.mark.nightly
def test_evaluation(folder, session, apply, params, averaged):
  assert evaluate.run(testing.make(**KNOBS)[0], folder) == 0
  expected = _loss(session, apply, averaged)
  last = _loss(session, apply, jax.device_get(params[-1]))
  assert abs(expected - last) > 1e-2
  # In the loop, and by the program that reads the checkpoint.
  for name in ("metrics.jsonl", "eval/metrics.jsonl"):
    figures = _figures(folder / name)
    assert figures[STEPS, "validation"]["loss"] == pytest.approx(
      expected, rel=1e-5
    )


@pytest.mark.nightly
def test_decoding(folder, session, averaged):
  job, _ = testing.make(**KNOBS)
  text, ids = testing.greedy_continuation(session, {"params": averaged}, "def ")
  assert f"--- sample 1 ---\ndef {text}" in (folder / "samples.txt").read_text()
  assert decode.run(job, folder, "def ") == 0
  line = json.loads((folder / "decode" / f"{STEPS}.jsonl").read_text())
  assert (line["continuation"], line["ids"]) == (text, ids)
