"""Weighted sums of metrics as the loss, against float64 numpy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.learners import (
  learner,
  loss_function,
  metrics,
  schedules,
  testing,
  train_state,
  train_step,
)
from paxon.learners.optimizers import sgd

SPECS = {"params": {"w": testing.spec("params/w", (3,))}}
FACTORS = {"loss": 0.5, "cubic": 2.0, "few": -0.25}


def _loss(values, batch, rngs):
  del rngs
  y = batch["x"] @ values["params"]["w"]
  weights = batch["weights"]
  return loss_function.LossOutput(
    metrics.total(y**2, weights=weights),
    {
      "cubic": metrics.total(y**3, weights=weights),
      # A weight that is no share of the others.
      "few": metrics.total(y, weights=batch["few"]),
      "unused": metrics.total(y**4, weights=weights),
      "array": (y, jnp.float32(1)),
    },
    {},
    {},
  )


def _step(factors, num_microbatches=1, few=(1, 0, 0, 0, 0, 2), at=0):
  random = np.random.default_rng(0)
  x = random.normal(size=(6, 3)).astype(np.float32)
  weights = np.array([1, 2, 1, 1, 0, 1], np.float32)
  batch = {"x": x, "weights": weights, "few": np.array(few, np.float32)}
  learned = learner.Learner(
    optimizer=sgd.Sgd(schedule=schedules.Constant(value=1.0)),
    losses=factors,
    num_microbatches=num_microbatches,
  )
  values = {"params": {"w": jnp.asarray(random.normal(size=3), jnp.float32)}}
  state = train_state.make_initial(values, learner=learned, specs=SPECS)
  state = dataclasses.replace(state, step=jnp.int32(at))
  step = train_step.make_train_step(_loss, learner=learned, specs=SPECS, seed=0)
  new, found = jax.jit(step)(state, jax.tree.map(jnp.asarray, batch))
  w = np.asarray(values["params"]["w"], np.float64)
  return batch, w, np.asarray(new.variables["params"]["w"]), found


def test_gradient_is_that_of_the_weighted_sum():
  batch, w, new, found = _step(FACTORS)
  x, weights, few = (np.float64(batch[k]) for k in ("x", "weights", "few"))
  y = x @ w
  by_output = (
    0.5 * 2 * y * weights / weights.sum()
    + 2.0 * 3 * y**2 * weights / weights.sum()
    - 0.25 * few / few.sum()
  )
  np.testing.assert_allclose(new, w - x.T @ by_output, rtol=1e-5)
  own = np.sum(y**2 * weights) / weights.sum()
  loss = (
    0.5 * own
    + 2.0 * np.sum(y**3 * weights) / weights.sum()
    - 0.25 * np.sum(y * few) / few.sum()
  )
  for name, value in (("loss", loss), ("model_loss", own)):
    np.testing.assert_allclose(
      found[name][0] / found[name][1], value, rtol=1e-5
    )


def test_microbatches_change_nothing_if_weights_are_proportional():
  factors = {"loss": 0.5, "cubic": 2.0}
  whole, parts = (_step(factors, count)[2] for count in (1, 3))
  np.testing.assert_allclose(parts, whole, rtol=1e-5)


def test_a_metric_without_weight_does_not_count():
  *_, new, _ = _step(FACTORS, few=[0] * 6)
  *_, without, _ = _step({"loss": 0.5, "cubic": 2.0}, few=[0] * 6)
  np.testing.assert_allclose(new, without, rtol=1e-6)


def test_the_loss_alone_is_the_default():
  *_, new, _ = _step({"loss": 1.0})
  *_, default, _ = _step(None)
  np.testing.assert_allclose(new, default, rtol=1e-6)


@pytest.mark.parametrize("at", [0, 5, 20])
def test_a_factor_may_be_a_schedule_of_the_step(at):
  ramp = schedules.Polynomial(start=(0, 0.0), limit=(10, 2.0))
  *_, new, found = _step(
    {"loss": 0.5, "cubic": ramp}, num_microbatches=3, at=at
  )
  factor = min(at / 10, 1.0) * 2.0
  *_, expected, _ = _step({"loss": 0.5, "cubic": factor})
  np.testing.assert_allclose(new, expected, rtol=1e-5)
  total, weight = found["loss_factor/cubic"]
  np.testing.assert_allclose(total / weight, factor, rtol=1e-6)
  assert "loss_factor/loss" not in found


class _LogSumExp:
  """A smooth maximum of two losses."""

  def aggregate(self, losses, *, step):
    """Returns the loss."""
    del step
    means = [losses[n][0] / losses[n][1] for n in ("loss", "cubic")]
    weight = losses["loss"][1]
    return jax.nn.logsumexp(jnp.stack(means)) * weight, weight


def test_an_own_aggregator_combines_losses():
  batch, w, new, found = _step(_LogSumExp())
  x, weights = np.float64(batch["x"]), np.float64(batch["weights"])
  y, share = x @ w, weights / weights.sum()
  losses = np.array([np.sum(y**2 * share), np.sum(y**3 * share)])
  slopes = np.array([x.T @ (2 * y * share), x.T @ (3 * y**2 * share)])
  likely = np.exp(losses) / np.exp(losses).sum()
  np.testing.assert_allclose(new, w - likely @ slopes, rtol=1e-5)
  total, weight = found["loss"]
  np.testing.assert_allclose(
    total / weight, np.log(np.exp(losses).sum()), rtol=1e-5
  )


class _Asks:
  """Returns a loss by name, or an array."""

  def __init__(self, name):
    self.name = name

  def aggregate(self, losses, *, step):
    """Returns the loss, or two losses."""
    del step
    total, weight = losses[self.name]
    return (total, weight) if self.name != "loss" else (total[None], weight)


@pytest.mark.parametrize(
  ("losses", "error"),
  [
    (_Asks("cubik"), r"'cubik' is not a .*loss, cubic, few"),
    (
      _Asks("loss"),
      r"_Asks.aggregate must return two scalars.*\[\(1,\), \(\)\]",
    ),
    (
      {"loss": lambda step: jnp.ones(2)},
      r"losses\['loss'\] must return a scalar .* shape \(2,\)",
    ),
  ],
  ids=["name", "shape", "factor"],
)
def test_rejects_wrong_aggregations(losses, error):
  with pytest.raises(ValueError, match=f"Learner.{error}|losses: {error}"):
    _step(losses)


@pytest.mark.parametrize("name", ["cubik", "array"])
def test_rejects_what_is_no_scalar_metric(name):
  with pytest.raises(
    ValueError, match=rf"'{name}' is not a .*loss, cubic, few"
  ):
    _step({name: 1.0})


@pytest.mark.parametrize("factors", [{}, {"loss": 0.0}])
def test_rejects_factors_that_are_all_zero(factors):
  with pytest.raises(ValueError, match=r"Learner.losses must have a factor"):
    _step(factors)


def test_rejects_pipeline_schedules():
  learned = learner.Learner(
    optimizer=sgd.Sgd(schedule=schedules.Constant(value=1.0)),
    losses={"loss": 1.0},
  )
  with pytest.raises(ValueError, match=r"Learner.losses combines the metrics"):
    train_step.make_train_step(
      _loss,
      learner=learned,
      specs=SPECS,
      seed=0,
      gradient_fn=lambda *_: None,
    )
