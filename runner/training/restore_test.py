"""Tests of runs that begin with another run's values, from end to end."""

import dataclasses
import functools
import json

from etils import epath
import fiddle as fdl
import jax
import numpy as np
import pytest

from paxon.learners import parameter_average
from paxon.learners.optimizers import pruning
from paxon.runner import user_error
from paxon.runner.checkpoints import checkpointer, stored_checkpoint
from paxon.runner.session import restore
from paxon.runner.session import session as session_lib
from paxon.runner.settings import training
from paxon.runner.training import testing, train

SOURCE_STEPS = 2
AVERAGE = fdl.Config(parameter_average.ParameterAverage, decay=0.5, debias=True)


class Warm(testing.TinyLm):
  """The tiny model, started from another run."""

  source: str
  averaged: bool

  def warm_start(self) -> fdl.Config[training.WarmStart]:
    """Returns the source."""
    return fdl.Config(
      training.WarmStart, checkpoint=self.source, averaged=self.averaged
    )


def _run(config, folder):
  config.generation = None
  epath.Path(folder).mkdir(parents=True, exist_ok=True)
  train.run(fdl.build(config), config, epath.Path(folder))
  return folder


def _metrics(folder, split):
  lines = (folder / "metrics.jsonl").read_text().splitlines()
  records = [json.loads(line) for line in lines]
  return [record for record in records if record["split"] == split]


def _opened(**knobs):
  return session_lib.open_session(testing.make(**knobs)[0])


def _start(session, source, **fields):
  return restore.warm_start(
    session, training.WarmStart(checkpoint=str(source), **fields)
  )


@pytest.fixture(scope="module")
def source(tmp_path_factory):
  """A run of two steps that evaluates with an average."""
  config = testing.TinyLm(num_train_steps=SOURCE_STEPS).job()
  config.task.learner.average = AVERAGE
  return _run(config, tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def session():
  """The model that is started, which keeps no average."""
  return _opened()


@pytest.fixture(scope="module")
def stored(source):
  """The variables in the source's checkpoint, by name."""
  checkpoint = stored_checkpoint.find_checkpoint(epath.Path(source))
  return stored_checkpoint.read_numpy(checkpoint, checkpoint.variables())


def _first_loss(session, variables):
  """The loss on the first training batch, without a step."""
  session.job.train_input.reset()
  apply = jax.jit(
    functools.partial(
      session.job.task.model.apply, deterministic=True, method="loss"
    )
  )
  ((total, weight), *_) = apply(variables, session.job.train_input.get_next())
  return float(total) / float(weight)


@pytest.mark.nightly
def test_a_warm_start_gives_metrics_of_its_source(
  source, session, tmp_path, capsys
):
  folder = tmp_path / "warm"
  config = Warm(source=str(source), averaged=True).job()
  config.num_train_steps = 0
  _run(config, folder)
  output = capsys.readouterr().out
  assert f"warm start from step {SOURCE_STEPS} of {source}" in output
  assert "read      11 of 11 variables, 9,424 of 9,424 values" in output
  record = (folder / "warm_start.txt").read_text().splitlines()
  assert f"warm start from step {SOURCE_STEPS} of {source}" in record[0]
  rows = [line.split() for line in record if line.startswith("read ")]
  names = {spec.name for spec in jax.tree.leaves(_opened().specs)}
  assert names == {row[1] for row in rows} - {"11"}
  assert not (source / "warm_start.txt").exists()
  (there,) = _metrics(source, "validation")
  (here,) = _metrics(folder, "validation")
  assert (here["step"], there["step"]) == (0, SOURCE_STEPS)
  np.testing.assert_allclose(here["loss"], there["loss"], rtol=1e-6)
  # Where the run has a checkpoint of its own, that one is used.
  config.num_train_steps = 1
  _run(config, folder)
  assert "warm start" not in capsys.readouterr().out
  (first,) = _metrics(folder, "train")
  state = _start(session, source, averaged=True)
  expected = _first_loss(session, state.variables)
  np.testing.assert_allclose(first["loss"], expected, rtol=1e-6)


def test_only_variables_come_along_by_default(source, session, stored):
  state = _start(session, source)
  cold = session.initial_state()
  assert int(state.step) == 0
  assert testing.digest(state.opt_state) == testing.digest(cold.opt_state)
  expected = jax.tree.map(lambda spec: stored[spec.name], session.specs)
  assert testing.digest(state.variables) == testing.digest(expected)
  assert testing.digest(state.variables) != testing.digest(cold.variables)
  assert jax.tree.map(lambda x: x.sharding, state) == session.state_shardings


def test_the_training_state_comes_along_if_asked_for(source):
  config = testing.TinyLm().job()
  config.task.learner.average = AVERAGE
  session = session_lib.open_session(fdl.build(config))
  state = _start(session, source, training_state=True)
  with checkpointer.Checkpointer(
    epath.Path(source / "checkpoints"), read_only=True
  ) as checkpoints:
    expected = checkpoints.restore(
      SOURCE_STEPS, specs=session.state_specs, shardings=session.state_shardings
    )
  assert testing.digest(state) == testing.digest(expected.tree)


def test_a_new_average_begins_with_the_values_read(source):
  config = testing.TinyLm().job()
  config.task.learner.average = fdl.Config(
    parameter_average.ParameterAverage, decay=0.9
  )
  session = session_lib.open_session(fdl.build(config))
  state = _start(session, source)
  for average, value in zip(
    jax.tree.leaves(state.average.average),
    jax.tree.leaves(state.variables),
    strict=True,
  ):
    np.testing.assert_array_equal(average, value)


def test_a_renamed_part_and_a_missing_one(source, session, stored):
  state = _start(
    session,
    source,
    patterns=(
      (r"(params/stack/.*)/attention/key", r"\1/attention/value"),
      (r"params/embedding/.*", None),
      (r"params/final_norm/(.*)", r"params/head_norm/\1"),
    ),
    may_be_missing=(r"params/final_norm/.*",),
  )
  params = state.variables["params"]
  cold = session.initial_state().variables["params"]
  attention = params["stack"]["layers"]["blocks_0"]["attention"]
  value = stored["params/stack/layers/blocks_0/attention/value"]
  np.testing.assert_array_equal(attention["key"], value)
  np.testing.assert_array_equal(attention["value"], value)
  for name in ("embedding", "final_norm"):
    assert testing.digest(params[name]) == testing.digest(cold[name])


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    pytest.param(
      {"checkpoint": "/nowhere"}, "/nowhere does not exist", id="folder"
    ),
    pytest.param({"step": 1}, "no checkpoint of step 1;", id="step"),
    pytest.param(
      {"patterns": (("params/stak/.*", None),)},
      r"patterns\[0\] .*matches no variable .*(did you mean|known: )",
      id="pattern",
    ),
    pytest.param(
      {"patterns": (("params/(.*)", r"old/\1"),)},
      "would read nothing",
      id="nothing",
    ),
    pytest.param(
      {"training_state": True},
      "starts at step 2 .* num_train_steps is 2",
      id="no step left",
    ),
  ],
)
def test_mismatches_are_one_line(source, session, fields, message):
  job = dataclasses.replace(session.job, num_train_steps=SOURCE_STEPS)
  start = training.WarmStart(**{"checkpoint": str(source), **fields})
  with pytest.raises(user_error.UserError, match=message) as caught:
    restore.warm_start(dataclasses.replace(session, job=job), start)
  assert "\n" not in str(caught.value)


