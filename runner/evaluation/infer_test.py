"""Tests of the predictions of evaluation splits."""

import dataclasses
import json

from etils import epath
import fiddle as fdl
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.runner import user_error
from paxon.runner.evaluation import evaluation, infer
from paxon.runner.session import restore
from paxon.runner.session import session as session_lib
from paxon.runner.training import testing, train


@pytest.fixture(name="run_dir", scope="module")
def _run_dir(tmp_path_factory):
  folder = epath.Path(tmp_path_factory.mktemp("run"))
  config = testing.TinyLm(
    num_layers=1, num_train_steps=2, prompts=None, max_new_tokens=None
  ).job()
  train.run(fdl.build(config), config, folder)
  return folder


def _job(**changes):
  config = testing.TinyLm(
    num_layers=1, num_train_steps=2, prompts=None, max_new_tokens=None
  ).job()
  job = fdl.build(config)
  return dataclasses.replace(job, task=dataclasses.replace(job.task, **changes))


def _longest(batch, outputs):
  nll = outputs["token_nll"] * batch["weights"]
  return {"worst": jnp.max(nll, axis=1), "nll": nll}


def _read(path):
  return [json.loads(line) for line in path.read_text().split("\n") if line]


def test_predictions_are_those_of_the_evaluation_and_resume(
  run_dir, monkeypatch
):
  monkeypatch.setattr(infer, "_PART", 1)
  assert infer.run(_job(), run_dir) == 0
  path = run_dir / "infer" / "2-validation.jsonl"
  text = path.read_text()
  lines = _read(path)
  assert [line["example"] for line in lines] == [*range(len(lines))]
  job = _job()
  session = session_lib.open_session(job)
  folder = run_dir / "checkpoints"
  session, state = restore.read_for_evaluation(session, folder)
  results = evaluation.Evaluator(session).evaluate(state)
  nll = sum(line["row_nll"] for line in lines)
  weight = sum(line["row_weight"] for line in lines)
  expected = results["validation"]["log_pplx"]
  np.testing.assert_allclose(nll / weight, expected, rtol=1e-5)

  # All parts but the second, as a stopped program leaves them.
  parts = epath.Path(f"{path}.parts")
  parts.mkdir()
  size = job.eval_inputs["validation"].global_batch_size
  for number in range(-(-len(lines) // size)):
    if number != 1:
      kept = text.splitlines(keepends=True)[
        number * size : number * size + size
      ]
      (parts / f"{number:06}.jsonl").write_text("".join(kept))
  path.unlink()
  assert infer.run(_job(), run_dir, step=2) == 0
  assert path.read_text() == text
  assert not parts.exists()

  # A finished output is kept; one of other predictions is an error.
  assert infer.run(_job(), run_dir) == 0
  path.unlink()
  epath.Path(f"{path}.json").unlink()
  assert infer.run(_job(predictions=_longest), run_dir) == 0
  found = _read(path)
  assert len(found) == len(lines)
  assert all(
    line["worst"] == max(line["nll"]) and len(line["nll"]) == 16
    for line in found
  )


def test_padding_of_batches_has_no_lines():
  # Batches of 6 examples on a mesh that splits them into 4 or 8 parts.
  batch = {"score": np.arange(8.0)}, np.array([True] * 5 + [False] * 3), None
  unweighted = {"score": np.arange(8.0)}, np.ones(8, bool), None
  lines = infer.format_lines([unweighted, batch, unweighted], 12, {}, size=6)
  found = [json.loads(line) for line in lines]
  numbers = [*range(12, 23), *range(24, 30)]
  assert [line["example"] for line in found] == numbers
  assert [line["score"] for line in found] == [n % 6 for n in numbers]


def test_predictions_without_examples_are_an_error():
  job = _job(predictions=lambda batch, outputs: {"mean": jnp.zeros(())})
  session = session_lib.open_session(job)
  state = session_lib.strip_for_evaluation(session.abstract_state())
  with pytest.raises(user_error.UserError, match="got mean"):
    infer.make_predict(session).trace(state, dict(session.batch))
