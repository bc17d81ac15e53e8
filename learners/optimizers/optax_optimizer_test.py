"""Optimizers of optax: each layer apart, and LAMB and LARS from the papers."""

import functools

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax import contrib
import pytest

from paxon.learners import optimizer_state, schedules, testing
from paxon.learners.optimizers import optax_optimizer

SCHEDULE = schedules.WarmupLinear(peak=0.1, warmup_steps=5, total_steps=30)
STACKED = (("layers", 1),)
SPECS = {
  "params": {
    "kernel": testing.spec(
      "params/kernel",
      (3, 4, 6),
      axes=("layers", "embed", "mlp"),
      stacked=STACKED,
    ),
    "scale": testing.spec(
      "params/scale",
      (3, 6),
      axes=("layers", "mlp"),
      stacked=STACKED,
      regularized=False,
    ),
    "head": testing.spec("params/head", (4, 6), axes=("embed", "vocab")),
  }
}


def _rate(t):
  return 0.1 * (t / 6 if t <= 6 else (31 - t) / 25)


def _random(seed):
  random = np.random.default_rng(seed)
  return jax.tree.map(
    lambda s: jnp.asarray(random.normal(size=s.shape), s.dtype), SPECS
  )


def _train(transform, steps):
  params = _random(0)
  state = optimizer_state.initial(transform, params)

  @jax.jit
  def step(gradients, state, params):
    updates, state = transform.update(gradients, state, params)
    return optax.apply_updates(params, updates), state

  for t in range(1, steps + 1):
    params, state = step(_random(t), state, params)
  return params["params"]


class _Lamb:
  """You et al. 2020, algorithm 2, with phi(z) = z."""

  def __init__(self):
    self.m = self.v = 0.0

  def step(self, p, g, t, decay):
    self.m = 0.9 * self.m + 0.1 * g
    self.v = 0.999 * self.v + 0.001 * g**2
    u = (self.m / (1 - 0.9**t)) / (np.sqrt(self.v / (1 - 0.999**t)) + 1e-6)
    u = u + decay * p
    return p - _rate(t) * np.linalg.norm(p) / np.linalg.norm(u) * u


class _Lars:
  """You et al. 2017, algorithm 1, with the trust coefficient 0.01."""

  def __init__(self):
    self.m = 0.0

  def step(self, p, g, t, decay):
    u = g + decay * p
    local = 0.01 * np.linalg.norm(p) / np.linalg.norm(u)
    # Momentum of the directions, which is that of algorithm 1 at a constant
    # rate and what optax and PyTorch's SGD do.
    self.m = 0.9 * self.m + _rate(t) * local * u
    return p - self.m


class _Adagrad:
  """Duchi et al. 2011, with optax's initial value."""

  def __init__(self):
    self.v = 0.1

  def step(self, p, g, t, decay):
    self.v = self.v + g**2
    return p - _rate(t) * g / np.sqrt(self.v + 1e-7)


@pytest.mark.parametrize(
  ("make", "rule"),
  [
    pytest.param(
      functools.partial(optax.lamb, weight_decay=0.1), _Lamb, id="lamb"
    ),
    pytest.param(
      functools.partial(
        optax.lars, weight_decay=0.1, trust_coefficient=0.01, momentum=0.9
      ),
      _Lars,
      id="lars",
    ),
    pytest.param(optax.adagrad, _Adagrad, id="adagrad"),
  ],
)
def test_twelve_steps_match_the_paper(make, rule):
  actual = _train(
    optax_optimizer.OptaxOptimizer(schedule=SCHEDULE, make=make).transform(
      SPECS
    ),
    steps=12,
  )
  for name, spec in SPECS["params"].items():
    for i in np.ndindex(spec.shape[: len(spec.stacked)]):
      value = np.asarray(_random(0)["params"][name], np.float64)[i]
      layer = rule()
      for t in range(1, 13):
        g = np.asarray(_random(t)["params"][name], np.float64)[i]
        value = layer.step(value, g, t, 0.1 if spec.regularized else 0.0)
      np.testing.assert_allclose(
        actual[name][i], value, rtol=2e-5, atol=2e-6, err_msg=name
      )


@pytest.mark.parametrize(
  "make",
  [
    optax.adabelief,
    optax.adafactor,
    optax.adan,
    optax.novograd,
    optax.yogi,
    contrib.adopt,
    contrib.ademamix,
    contrib.prodigy,
    contrib.schedule_free_adamw,
  ],
  ids=lambda make: make.__name__,
)
def test_stacked_layers_are_trained_as_separate_ones(make):
  actual = _train(
    optax_optimizer.OptaxOptimizer(schedule=SCHEDULE, make=make).transform(
      SPECS
    ),
    steps=4,
  )
  transform = make(learning_rate=SCHEDULE)

  @jax.jit
  def step(gradients, state, params):
    with jax.numpy_dtype_promotion("standard"):
      updates, state = transform.update(gradients, state, params)
    return optax.apply_updates(params, updates), state

  for i in range(3):

    def layer(seed, i=i):
      values = _random(seed)["params"]
      return {"kernel": values["kernel"][i], "scale": values["scale"][i]}

    params = layer(0)
    state = transform.init(params)
    for t in range(1, 5):
      params, state = step(layer(t), state, params)
    for name, value in params.items():
      np.testing.assert_allclose(
        actual[name][i], value, rtol=1e-5, atol=1e-6, err_msg=name
      )


def test_moments_have_the_axes_of_their_parameters():
  transform = optax_optimizer.OptaxOptimizer(
    schedule=SCHEDULE, make=optax.lamb
  ).transform(SPECS)
  found = {
    spec.name: spec.axes
    for spec in jax.tree.leaves(optimizer_state.specs(transform, SPECS))
  }
  assert found["opt_state/layers_3/0/mu/params/kernel"] == (
    "layers",
    "embed",
    "mlp",
  )
  assert found["opt_state/unstacked/0/nu/params/head"] == ("embed", "vocab")
  assert found["opt_state/layers_3/0/count"] == (None,)


def test_is_configured_with_fiddle():
  config = fdl.Config(
    optax_optimizer.OptaxOptimizer,
    schedule=fdl.Config(schedules.Constant, value=0.1),
    make=fdl.Partial(optax.lamb, b1=0.8),
  )
  transform = fdl.build(config).transform()
  params = {"w": jnp.ones(2)}
  updates, _ = transform.update(params, transform.init(params), params)
  np.testing.assert_allclose(updates["w"], -0.1, rtol=1e-5)


def test_rejects_a_transformation_without_learning_rate():
  with pytest.raises(
    ValueError, match=r"must have an argument learning_rate.*scale_by_adam"
  ):
    optax_optimizer.OptaxOptimizer(schedule=SCHEDULE, make=optax.scale_by_adam)
