"""Regularization, against its definition in float64, and noise."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from paxon.learners import learner as learner_lib
from paxon.learners import (
  loss_function,
  optimizer_state,
  schedules,
  testing,
  train_state,
  train_step,
)
from paxon.learners.optimizers import (
  adamw,
  cautious,
  optimizer_by_path,
  regularization,
  sgd,
)

SCHEDULE = schedules.WarmupLinear(peak=0.1, warmup_steps=5, total_steps=30)
SPECS = {
  "params": {
    "kernel": testing.spec(
      "params/kernel", (3, 4, 2), stacked=(("layers", 1),), regularized=True
    ),
    "bias": testing.spec("params/bias", (4,)),
  }
}


def _rate(t):
  return 0.1 * (t / 6 if t <= 6 else (31 - t) / 25)


def _random(seed):
  random = np.random.default_rng(seed)
  return jax.tree.map(
    lambda s: jnp.asarray(random.normal(size=s.shape), jnp.float32), SPECS
  )


def _adam(m, v, g, t):
  m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g**2
  return m, v, (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.95**t)) + 1e-6)


@pytest.mark.parametrize(
  "fields",
  [
    {"l1": 0.3},
    {"l2": 0.3},
    {"ewc": 0.5},
    {"l2": 0.2, "ewc": 0.5, "ewc_weights": {".*/bias": 0.25, ".*": 2.0}},
  ],
  ids=str,
)
def test_twelve_steps_match_the_definition(fields):
  optimizer = regularization.Regularized(
    optimizer=adamw.AdamW(schedule=SCHEDULE, b2=0.95, epsilon=1e-6), **fields
  )
  transform = optimizer.transform(SPECS)
  # The anchor is not the state's initial value, but the first parameters.
  state = optimizer_state.initial(transform, _random(99))
  params = _random(0)
  update = jax.jit(transform.update)
  for t in range(1, 13):
    updates, state = update(_random(t), state, params)
    params = optax.apply_updates(params, updates)
  for name, spec in SPECS["params"].items():
    start = p = np.asarray(_random(0)["params"][name], np.float64)
    m = v = np.zeros_like(p)
    weights = fields.get("ewc_weights", {})
    weight = weights.get(".*/bias" if name == "bias" else ".*", 1.0)
    for t in range(1, 13):
      g = np.asarray(_random(t)["params"][name], np.float64)
      if spec.regularized:
        g = g + fields.get("l1", 0) * np.sign(p) + fields.get("l2", 0) * p
      m, v, u = _adam(m, v, g, t)
      pull = fields.get("ewc", 0) * weight * (p - start)
      p = p - _rate(t) * (u + pull)
    np.testing.assert_allclose(
      params["params"][name], p, rtol=2e-5, atol=2e-6, err_msg=name
    )


def test_the_anchor_is_sharded_like_its_parameter():
  transform = regularization.Regularized(
    optimizer=sgd.Sgd(schedule=SCHEDULE), ewc=1.0
  ).transform(SPECS)
  names = {
    spec.name: spec.stacked
    for spec in jax.tree.leaves(optimizer_state.specs(transform, SPECS))
  }
  assert names["opt_state/anchor/params/kernel"] == (("layers", 1),)


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"l1": 1.0, "l2": 1.0}, r"l1 and l2 must not both be set, got 1.0 and"),
    ({"l1": -1.0}, r"Regularized.l1 must not be negative, got -1.0"),
    ({"ewc_weights": {"(": 1.0}}, r"ewc_weights must be a regular .* '\('"),
    ({"ewc_weights": {".*": -1.0}}, r"ewc_weights must not be negative"),
    (
      {
        "l2": 1.0,
        "optimizer": adamw.AdamW(schedule=SCHEDULE, weight_decay=0.1),
      },
      r"need an optimizer with weight_decay 0, got AdamW",
    ),
    (
      {
        "l2": 1.0,
        "optimizer": cautious.Cautious(
          optimizer=adamw.AdamW(schedule=SCHEDULE, weight_decay=0.1)
        ),
      },
      r"need an optimizer with weight_decay 0, got Cautious",
    ),
    (
      {
        "l1": 1.0,
        "optimizer": optimizer_by_path.OptimizerByPath(
          rules=(
            optimizer_by_path.PathRule(
              name="all",
              pattern=".*",
              optimizer=sgd.Sgd(schedule=SCHEDULE, weight_decay=0.1),
            ),
          )
        ),
      },
      r"need an optimizer with weight_decay 0, got OptimizerByPath",
    ),
  ],
)
def test_rejects(fields, message):
  optimizer = adamw.AdamW(schedule=SCHEDULE)
  with pytest.raises(ValueError, match=message):
    regularization.Regularized(**{"optimizer": optimizer} | fields)


def test_rejects_a_pattern_without_a_variable():
  optimizer = regularization.Regularized(
    optimizer=sgd.Sgd(schedule=SCHEDULE), ewc=1.0, ewc_weights={"kernel": 1.0}
  )
  transform = optimizer.transform(SPECS)
  params = _random(0)
  with pytest.raises(ValueError, match=r"'kernel' matches no optimized"):
    transform.update(params, transform.init(params), params)


def _noise_of_steps(noise, num_steps):
  """Returns the noise of each step, from updates with its gradients."""
  # With the loss |p|^2 / 2, the gradient is the noisy parameter.
  specs = {"params": {"w": testing.spec("params/w", (100, 50))}}
  learner = learner_lib.Learner(
    optimizer=sgd.Sgd(schedule=schedules.Constant(value=1.0)), noise=noise
  )

  def loss_fn(values, batch, rngs):
    del batch, rngs
    total = jnp.sum(values["params"]["w"] ** 2) / 2
    return loss_function.LossOutput((total, jnp.float32(1)), {}, {}, {})

  step = train_step.make_train_step(
    loss_fn, learner=learner, specs=specs, seed=0
  )
  state = train_state.make_initial(
    {"params": {"w": jnp.ones((100, 50))}}, learner=learner, specs=specs
  )
  found = []
  for _ in range(num_steps):
    new, _ = jax.jit(step)(state, {})
    found.append(-new.variables["params"]["w"])
    state = train_state.TrainState(
      step=new.step, variables=state.variables, opt_state=new.opt_state
    )
  return np.asarray(found)


def test_noise_is_in_the_gradients_from_its_first_step_on():
  noise = regularization.VariationalNoise(scale=0.2, start_step=1)
  none, first, second = _noise_of_steps(noise, 3)
  np.testing.assert_array_equal(none, 0)
  for values in (first, second):
    np.testing.assert_allclose(np.std(values), 0.2, rtol=0.05)
    np.testing.assert_allclose(np.mean(values), 0.0, atol=0.02)
  assert abs(np.corrcoef(first.ravel(), second.ravel())[0, 1]) < 0.05


def test_noise_is_only_on_the_named_variables():
  noise = regularization.VariationalNoise(scale=1.0, variables=".*/kernel")
  params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), _random(0))
  noisy = noise.add(
    params, specs=SPECS, step=jnp.int32(0), key=jax.random.key(0)
  )["params"]
  np.testing.assert_array_equal(noisy["bias"], params["params"]["bias"])
  assert (noisy["kernel"] != params["params"]["kernel"]).mean() > 0.9
  assert noisy["kernel"].dtype == jnp.bfloat16


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"scale": 0.0}, r"VariationalNoise.scale must be positive, got 0.0"),
    ({"scale": 1.0, "start_step": -1}, r"start_step must not be negative"),
    ({"scale": 1.0, "variables": "["}, r"variables must be a regular"),
  ],
)
def test_noise_rejects(fields, message):
  with pytest.raises(ValueError, match=message):
    regularization.VariationalNoise(**fields)


def test_noise_rejects_a_pattern_without_a_variable():
  noise = regularization.VariationalNoise(scale=1.0, variables="kernel")
  with pytest.raises(ValueError, match=r"VariationalNoise.variables: 'kernel'"):
    noise.add(_random(0), specs=SPECS, step=jnp.int32(0), key=jax.random.key(0))
