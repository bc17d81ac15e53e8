"""Tests that experiments train with each recipe that the knob names."""

import functools

from etils import epath
import fiddle as fdl
import jax
import numpy as np
import pytest

from paxon.learners import metrics as metrics_lib
from paxon.quantization import recipes, rules
from paxon.runner import knobs, user_error
from paxon.runner.checkpoints import checkpointer
from paxon.runner.session import compiled_steps, model_loss, restore
from paxon.runner.session import session as session_lib
from paxon.runner.training import testing

STEPS = 10


class Careful(testing.TinyLm):
  """Some layers exempt, some with a recipe of their own."""

  quantization = "fp8"
  num_layers = 3

  def quantization_rules(self):
    """Returns rules of every kind."""
    return (
      rules.ExemptLayers(first=1, last=1),
      rules.Rule("*.blocks[0].attention", None),
      rules.Rule("head", recipes.find_recipe("fp8_current")),
      *super().quantization_rules(),
    )


def _compiled(experiment):
  session = session_lib.open_session(
    fdl.build(experiment.job()), devices=jax.devices()[:1]
  )
  return session, compiled_steps.compile_train_step(session)


_careful_run = functools.cache(
  lambda: _compiled(
    Careful(mesh="data=1", learning_rate=1e-2, quantization_monitor=True)
  )
)


def _trained(session, step):
  """Returns the losses of some steps, the metrics and the last state."""
  state, losses, means = session.initial_state(), [], {}
  batch = session.place(session.job.train_input.get_next())
  for _ in range(STEPS):
    state, metrics = step(state, batch)
    totals = metrics_lib.Totals()
    totals.add(metrics)
    means = totals.means()
    losses.append(means["loss"])
  return losses, means, jax.device_get(state.variables)


def _tiny(**given):
  return testing.TinyLm(
    num_layers=1, mesh="data=1", learning_rate=1e-2, **given
  )


# docs/quantization.md has the losses of longer trainings with all recipes.
@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("name", ["fp8_block", "int4"])
def test_it_learns(name):
  losses, _, variables = _trained(*_compiled(_tiny(quantization=name)))
  assert np.all(np.isfinite(losses))
  assert losses[-1] < losses[0] - 0.3
  assert ("fp8" in variables) == recipes.find_recipe(name).is_delayed


def test_rules_of_every_kind_and_the_monitor():
  losses, means, variables = _trained(*_careful_run())
  assert losses[-1] < losses[0] - 0.3
  state = variables["fp8"]["stack"]["layers"]["blocks_0"]
  # Only of feed-forward layers, and of these only the one in the middle.
  assert set(state) == {"feed_forward"}
  history = state["feed_forward"]["einsum"]["up"]["gradient_amax_history"]
  np.testing.assert_array_equal(
    np.any(history > 0, axis=1), [False, True, False]
  )
  told = [name for name in means if "gradient_flushed" in name]
  assert told


def test_a_run_resumes_with_its_histories(tmp_path, capsys):
  """Resumed is uninterrupted, bit by bit."""
  session, step = _careful_run()
  source, at = session.job.train_input, 3

  def trained(state):
    for _ in range(at):
      state, _ = step(state, session.place(source.get_next()))
    return jax.tree.map(np.array, state), state

  with checkpointer.Checkpointer(epath.Path(tmp_path)) as checkpoints:
    early, state = trained(restore.restore_or_start(session, checkpoints))
    data = source.get_state()
    checkpoints.save(at, state, specs=session.state_specs, data=data)
    checkpoints.wait()
    expected, _ = trained(state)
    # As another process would, from what is stored.
    state = restore.restore_or_start(session, checkpoints)
  assert "from the checkpoint of step 3" in capsys.readouterr().out
  found, _ = trained(state)
  assert testing.digest(found) == testing.digest(expected)
  before, after = (
    x.variables["fp8"]["stack"]["layers"]["blocks_0"]["feed_forward"]["einsum"][
      "gate"
    ]["gradient_amax_history"][1]
    for x in (early, found)
  )
  # The newest come first, and those of the checkpoint after them.
  np.testing.assert_array_equal(after[at : 2 * at], before[:at])
  assert np.all(after[: 2 * at] > 0)


def test_the_knob_changes_nothing_where_it_is_not_set():
  config = _tiny().job()
  assert "cublas_products" not in config.compiler_option_sets
  assert model_loss.random_streams(fdl.build(config.task.model)) == (
    "dropout",
    "masking",
  )
  config = _tiny(quantization="int8").job()
  assert "cublas_products" in config.compiler_option_sets
  streams = model_loss.random_streams(fdl.build(config.task.model))
  assert streams == ("dropout", "masking", "rounding")


@pytest.mark.parametrize(
  ("given", "message"),
  [
    ({"quantization": "fp9"}, "quantization = 'fp9': no recipe is named 'fp9'"),
    ({"quantization": "int8:run"}, "no mode is named 'run'"),
    ({"quantization_monitor": True}, "quantization_monitor has no effect"),
  ],
)
def test_wrong_knobs(given, message):
  with pytest.raises(knobs.KnobError, match=message):
    _tiny(**given).job()


class Misspelled(testing.TinyLm):
  """A rule for a layer that is not there."""

  def quantization_rules(self):
    """Returns a rule without a layer."""
    return (rules.Rule("*.attentions", recipes.find_recipe("fp8")),)


def test_a_rule_that_matches_nothing():
  with pytest.raises(user_error.UserError, match="attentions' matches nothing"):
    Misspelled().job()
