"""Tests for the quickstart with a mixture of experts."""

import dataclasses
import re

from etils import epath
import fiddle as fdl
import jax
import numpy as np
import pytest

from paxon.runner import user_error
from paxon.runner.checkpoints import checkpointer
from paxon.runner.evaluation import evaluate
from paxon.runner.session import restore
from paxon.runner.session import session as session_lib
from paxon.tasks.lm import upcycling
from paxon.tasks.lm.params import quickstart, quickstart_moe


def _shapes(experiment):
  model = fdl.build(experiment.job().task.model)
  tokens = np.zeros((1, 4), np.int32)
  made = jax.eval_shape(model.init, jax.random.key(0), tokens, tokens, tokens)
  return jax.tree_util.tree_leaves_with_path(made["params"])


def test_a_token_passes_through_the_parameters_of_the_dense_quickstart():
  """Except the router's."""
  mixture = quickstart_moe.PythonStdlibMoe()
  active = 0
  for path, value in _shapes(mixture):
    name = jax.tree_util.keystr(path)
    if "router" not in name:
      share = mixture.num_choices / mixture.num_experts
      active += value.size * (share if "experts" in name else 1)
  dense = sum(value.size for _, value in _shapes(quickstart.PythonStdlibLm()))
  assert active == dense


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
  """A checkpoint of the dense toy, its variables and its model."""
  folder = tmp_path_factory.mktemp("dense")
  session = session_lib.open_session(_job(quickstart.PythonStdlibLm))
  state = session.initial_state()
  state = dataclasses.replace(
    state,
    opt_state=jax.tree.map(
      lambda x: jax.random.normal(jax.random.key(1), x.shape).astype(x.dtype),
      state.opt_state,
    ),
  )
  path = epath.Path(folder / "checkpoints")
  with checkpointer.Checkpointer(path) as checkpoints:
    specs = jax.tree.leaves(session.state_specs)
    checkpoints.save(3, jax.tree.leaves(state), specs=specs, data={})
  return folder, state, session.job.task.model


def _job(cls, **fields):
  # Three layers, so that none of their sizes is the number of experts.
  return fdl.build(cls().shrink().replace(num_layers=3, **fields).job())


def _start(folder, **fields):
  job = _job(quickstart_moe.PythonStdlibUpcycled, dense=str(folder), **fields)
  session = session_lib.open_session(job)
  return session, restore.warm_start(session, job.warm_start)


def _experts(tree):
  return tree["stack"]["layers"]["blocks_0"]["feed_forward"]["experts"]


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("scan", [True, False], ids=["scan", "unrolled"])
def test_an_upcycled_model_is_the_same_function(dense, scan, capsys):
  folder, state, model = dense
  session, started = _start(folder, scan_layers=scan)
  output = capsys.readouterr().out
  assert "copies along experts: 3" in output
  assert "initial   params/stack/layers/blocks_0/feed_forward/router" in output
  router = session.job.task.model.apply(
    started.variables, method=lambda m: m.variables["params"]["stack"]
  )["layers"]["blocks_0"]["feed_forward"]["router"]
  assert np.ptp(jax.tree.leaves(router)[0]) > 0.1
  tokens = jax.random.randint(jax.random.key(0), (2, 24), 0, 256)
  np.testing.assert_allclose(
    jax.jit(session.job.task.model.apply)(started.variables, tokens),
    jax.jit(model.apply)(state.variables, tokens),
    atol=1e-5,
    rtol=1e-5,
  )


def test_noise_makes_experts_different(dense):
  folder, state, _ = dense
  _, started = _start(folder, noise=0.1)
  up = np.asarray(_experts(started.variables["params"])["up"], np.float64)
  source = state.variables["params"]["stack"]["layers"]["blocks_0"]
  source = np.asarray(source["feed_forward"]["up"], np.float64)[:, None]
  noise = (up - source) / np.sqrt(np.mean(source**2))
  # 12,288 samples: a standard error of 0.6 % of the deviation.
  np.testing.assert_allclose(noise.std(), 0.1, rtol=0.03)
  assert abs(noise.mean()) < 0.004
  pairs = np.corrcoef(noise.swapaxes(0, 1).reshape(8, -1))
  assert np.abs(pairs - np.eye(8)).max() < 0.12


def test_optimizer_state_is_copied_too(dense):
  folder, state, _ = dense
  job = _job(quickstart_moe.PythonStdlibUpcycled, num_train_steps=9)
  session = session_lib.open_session(job)
  start = fdl.build(
    upcycling.warm_start(
      str(folder), training_state=True, may_be_missing=(r".*router.*",)
    )
  )
  started = restore.warm_start(session, start)
  found, source = _moments(started, "experts"), _moments(state, "feed_forward")
  assert len(found) == len(source) == 6
  for x, y in zip(found, source, strict=True):
    np.testing.assert_array_equal(
      x, np.broadcast_to(np.asarray(y)[:, None], x.shape)
    )


def _moments(state, part):
  return [
    value
    for path, value in jax.tree_util.tree_leaves_with_path(state.opt_state)
    if part in jax.tree_util.keystr(path)
    and "norm" not in jax.tree_util.keystr(path)
  ]


def test_other_widths_are_an_error(dense):
  with pytest.raises(
    user_error.UserError,
    match=r"does not fit .*experts/gate \(from .*feed_forward/gate\) has shape"
    r" \(3, 16, 32\) in the checkpoint and \(3, 8, 16, 24\)",
  ):
    _start(dense[0], mlp_dim=24)


@pytest.mark.nightly
def test_a_mixture_with_auxiliary_losses_is_converted(tmp_path, capsys):
  """Its forward pass adds losses that a conversion does not need."""
  small = quickstart_moe.PythonStdlibMoe().shrink().replace(num_layers=1)
  session = session_lib.open_session(fdl.build(small.job()))
  folder = epath.Path(tmp_path)
  with checkpointer.Checkpointer(folder / "checkpoints") as checkpoints:
    checkpoints.save(
      0,
      session.initial_state(),
      specs=session.state_specs,
      data=session.job.train_input.get_state(),
    )
  job = fdl.build(small.replace(quantization="int8:convert").job())
  evaluate.run(dataclasses.replace(job, eval_inputs={}), folder)
  printed = capsys.readouterr().out
  error = re.search(r"quantization error: ([\d.]+)% of the root", printed)
  # Uniform rounding to 255 levels of a range of about 3 deviations.
  assert 0.1 < float(error[1]) < 2
