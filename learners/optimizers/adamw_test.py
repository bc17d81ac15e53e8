"""Tests for AdamW."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from paxon.learners import schedules, testing
from paxon.learners.optimizers import adamw, lion
from paxon.learners.optimizers import optimizer as optimizer_lib

SCHEDULE = schedules.WarmupCosine(peak=0.1, warmup_steps=5, total_steps=20)
SPECS = {
  "params": {
    "kernel": testing.spec("params/kernel", (3, 4)),
    "scale": testing.spec("params/scale", (4,)),
  }
}


class _PaperAdamW:
  """Algorithm 2 of the paper for one array, float64."""

  def __init__(self, value, *, b1, b2, epsilon, decay):
    self.value = np.asarray(value, np.float64)
    self.mean = np.zeros_like(self.value)
    self.square = np.zeros_like(self.value)
    self.t = 0
    self.b1, self.b2, self.epsilon, self.decay = b1, b2, epsilon, decay

  def update(self, gradient):
    gradient = np.asarray(gradient, np.float64)
    rate = 0.1 * (self.t + 1) / 6
    if self.t > 5:
      rate = 0.1 * (1 + np.cos(np.pi * (self.t - 5) / 15)) / 2
    self.t += 1
    self.mean = self.b1 * self.mean + (1 - self.b1) * gradient
    self.square = self.b2 * self.square + (1 - self.b2) * gradient**2
    mean = self.mean / (1 - self.b1**self.t)
    square = self.square / (1 - self.b2**self.t)
    self.value = self.value - rate * (
      mean / (np.sqrt(square) + self.epsilon) + self.decay * self.value
    )


def _run(transform, params, *, steps=20):
  """Returns the parameters, the gradients of each step, and the state."""
  random = np.random.default_rng(1)
  state = transform.init(params)
  update = jax.jit(transform.update)
  every = []
  for _ in range(steps):
    gradients = jax.tree.map(
      lambda p: jax.device_put(np.float32(random.normal(size=p.shape))), params
    )
    updates, state = update(gradients, state, params)
    params = optax.apply_updates(params, updates)
    every.append(gradients)
  return params, every, state


def test_bfloat16_momentum_is_close_to_float32():
  params = {"kernel": jnp.ones((64, 64), jnp.float32)}
  optimizer = adamw.AdamW(schedule=SCHEDULE, momentum_dtype=jnp.bfloat16)
  params, every, state = _run(optimizer.transform(), params)
  moments = {
    name: {x.dtype.name for x in jax.tree.leaves(getattr(state[0], name))}
    for name in ("mu", "nu")
  }
  assert moments == {"mu": {"bfloat16"}, "nu": {"float32"}}
  oracle = _PaperAdamW(
    np.ones((64, 64)), b1=0.9, b2=0.999, epsilon=1e-8, decay=0.0
  )
  for gradients in every:
    oracle.update(gradients["kernel"])
  # Rounded at each step by 2^-9 at most, twice; ten steps are remembered. The
  # quotient is about one, and the rates sum to 1.1.
  error = np.abs(params["kernel"] - oracle.value)
  assert 1e-6 < np.max(error) < 1.1 * 20 * 2**-9
  assert np.sqrt(np.mean(error**2)) < 1.1 * 2**-9


@pytest.mark.parametrize(
  ("specs", "decays"),
  [
    pytest.param(SPECS, {"kernel": 0.1, "scale": 0.0}, id="by spec"),
    pytest.param(None, {"kernel": 0.1, "scale": 0.1}, id="all"),
  ],
)
def test_twenty_steps_match_the_paper(specs, decays):
  random = np.random.default_rng(0)
  params = {
    name: jax.device_put(np.float32(random.normal(size=spec.shape)))
    for name, spec in SPECS["params"].items()
  }
  oracles = {
    name: _PaperAdamW(value, b1=0.9, b2=0.95, epsilon=1e-6, decay=decays[name])
    for name, value in params.items()
  }
  params = {"params": params}
  transform = adamw.AdamW(
    schedule=SCHEDULE, b1=0.9, b2=0.95, epsilon=1e-6, weight_decay=0.1
  ).transform(specs)
  state = transform.init(params)
  update = jax.jit(transform.update)
  for _ in range(20):
    gradients = jax.tree.map(
      lambda p: jax.device_put(np.float32(random.normal(size=p.shape))), params
    )
    updates, state = update(gradients, state, params)
    params = optax.apply_updates(params, updates)
    for name, oracle in oracles.items():
      oracle.update(gradients["params"][name])
  for name, oracle in oracles.items():
    np.testing.assert_allclose(
      params["params"][name], oracle.value, rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"b1": 1.0}, r"AdamW.b1 must be in \[0, 1\), got 1.0"),
    ({"b2": -0.1}, r"AdamW.b2 must be in \[0, 1\), got -0.1"),
    (
      {"b2": 1 - 1e-9},
      r"b2 must be in .* in float32, got 0.999999999",
    ),
    ({"epsilon": 0.0}, r"AdamW.epsilon must be positive, got 0.0"),
    ({"weight_decay": -1.0}, r"weight_decay must not be negative, got -1.0"),
    (
      {"momentum_dtype": jnp.int8},
      r"momentum_dtype must be a floating .* int8",
    ),
  ],
)
def test_rejects(fields, message):
  with pytest.raises(ValueError, match=message):
    adamw.AdamW(schedule=SCHEDULE, **fields)


def _cast(x):
  return np.asarray(x.astype(jnp.bfloat16), np.float64)


def test_bfloat16_momentum_is_rounded_only_when_stored():
  params = {"kernel": jnp.ones((8, 8), jnp.float32)}
  optimizer = adamw.AdamW(
    schedule=SCHEDULE, epsilon_root=1e-3, momentum_dtype=jnp.bfloat16
  )
  params, every, state = _run(optimizer.transform(), params)
  value, mean, square = (np.full((8, 8), x) for x in (1.0, 0.0, 0.0))
  for t, gradients in enumerate(every, start=1):
    g = np.asarray(gradients["kernel"], np.float64)
    mean = 0.9 * mean + 0.1 * g
    square = 0.999 * square + 0.001 * g**2
    root = np.sqrt(square / (1 - 0.999**t) + 1e-3) + 1e-8
    value -= float(SCHEDULE(t - 1)) * mean / (1 - 0.9**t) / root
    mean = _cast(mean)
  np.testing.assert_array_equal(_cast(state[0].mu["kernel"]), mean)
  np.testing.assert_allclose(params["kernel"], value, rtol=1e-5, atol=1e-6)


def test_bfloat16_momentum_of_lion_is_not_rounded_before_the_sum():
  optimizer = lion.Lion(
    schedule=schedules.Constant(value=1.0), momentum_dtype=jnp.bfloat16
  )
  transform = optimizer.transform()
  params = {"x": jnp.zeros((), jnp.float32)}
  state = transform.init(params)
  state = jax.tree.map(
    lambda m: jnp.ones_like(m) if m.dtype == jnp.bfloat16 else m, state
  )
  # 0.9 - 0.8992 is positive; 0.9 rounded to bfloat16 is 0.8984.
  gradients = {"x": jnp.asarray(-8.992, jnp.float32)}
  updates, state = jax.jit(transform.update)(gradients, state, params)
  assert float(updates["x"]) == -1
  assert state[0].mu["x"] == jnp.asarray(0.99 - 0.08992, jnp.bfloat16)


def test_epsilon_root_matches_optax():
  params = {"x": jnp.linspace(-1, 1, 5)}
  ours = adamw.AdamW(
    schedule=lambda _: 0.1, epsilon_root=0.01, weight_decay=0.1
  )
  found, _, _ = _run(ours.transform(), params)
  theirs = optimizer_lib.with_standard_promotion(
    optax.adamw(0.1, eps_root=0.01, weight_decay=0.1)
  )
  expected, _, _ = _run(theirs, params)
  np.testing.assert_allclose(found["x"], expected["x"], rtol=1e-6)
