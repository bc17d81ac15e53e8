"""Tests for the average of parameters."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.learners import learner as learner_lib
from paxon.learners import (
  loss_function,
  parameter_average,
  schedules,
  testing,
  train_state,
  train_step,
)
from paxon.learners.optimizers import sgd
from paxon.sharding import variables

SPECS = {
  "params": {
    "a": testing.spec("params/a", (4, 2), axes=("embed", "mlp")),
    "frozen": testing.spec("params/frozen", (2,), trainable=False),
  },
  "stats": {
    "mean": testing.spec("stats/mean", (), update=variables.UpdateRule.REPLACE)
  },
}
PLAIN = {"params": {"a": SPECS["params"]["a"]}}


def _params(t):
  values = np.random.default_rng(t).normal(size=(4, 2))
  return {"params": {"a": jax.device_put(np.float32(values))}}


def _after(average, steps):
  state = average.initial(_params(0))
  update = jax.jit(average.update)
  for t in range(1, steps + 1):
    state = update(state, _params(t))
  return average.values(state, _params(steps))["params"]["a"]


def _exact(t):
  return np.asarray(_params(t)["params"]["a"], np.float64)


@pytest.mark.parametrize("steps", [0, 1, 2, 20])
@pytest.mark.parametrize("decay", [0.5, 0.99])
def test_matches_the_definition(steps, decay):
  expected = _exact(0)
  for t in range(1, steps + 1):
    expected = decay * expected + (1 - decay) * _exact(t)
  average = parameter_average.ParameterAverage(decay=decay)
  np.testing.assert_allclose(
    _after(average, steps), expected, rtol=1e-5, atol=1e-6
  )


@pytest.mark.parametrize("steps", [1, 2, 20])
@pytest.mark.parametrize("decay", [0.5, 0.99])
def test_warmup_is_that_of_pax_one_update_later(steps, decay):
  # Pax counts updates from 0 and averages the parameters before each.
  expected = _exact(0)
  for count in range(steps + 1):
    d = min(decay, (1 + count) / (10 + count))
    expected = d * expected + (1 - d) * _exact(count)
  average = parameter_average.ParameterAverage(decay=decay, warmup=True)
  np.testing.assert_allclose(
    _after(average, steps), expected, rtol=1e-5, atol=1e-6
  )


@pytest.mark.parametrize(("decay", "warmup"), [(0.5, False), (0.4, True)])
def test_before_updates_matches_pax(decay, warmup):
  """Compares training steps with Pax's update rule, in float64."""
  average = parameter_average.ParameterAverage(
    decay=decay, warmup=warmup, before_update=True
  )
  learner = _learner(average=average)
  state = train_state.make_initial(_params(0), learner=learner, specs=PLAIN)

  def loss_fn(values, batch, rngs):
    del rngs
    loss = jnp.sum(values["params"]["a"] * batch["x"]), jnp.float32(1)
    return loss_function.LossOutput(loss, {}, {}, {})

  step = jax.jit(
    train_step.make_train_step(loss_fn, learner=learner, specs=PLAIN, seed=0)
  )
  value = expected = _exact(0)
  for count in range(8):
    d = min(decay, (1 + count) / (10 + count)) if warmup else decay
    expected = expected - (1 - d) * (expected - value)
    value = value - 0.1 * _exact(count + 1)
    state, _ = step(state, {"x": _params(count + 1)["params"]["a"]})
    used = train_state.evaluation_variables(state, learner=learner, specs=PLAIN)
    np.testing.assert_allclose(
      used["params"]["a"], expected, rtol=1e-5, atol=1e-6
    )


def test_rejects_warmup_with_debiasing():
  with pytest.raises(ValueError, match=r"debias and warmup must not both"):
    parameter_average.ParameterAverage(decay=0.9, debias=True, warmup=True)


@pytest.mark.parametrize("steps", [1, 2, 20])
@pytest.mark.parametrize("decay", [0.5, 0.99, 0.9999])
def test_debiased_is_a_weighted_mean_of_updated_parameters(steps, decay):
  weights = decay ** np.arange(steps - 1, -1, -1.0)
  expected = sum(
    w * _exact(t) for t, w in enumerate(weights, start=1)
  ) / np.sum(weights)
  average = parameter_average.ParameterAverage(decay=decay, debias=True)
  np.testing.assert_allclose(
    _after(average, steps), expected, rtol=1e-5, atol=1e-6
  )


def test_debiased_before_the_first_update_is_the_parameters():
  average = parameter_average.ParameterAverage(decay=0.9, debias=True)
  np.testing.assert_array_equal(_after(average, 0), _params(0)["params"]["a"])


def test_average_of_constant_parameters_is_constant():
  average = parameter_average.ParameterAverage(decay=0.9999)
  state = average.initial(_params(0))
  update = jax.jit(average.update)
  for _ in range(2000):
    state = update(state, _params(0))
  np.testing.assert_array_equal(
    average.values(state, _params(0))["params"]["a"], _params(0)["params"]["a"]
  )


def _learner(**fields):
  return learner_lib.Learner(
    optimizer=sgd.Sgd(schedule=schedules.Constant(value=0.1)), **fields
  )


def test_evaluation_uses_the_average_of_optimized_variables_only():
  average = parameter_average.ParameterAverage(decay=0.9)
  learner = _learner(average=average)
  values = jax.tree.map(lambda s: jnp.ones(s.shape, jnp.bfloat16), SPECS)
  state = train_state.make_initial(values, learner=learner, specs=SPECS)
  doubled = dataclasses.replace(
    state, variables=jax.tree.map(lambda x: 2 * x, state.variables)
  )
  used = train_state.evaluation_variables(doubled, learner=learner, specs=SPECS)
  assert jax.tree.map(lambda x: float(x.ravel()[0]), used) == {
    "params": {"a": 1.0, "frozen": 2.0},
    "stats": {"mean": 2.0},
  }
  assert used["params"]["a"].dtype == jnp.bfloat16
  assert state.average.average["params"]["a"].dtype == jnp.float32


def test_without_an_average_evaluation_uses_the_variables():
  learner = _learner()
  values = jax.tree.map(lambda s: jnp.ones(s.shape), SPECS)
  state = train_state.make_initial(values, learner=learner, specs=SPECS)
  used = train_state.evaluation_variables(state, learner=learner, specs=SPECS)
  assert used is state.variables
  assert state.average is None


def test_specs_of_the_average():
  average = parameter_average.ParameterAverage(decay=0.9)
  learner = _learner(average=average)
  specs = train_state.state_specs(SPECS, learner=learner)
  a = specs.average.average["params"]["a"]
  assert (a.name, a.axes) == ("average/params/a", ("embed", "mlp"))
  assert specs.average.count.name == "average/count"
  values = jax.tree.map(lambda s: jnp.ones(s.shape, s.dtype), SPECS)
  state = train_state.make_initial(values, learner=learner, specs=SPECS)
  described = jax.tree.map(lambda s: (s.shape, s.dtype.name), specs)
  assert described == jax.tree.map(lambda x: (x.shape, x.dtype.name), state)


@pytest.mark.parametrize("decay", [0.0, 1.0, -0.5])
def test_rejects(decay):
  with pytest.raises(ValueError, match=rf"decay must be .*, got {decay}"):
    parameter_average.ParameterAverage(decay=decay)