def test_rejects_another_number_of_layers(source):
  with pytest.raises(
    user_error.UserError,
    match=r"layers/blocks_0/attention/key has shape \(2, .*\) in the checkpoint"
    r" and \(3, ",
  ):
    _start(_opened(num_layers=3), source)


def _pruned_job(num_train_steps, mesh="data=-1"):
  """Gate kernels pruned to 2:4 with SR-STE, of a schedule of 4 steps."""
  config = testing.TinyLm(num_train_steps=4, mesh=mesh).job()
  learner = config.task.learner
  learner.optimizer = fdl.Config(
    pruning.Pruned,
    optimizer=learner.optimizer,
    rules=(
      fdl.Config(
        pruning.PruningRule,
        pattern=".*/gate",
        structure=fdl.Config(pruning.Groups),
      ),
    ),
    straight_through=2e-4,
  )
  config.num_train_steps = num_train_steps
  config.checkpoint_every_steps = 2
  return config


@pytest.mark.nightly
def test_masks_are_resumed_bitwise_and_resharded(tmp_path):
  whole = _run(_pruned_job(4), tmp_path / "whole")
  parts = _run(_pruned_job(2), tmp_path / "parts")
  _run(_pruned_job(4), parts)
  found = []
  for folder in (whole, parts):
    checkpoint = stored_checkpoint.find_checkpoint(epath.Path(folder))
    names = list(checkpoint.arrays)
    found.append(stored_checkpoint.read_numpy(checkpoint, names))
  assert found[0].keys() == found[1].keys()
  for name, value in found[0].items():
    np.testing.assert_array_equal(value, found[1][name], err_msg=name)
  (name,) = (n for n in found[0] if "masks" in n)
  mask = found[0][name]
  assert mask.dtype == bool
  assert mask.mean() == 0.5
  (gate,) = (n for n in found[0] if n.startswith("params") and "gate" in n)
  np.testing.assert_array_equal(found[0][gate] != 0, mask)

  job = fdl.build(_pruned_job(4, mesh="data=2,fsdp=2,tensor=2"))
  session = session_lib.open_session(job)
  folder = epath.Path(whole) / "checkpoints"
  with checkpointer.Checkpointer(folder, read_only=True) as checkpoints:
    restored = checkpoints.restore(
      4, specs=session.state_specs, shardings=session.state_shardings
    )
  state = restored.tree
  (on_mesh,) = jax.tree.leaves(state.opt_state.masks)
  assert on_mesh.addressable_shards[0].data.size == mask.size // 4
  np.testing.assert_array_equal(on_mesh, mask)
