"""Weighted sums of metrics as the loss, against float64 numpy."""

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


def _step(factors, num_microbatches=1, few=(1, 0, 0, 0, 0, 2)):
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
