"""Tests for the programs: training, evaluation and decoding of one job."""

import dataclasses
import functools
import json
import math

from etils import epath
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.learners import parameter_average
from paxon.runner import user_error
from paxon.runner.checkpoints import checkpointer
from paxon.runner.programs import (
  compiled_steps,
  decode,
  evaluate,
  evaluation,
  restoring,
  samples,
  testing,
  train,
)
from paxon.runner.programs import session as session_lib

MESH = "data=2,fsdp=2,tensor=2"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  """The folder of a finished run on a mesh."""
  path = epath.Path(tmp_path_factory.mktemp("run"))
  job, config = testing.make(mesh=MESH)
  job = dataclasses.replace(job, baselines=lambda: {"xz": 2.5, "trigram": 9.0})
  assert train.run(job, config, path) == 0
  return path


def _records(folder):
  lines = (folder / "metrics.jsonl").read_text().splitlines()
  return [json.loads(line) for line in lines]


def _restored(folder, mesh=MESH):
  session = session_lib.open_session(testing.make(mesh=mesh)[0])
  path = folder / "checkpoints"
  with checkpointer.Checkpointer(path, read_only=True) as checkpoints:
    state = restoring.restore_for_evaluation(session, checkpoints, path)
  return session, state


def test_training_writes_everything(folder):
  names = {path.name for path in folder.iterdir()}
  assert names >= {
    "checkpoints",
    "config.json",
    "config.txt",
    "events",
    "metrics.jsonl",
    "report.html",
    "samples.txt",
  }
  steps = {path.name for path in (folder / "checkpoints").iterdir()}
  assert steps == {"4", "8", "12"}
  assert "--- sample 2 ---\nx" in (folder / "samples.txt").read_text()


def test_metrics_have_the_promised_keys(folder):
  records = {(r["step"], r["split"]): r for r in _records(folder)}
  assert {step for step, split in records if split == "train"} == set(
    range(1, 13)
  )
  assert {s for s, split in records if split == "validation"} == {6, 12}
  wanted = {"loss", "log_pplx", "bits_per_byte", "tokens_per_second"}
  assert wanted <= set(records[12, "validation"])
  more = {"learning_rate", "grad_norm", "param_norm"}
  assert wanted | more <= set(records[12, "train"])
  assert records[12, "train"]["loss"] < records[1, "train"]["loss"]
  assert records[0, "baseline/xz"]["bits_per_byte"] == 2.5


def test_evaluation_is_exact_over_the_whole_split(folder):
  session, state = _restored(folder)
  source = session.job.eval_inputs["validation"]
  source.reset()
  nats, weight, source_bytes, batches = 0.0, 0.0, 0, 0
  for batch in source:
    batches += 1
    logits = session.job.task.model.apply(
      state.variables,
      *(jnp.asarray(batch[k]) for k in ("inputs", "positions", "segment_ids")),
    )
    logits = np.asarray(logits, np.float64)
    log_sum = np.log(np.sum(np.exp(logits), -1))
    at_target = np.take_along_axis(logits, batch["targets"][..., None], -1)
    nll = log_sum - at_target[..., 0]
    nats += np.sum(nll * batch["weights"])
    weight += np.sum(batch["weights"])
    source_bytes += np.sum(batch["target_bytes"] * batch["weights"])
  assert batches > 1
  written = {(r["step"], r["split"]): r for r in _records(folder)}
  values = written[12, "validation"]
  assert values["loss"] == pytest.approx(nats / weight, rel=1e-5)
  assert values["log_pplx"] == values["loss"]
  assert values["bits_per_byte"] == pytest.approx(
    nats / math.log(2) / source_bytes, rel=1e-5
  )


def test_evaluation_takes_the_average_of_the_parameters_if_there_is_one(folder):
  session, state = _restored(folder)
  task = session.job.task
  learner = dataclasses.replace(
    task.learner, average=parameter_average.ParameterAverage(decay=0.5)
  )
  job = dataclasses.replace(
    session.job, task=dataclasses.replace(task, learner=learner)
  )
  averaging = session_lib.open_session(job)
  initial = averaging.initial_state()
  # One update moves the average halfway; compared with what is meant by it.
  step = compiled_steps.compile_train_step(averaging)
  source = job.train_input
  source.reset()
  for _ in range(3):
    initial, _ = step(initial, averaging.place(source.get_next()))
  average = averaging.evaluation_variables(initial)
  by_hand = evaluation.Evaluator(session).evaluate(
    dataclasses.replace(state, variables=average)
  )
  actual = evaluation.Evaluator(averaging).evaluate(initial)
  last = evaluation.Evaluator(session).evaluate(
    dataclasses.replace(initial, average=None)
  )
  loss = [r["validation"]["loss"] for r in (actual, by_hand, last)]
  assert loss[0] == pytest.approx(loss[1], rel=1e-6)
  assert abs(loss[0] - loss[2]) > 1e-4


def test_evaluating_gives_up_when_asked(folder):
  session, state = _restored(folder)
  evaluator = evaluation.Evaluator(session)
  assert evaluator.evaluate(state, is_stopped=lambda: True) is None


