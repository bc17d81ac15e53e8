"""Tests of runs that train only some variables."""

import fiddle as fdl
import jax
import numpy as np
import pytest

from paxon.runner import user_error
from paxon.runner.training import compiled_steps, testing
from paxon.runner.training import session as session_lib

PATTERN = ".*/feed_forward/.*"


def _open(**knobs):
  return session_lib.open_session(
    fdl.build(testing.TinyLm(num_layers=2, mesh="data=1", **knobs).job()),
    devices=jax.devices()[:1],
  )


def _names(tree):
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  return {
    "/".join(str(getattr(k, "key", k)) for k in p): leaf for p, leaf in leaves
  }


def test_only_matching_variables_change_and_have_slots():
  session = _open(trainable=(PATTERN,), learning_rate=1e-2)
  full = _open(learning_rate=1e-2)
  step = compiled_steps.compile_train_step(session)
  state = session.initial_state()
  old = _names(jax.device_get(state.variables))
  batch = session.place(session.job.train_input.get_next())
  new_state, metrics = step(state, batch)
  new = _names(jax.device_get(new_state.variables))
  changed = {name for name in old if np.any(old[name] != new[name])}
  expected = {name for name in old if "/feed_forward/" in name}
  assert changed == expected
  for name in _names(new_state.opt_state):
    if "/" in name and "params" in name:
      assert "feed_forward" in name
  # The first loss is that of the run that trains everything.
  whole = compiled_steps.compile_train_step(full)
  _, metrics_of_all = whole(full.initial_state(), batch)
  np.testing.assert_array_equal(metrics["loss"][0], metrics_of_all["loss"][0])
  # No gradients of the frozen kernels: fewer FLOPs in the compiled program.
  flops = [each.cost_analysis()["flops"] for each in (step, whole)]
  assert flops[0] < 0.9 * flops[1]
  assert session.num_parameters() < full.num_parameters()


def test_a_pattern_without_variables_is_an_error():
  with pytest.raises(user_error.UserError, match=r"Job.frozen: 'up' matches"):
    _open(frozen=("up",))
