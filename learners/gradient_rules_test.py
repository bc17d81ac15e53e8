"""Gradient rules in the train step, against float64 numpy.

`Maml` is the rule of docs/own_training_programs.md: a user's.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.learners import (
  gradients,
  learner,
  loss_function,
  metrics,
  privacy,
  schedules,
  testing,
  train_state,
  train_step,
  variable_groups,
)
from paxon.learners.optimizers import sgd, sophia

TASKS, EXAMPLES, DIM, RATE = 4, 6, 3, 0.4
SPECS = {
  "params": {"w": testing.spec("params/w", (DIM,))},
  "frozen": {"c": testing.spec("frozen/c", (), trainable=False)},
}
_RANDOM = np.random.default_rng(0)
VALUES = {
  "params": {"w": np.float32(_RANDOM.normal(size=DIM))},
  "frozen": {"c": np.float32(0.5)},
}
BATCH = {
  "inputs": np.float32(_RANDOM.normal(size=(TASKS, EXAMPLES, DIM))),
  "targets": np.float32(_RANDOM.normal(size=(TASKS, EXAMPLES))),
}


def _loss_fn(values, batch, rngs):
  """The squared error of tanh(c x.w)."""
  del rngs
  found = jnp.tanh(
    values["frozen"]["c"] * (batch["inputs"] @ values["params"]["w"])
  )
  error = jnp.square(found - batch["targets"])
  loss = metrics.total(error, weights=jnp.ones_like(error))
  return loss_function.LossOutput(loss, {"again": loss}, {}, {})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Maml:
  """The loss after a step of gradient descent on the half of each task."""

  rate: float

  def make_gradient_fn(self, loss_fn, *, make_default, specs):
    """Returns the gradients of the loss after adaptation."""

    def adapt(values, batch, rngs):
      def mean_loss(params, others):
        merged = variable_groups.merge(params, others)
        total, weight = loss_fn(merged, batch, rngs).loss
        return total / weight

      optimized = variable_groups.Group.OPTIMIZED
      params = variable_groups.select(values, optimized, specs=specs)
      others = variable_groups.select(
        values, variable_groups.Group.FROZEN, specs=specs
      )
      slopes = jax.grad(mean_loss)(params, others)
      moved = jax.tree.map(lambda p, g: p - self.rate * g, params, slopes)
      return variable_groups.merge(moved, others)

    def adapted_loss_fn(values, batch, rngs):
      def one_task(task):
        half = len(task["inputs"]) // 2
        support, query = (
          jax.tree.map(lambda x, s=s: x[s], task)
          for s in (slice(half), slice(half, None))
        )
        return loss_fn(adapt(values, support, rngs), query, rngs)

      result = jax.vmap(one_task)(batch)
      loss = jax.tree.map(jnp.sum, result.loss)
      return loss_function.LossOutput(
        loss, jax.tree.map(jnp.sum, result.metrics), {}, {}
      )

    return make_default(adapted_loss_fn)


def _step(rule, *, num_microbatches=1, **fields):
  """Returns the gradient of a step, as float64, and its metrics."""
  one = learner.Learner(
    optimizer=sgd.Sgd(schedule=schedules.Constant(value=1.0)),
    gradient_rule=rule,
    num_microbatches=num_microbatches,
    **fields,
  )
  values = jax.tree.map(jnp.asarray, VALUES)
  state = train_state.make_initial(values, learner=one, specs=SPECS)
  step = train_step.make_train_step(_loss_fn, learner=one, specs=SPECS, seed=0)
  new, found = jax.jit(step)(state, jax.tree.map(jnp.asarray, BATCH))
  np.testing.assert_array_equal(new.variables["frozen"]["c"], 0.5)
  before = np.float64(VALUES["params"]["w"])
  return before - np.float64(new.variables["params"]["w"]), found


def _mean(w, x, t):
  return np.mean((np.tanh(0.5 * (x @ w)) - t) ** 2)


def _slope(w, x, t):
  """The derivative of `_mean`."""
  y = np.tanh(0.5 * (x @ w))
  by_output = 2 * (y - t) * (1 - y**2) * 0.5 / y.size
  return np.tensordot(by_output, x, axes=by_output.ndim)


def _maml(w):
  """The loss of MAML in float64, by its definition."""
  x, t = np.float64(BATCH["inputs"]), np.float64(BATCH["targets"])
  half = EXAMPLES // 2
  losses = [
    _mean(w - RATE * _slope(w, a[:half], b[:half]), a[half:], b[half:])
    for a, b in zip(x, t, strict=True)
  ]
  return np.mean(losses)


def _differentiate(fn, w, step=1e-5):
  basis = step * np.eye(len(w))
  return np.array([(fn(w + e) - fn(w - e)) / (2 * step) for e in basis])


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_meta_gradients_are_those_through_the_inner_step(num_microbatches):
  found, measured = _step(Maml(rate=RATE), num_microbatches=num_microbatches)
  w = np.float64(VALUES["params"]["w"])
  expected = _differentiate(_maml, w)
  np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-6)
  total, weight = measured["loss"]
  np.testing.assert_allclose(total / weight, _maml(w), rtol=1e-5)

  # Without the derivative of the inner step it is another gradient.
  x, t = np.float64(BATCH["inputs"]), np.float64(BATCH["targets"])
  half = EXAMPLES // 2
  first_order = np.mean(
    [
      _slope(w - RATE * _slope(w, a[:half], b[:half]), a[half:], b[half:])
      for a, b in zip(x, t, strict=True)
    ],
    axis=0,
  )
  assert np.max(np.abs(first_order - expected)) > 0.01


def test_meta_gradients_are_those_of_an_explicit_double_step():
  half = EXAMPLES // 2

  def mean(w, x, t):
    return jnp.mean(jnp.square(jnp.tanh(0.5 * (x @ w)) - t))

  def double(w):
    losses = [
      mean(w - RATE * jax.grad(mean)(w, x[:half], t[:half]), x[half:], t[half:])
      for x, t in zip(BATCH["inputs"], BATCH["targets"], strict=True)
    ]
    return jnp.mean(jnp.stack(losses))

  expected = jax.grad(double)(VALUES["params"]["w"])
  np.testing.assert_allclose(_step(Maml(rate=RATE))[0], expected, rtol=2e-5)


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_sharpness_aware_gradients_are_those_of_the_paper(num_microbatches):
  rule = gradients.SharpnessAware(radius=0.3)
  found, measured = _step(rule, num_microbatches=num_microbatches)
  w = np.float64(VALUES["params"]["w"])
  x, t = np.float64(BATCH["inputs"]), np.float64(BATCH["targets"])
  slope = _slope(w, x, t)
  moved = w + 0.3 * slope / np.linalg.norm(slope)
  np.testing.assert_allclose(found, _slope(moved, x, t), rtol=2e-5, atol=1e-6)
  for name, at in (("loss", moved), ("unperturbed_loss", w)):
    total, weight = measured[name]
    np.testing.assert_allclose(total / weight, _mean(at, x, t), rtol=1e-5)


def test_clipping_and_losses_apply_to_a_rule():
  rule = gradients.SharpnessAware(radius=0.3)
  found, _ = _step(rule, max_grad_norm=0.01, losses={"again": 2.0})
  np.testing.assert_allclose(np.linalg.norm(found), 0.01, rtol=1e-5)


class _Wrong:
  """Changes the result of the default."""

  def __init__(self, change):
    self._change = change

  def make_gradient_fn(self, loss_fn, *, make_default, specs):
    """Returns a wrong function."""
    del specs
    default = make_default(loss_fn)
    return lambda *args: self._change(default(*args))


def _reshape(result):
  params = jax.tree.map(lambda x: x[None], result.params)
  return dataclasses.replace(result, params=params)


@pytest.mark.parametrize(
  ("change", "error"),
  [
    (lambda r: r.params, "must return Gradients, got dict"),
    (_reshape, r"shape \(3,\) for params/w, got \(1, 3\)"),
    (
      lambda r: dataclasses.replace(r, params={}),
      r"shape \(3,\) for params/w, got None",
    ),
    (
      lambda r: dataclasses.replace(r, metrics={}),
      "with the metric 'loss', got none",
    ),
  ],
  ids=["type", "shape", "missing", "metrics"],
)
def test_rejects_wrong_gradients(change, error):
  with pytest.raises(
    (TypeError, ValueError), match=f"Learner.gradient_rule .*{error}"
  ):
    _step(_Wrong(change))


def test_rejects_other_sources_of_gradients():
  rule = gradients.SharpnessAware()
  with pytest.raises(ValueError, match=r"Learner.privacy .* only one"):
    _step(rule, privacy=privacy.Privacy(clip_norm=1.0, noise_multiplier=1.0))
  one = learner.Learner(
    optimizer=sgd.Sgd(schedule=schedules.Constant(value=1.0)),
    gradient_rule=rule,
  )
  with pytest.raises(ValueError, match=r"gradient_rule .* pipeline schedule"):
    train_step.make_train_step(
      _loss_fn, learner=one, specs=SPECS, seed=0, gradient_fn=lambda *_: None
    )
  with pytest.raises(ValueError, match=r"Sophia needs second derivatives"):
    train_step.make_train_step(
      _loss_fn,
      learner=dataclasses.replace(
        one, optimizer=sophia.Sophia(schedule=schedules.Constant(value=1.0))
      ),
      specs=SPECS,
      seed=0,
    )
  with pytest.raises(ValueError, match=r"SharpnessAware.radius"):
    gradients.SharpnessAware(radius=0.0)