def test_evaluate_reads_the_checkpoint_and_writes_the_same_figures(
  folder, capsys
):
  before = {(r["step"], r["split"]): r for r in _records(folder)}
  assert evaluate.run(testing.make(mesh=MESH)[0], folder) == 0
  assert "step 12: validation: bits_per_byte" in capsys.readouterr().out
  after = {(r["step"], r["split"]): r for r in _records(folder)}
  assert after.keys() == before.keys()
  for name, value in before[12, "validation"].items():
    if name != "tokens_per_second":
      assert after[12, "validation"][name] == value


def test_decode_equals_the_forward_pass(folder, capsys):
  session, state = _restored(folder)
  assert decode.run(testing.make(mesh=MESH)[0], folder, "return x") == 0
  printed = capsys.readouterr().out
  tokenizer = session.job.task.tokenizer
  ids = [tokenizer.begin_id, *tokenizer.encode("return x").tolist()]
  prompt_length = len(ids)
  for _ in range(session.job.generation.max_new_tokens):
    tokens = jnp.asarray([ids], jnp.int32)
    logits = session.job.task.model.apply(
      state.variables,
      tokens,
      jnp.arange(len(ids), dtype=jnp.int32)[None],
      jnp.ones_like(tokens),
    )
    ids.append(int(jnp.argmax(logits[0, -1])))
    if ids[-1] == tokenizer.end_id:
      break
  expected = "return x" + tokenizer.decode(ids[prompt_length:])
  assert expected in printed
  assert int(state.step) == 12


def test_samples_are_the_same_on_another_mesh(folder):
  drawn = []
  for mesh in (MESH, "sequence=2,data=4"):
    session, state = _restored(folder, mesh)
    drawn.append(samples.draw(session, state))
  assert drawn[0] == drawn[1]
  assert [sample.prompt for sample in drawn[0]] == ["def ", "x"]


def test_a_finished_run_trains_no_more(folder, capsys):
  job, config = testing.make(mesh=MESH)
  before = {r["step"]: r for r in _records(folder) if r["split"] == "train"}
  assert train.run(job, config, folder) == 0
  assert "step 12 is there already" in capsys.readouterr().out
  after = {r["step"]: r for r in _records(folder) if r["split"] == "train"}
  assert after == before


@pytest.mark.parametrize(
  "program",
  [evaluate.run, functools.partial(decode.run, prompt=None)],
  ids=["eval", "decode"],
)
def test_without_a_checkpoint(tmp_path, program):
  job, _ = testing.make()
  with pytest.raises(
    user_error.UserError, match=r"There is no checkpoint in .*; train first"
  ):
    program(job, epath.Path(tmp_path))


def test_a_checkpoint_of_another_model(folder):
  job, _ = testing.make(mesh=MESH, embed_dim=32)
  with pytest.raises(
    user_error.UserError,
    match=r"params/.* has shape \(.*16\) in the checkpoint and \(.*32\) in",
  ):
    evaluate.run(job, folder)


def test_nothing_to_evaluate_on(folder):
  job = dataclasses.replace(testing.make()[0], eval_inputs={})
  with pytest.raises(user_error.UserError, match=r"TinyLm has no split to ev"):
    evaluate.run(job, folder)


def test_nothing_to_generate(folder):
  job = dataclasses.replace(testing.make(mesh=MESH)[0], generation=None)
  with pytest.raises(user_error.UserError, match=r"TinyLm cannot generate te"):
    decode.run(job, folder, "x")


def test_data_of_another_kind_than_the_checkpoint_was_trained_on(folder):
  job, _ = testing.make(mesh=MESH, seed=5)
  session = session_lib.open_session(job)
  with (
    checkpointer.Checkpointer(
      folder / "checkpoints", read_only=True
    ) as checkpoints,
    pytest.raises(
      user_error.UserError, match=r"does not fit the checkpoint of step 12: .*5"
    ),
  ):
    restoring.restore_or_start(session, checkpoints)


@pytest.mark.parametrize(
  ("knobs", "message"),
  [
    (
      {"mesh": "fsdp=16"},
      r"mesh 'fsdp=16' needs exactly 16 devices, but there are 8",
    ),
    (
      {"mesh": "data=8", "global_batch_size": 12},
      r"global_batch_size \(12\) of the split 'train' must be a multiple of 8",
    ),
    (
      {"mesh": "fsdp=8", "embed_dim": 12},
      r"mesh 'fsdp=8': .*axis 'embed' of size 12 does not divide by fsdp=8",
    ),
  ],
)
def test_a_mesh_that_does_not_fit(knobs, message):
  with pytest.raises(user_error.UserError, match=message):
    session_lib.open_session(testing.make(**knobs)[0])


def test_an_input_without_a_batch():
  job, _ = testing.make()
  empty = job.eval_inputs["validation"]
  for _ in empty:
    pass
  job = dataclasses.replace(job, train_input=empty)
  with pytest.raises(user_error.UserError, match=r"input has no batch; it nee"):
    session_lib.open_session(job)


def test_a_finite_training_input_ends_the_run(tmp_path, capsys):
  job, config = testing.make(num_train_steps=1000)
  finite = testing.make()[0].eval_inputs["validation"]
  count = len(list(finite))
  finite.reset()
  job = dataclasses.replace(job, train_input=finite, eval_inputs={})
  assert train.run(job, config, epath.Path(tmp_path)) == 0
  output = capsys.readouterr().out
  assert f"the training input ended after {count} steps" in output
  assert len(jax.devices()) == 8
