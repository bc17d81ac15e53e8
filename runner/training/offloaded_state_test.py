"""Tests of training with the optimizer's state in the memory of the host."""

from etils import epath
import fiddle as fdl
import jax
import numpy as np
import pytest

from paxon.inputs import packed_input
from paxon.runner import user_error
from paxon.runner.session import compiled_steps
from paxon.runner.session import session as session_lib
from paxon.runner.settings import training
from paxon.runner.training import testing, train
from paxon.sharding import host_memory

MESH = "fsdp=4,tensor=2"
KNOBS = {"eval_every_steps": None, "max_new_tokens": 0, "mesh": MESH}
STEPS = 6


class Poisoned(packed_input.PackedInput):
  """An input whose fourth batch has NaN as the weight of a token."""

  def get_next(self):
    index = self.get_state()["batches"]
    batch = super().get_next()
    if index == 3:
      batch["weights"][0, 0] = np.nan
    return batch


def _config(*, offload, **knobs):
  config = testing.TinyLm(
    **{"num_train_steps": STEPS, "checkpoint_every_steps": 2} | KNOBS | knobs
  ).job()
  config.task.learner.offload_state = offload
  # Of the number of steps of the whole run.
  config.task.learner.optimizer.schedule.total_steps = STEPS
  return config


def _run(folder, *, offload, adjust=lambda config: None, **knobs):
  config = _config(offload=offload, **knobs)
  adjust(config)
  return train.run(fdl.build(config), config, epath.Path(folder))


def _kinds(state):
  return {
    (leaf.sharding.memory_kind, bool(leaf.shape))
    for leaf in jax.tree.leaves(state)
  }


def _usual():
  return jax.devices()[0].default_memory().kind


@pytest.fixture(name="plain", scope="module")
def _plain(tmp_path_factory):
  return _run(tmp_path_factory.mktemp("plain"), offload=False).state


def test_an_offloaded_state_trains_the_same_bits(tmp_path, plain):
  state = _run(tmp_path, offload=True).state
  # Scalars, such as the count of updates, stay on the devices.
  assert _kinds(state.opt_state) == {
    (host_memory.KIND, True),
    (_usual(), False),
  }
  assert host_memory.KIND not in {kind for kind, _ in _kinds(state.variables)}
  assert testing.digest(state) == testing.digest(plain)


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("order", [(True, False), (False, True)])
def test_a_run_resumes_with_the_other_setting(tmp_path, plain, order):
  first, then = order
  _run(tmp_path, offload=first, num_train_steps=2)
  result = _run(tmp_path, offload=then)
  assert result.step == STEPS
  assert testing.digest(result.state) == testing.digest(plain)


def test_an_interrupted_run_ends_the_same(tmp_path, plain):
  _run(tmp_path, offload=True, num_train_steps=4)
  result = _run(tmp_path, offload=True)
  assert testing.digest(result.state) == testing.digest(plain)


def test_a_mesh_changes_only_the_rounding():
  losses = []
  for mesh, devices in ((MESH, None), ("data=1", jax.devices()[:1])):
    job = fdl.build(_config(offload=True, mesh=mesh))
    session = session_lib.open_session(job, devices=devices)
    step = compiled_steps.compile_train_step(session)
    state = session.initial_state()
    for _ in range(STEPS):
      batch = session.place(job.train_input.get_next())
      state, metrics = step(state, batch)
      losses.append(float(metrics["loss"][0] / metrics["loss"][1]))
  np.testing.assert_allclose(losses[:STEPS], losses[STEPS:], rtol=1e-6)


@pytest.mark.nightly
@pytest.mark.parametrize("policy", ["skip", "roll_back"])
def test_a_nan_is_handled_in_the_same_way(tmp_path, policy):
  def poison(config):
    fdl.update_callable(config.train_input, Poisoned, drop_invalid_args=True)
    if policy == "roll_back":
      config.non_finite = training.NonFinite(
        policy=training.NonFinitePolicy.ROLL_BACK
      )

  digests = set()
  for offload in (False, True):
    knobs = {"non_finite": "skip"} if policy == "skip" else {}
    folder = tmp_path / str(offload)
    folder.mkdir()
    state = _run(folder, offload=offload, adjust=poison, **knobs).state
    digests.add(testing.digest(state))
  assert len(digests) == 1
  assert (state.skipped is None) == (policy == "roll_back")


def test_a_replayed_step_is_the_same(tmp_path, plain):
  def replay(config):
    config.observability.replay_every_steps = 2

  state = _run(tmp_path, offload=True, adjust=replay).state
  assert testing.digest(state) == testing.digest(plain)


def test_devices_without_such_memory_are_an_error(monkeypatch):
  monkeypatch.setattr(host_memory, "KIND", "far_away")
  job = fdl.build(_config(offload=True))
  with pytest.raises(
    user_error.UserError,
    match=r"Learner\.offload_state must be False here: .*no memory of the kind"
    r" 'far_away', only device, ",
  ):
    session_lib.open_session(job)
