"""Tests for the quickstart with Mamba-2 layers."""

from etils import epath
import fiddle as fdl
import jax
import numpy as np

from paxon.runner.checkpoints import checkpointer
from paxon.runner.session import compiled_steps, restore
from paxon.runner.session import session as session_lib
from paxon.runner.training import testing
from paxon.tasks.lm.params import quickstart, quickstart_mamba2


def _size(experiment):
  model = fdl.build(experiment.job().task.model)
  ids = np.zeros((1, 4), np.int32)
  made = jax.eval_shape(model.init, jax.random.key(0), ids, ids, ids)
  return sum(x.size for x in jax.tree.leaves(made["params"]))


def test_about_as_many_parameters_as_the_transformer():
  transformer = _size(quickstart.PythonStdlibLm())
  ratio = _size(quickstart_mamba2.PythonStdlibMamba2()) / transformer
  assert 0.98 < ratio < 1.02


def test_a_resumed_run_is_the_uninterrupted_one(tmp_path):
  experiment = quickstart_mamba2.PythonStdlibMamba2().shrink()
  job = fdl.build(experiment.replace(num_train_steps=4).job())
  session = session_lib.open_session(job, devices=jax.devices()[:1])
  step = compiled_steps.compile_train_step(session)
  source = job.train_input

  def trained(state):
    for _ in range(2):
      state, _ = step(state, session.place(source.get_next()))
    return jax.tree.map(np.array, state), state

  with checkpointer.Checkpointer(epath.Path(tmp_path)) as checkpoints:
    before, state = trained(restore.restore_or_start(session, checkpoints))
    data = source.get_state()
    checkpoints.save(2, state, specs=session.state_specs, data=data)
    checkpoints.wait()
    expected, _ = trained(state)
    found, _ = trained(restore.restore_or_start(session, checkpoints))
  assert testing.digest(found) == testing.digest(expected)
  assert testing.digest(found) != testing.digest(before)
