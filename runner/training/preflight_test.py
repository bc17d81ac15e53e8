"""Tests for what is said of a job before it runs."""

import dataclasses
import platform
from typing import Any

from etils import epath
import fiddle as fdl
from flax import traverse_util
import jax
import pytest

import paxon
from paxon.runner import user_error
from paxon.runner.session import compiled_steps
from paxon.runner.session import session as session_lib
from paxon.runner.settings import training
from paxon.runner.training import preflight, testing, train


def test_warns_of_arrays_that_a_mesh_does_not_shard():
  job, _ = testing.make()
  session = session_lib.open_session(dataclasses.replace(job, mesh="data=8"))
  assert preflight.warnings(session) == []
  rules = tuple(
    (logical, None if logical == "batch" else mesh_axes)
    for logical, mesh_axes in job.rules
  )
  job = dataclasses.replace(job, mesh="data=8", rules=rules)
  (warning,) = preflight.warnings(session_lib.open_session(job))
  assert "the mesh axis data=8 splits neither the batch nor any" in warning
  assert "add 'data' to the rule of 'batch'" in warning


def test_the_first_lines_describe_the_run():
  job, _ = testing.make(mesh="data=2,fsdp=4")
  session = session_lib.open_session(job)
  lines = preflight.summary(session, epath.Path("runs/my run"))
  # 264 ids, width 16, 2 layers of 2 heads of 8 and a gated MLP of 32.
  layer = 4 * 16 * (2 * 8) + 3 * 16 * 32 + 2 * 16
  parameters = 264 * 16 + 2 * layer + 16
  assert lines == [
    f"versions: paxon {paxon.__version__}, jax {jax.__version__}, Python"
    f" {platform.python_version()}",
    f"model: {parameters:,} parameters",
    "devices: 8 x cpu, mesh data=2,fsdp=4",
    "batch: 8 sequences x 16 = 128 tokens; 12 steps = 1,536 tokens",
    "metrics: tensorboard --logdir='runs/my run/events'",
    "live curves: paxon-watch 'runs/my run'",
  ]


def test_parameters_that_are_not_trained_are_counted_separately():
  job, _ = testing.make(mesh="data=8")
  session = session_lib.open_session(job)
  flat: dict[Any, Any] = traverse_util.flatten_dict(dict(session.specs))
  path = ("params", "embedding", "table")
  flat[path] = dataclasses.replace(flat[path], trainable=False)
  frozen = dataclasses.replace(
    session, specs=traverse_util.unflatten_dict(flat)
  )
  model = preflight.summary(frozen, epath.Path("runs"))[1]
  assert model == "model: 9,424 parameters, 5,200 of them trained"


@pytest.mark.parametrize("name", ["nope", "attention_contxt", "offloaded"])
def test_rejects_a_policy_that_names_no_value(name):
  _, config = testing.make(mesh="data=8")
  config.task.model.stack.remat_policy = f"save_nothing | offload('{name}')"
  session = session_lib.open_session(fdl.build(config))
  message = (
    rf"^task.model.stack.remat_policy names '{name}', but the layers name no"
    r" such value; they name attention_context, .*, feed_forward_output"
  )
  with pytest.raises(user_error.UserError, match=message):
    compiled_steps.trace_train_step(session)


def test_rejects_ids_of_another_tokenizer():
  job, _ = testing.make()
  session = session_lib.open_session(job)
  preflight.check(session)
  source = job.eval_inputs["validation"]
  source.required_vocab_size = lambda: 300
  preflight.check(session)  # None of the others occurs.
  position, get_next = source.get_state(), source.get_next

  def get_higher():
    batch = get_next()
    batch["inputs"][1, 2] = 299
    return batch

  source.get_next = get_higher
  with pytest.raises(
    user_error.UserError,
    match=r"^The split 'validation': A batch has the token id 299 \(inputs,"
    r" after the ids \[\d+, \d+\]\), but the model's vocab_size is \d+",
  ):
    preflight.check(session)
  assert source.get_state() == position


@pytest.mark.parametrize("split", ["train", "validation"])
def test_data_is_read_before_anything_is_traced(split, monkeypatch):
  job, _ = testing.make()
  session = session_lib.open_session(job)
  monkeypatch.setattr(preflight, "trace", lambda session: pytest.fail("traced"))
  source = job.inputs[split]
  problem = "none of the 3 examples has a target."
  monkeypatch.setattr(source, "find_problem_of_targets", lambda: problem)
  with pytest.raises(
    user_error.UserError, match=rf"^The split '{split}': {problem}$"
  ):
    preflight.check(session)

  def fail():
    raise ValueError("mine.jsonl: a line is no JSON (line 2 of the file)")

  monkeypatch.setattr(source, "get_next", fail)
  monkeypatch.setattr(source, "peek", fail)
  with pytest.raises(
    user_error.UserError,
    match=rf"^The first batch of the split '{split}' cannot be read: mine",
  ):
    preflight.check(session)


def test_bad_data_is_found_before_weights_are_read(tmp_path):
  job, config = testing.make()
  start = training.WarmStart(checkpoint=str(tmp_path / "missing"))
  job = dataclasses.replace(job, warm_start=start)

  def fail():
    raise ValueError("mine.jsonl: a line is no JSON (line 2 of the file)")

  job.train_input.find_problem_of_targets = fail
  with pytest.raises(user_error.UserError, match=r"mine\.jsonl: a line is no"):
    train.run(job, config, epath.Path(tmp_path / "run"))
