"""Tests of muP: factors, and changes of activations at several widths."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from paxon.learners import schedules, testing
from paxon.learners.optimizers import adamw, width_scaling

BASE = {"embed": 8, "mlp": 32, "heads": 2, "kv_heads": 1}


def _scaled(optimizer=None, base=None):
  rate = schedules.Constant(value=0.02)
  return width_scaling.WidthScaled(
    optimizer=optimizer or adamw.AdamW(schedule=rate),
    base_widths=BASE if base is None else base,
  )


@pytest.mark.parametrize(
  ("shape", "axes", "factor"),
  [
    ((16, 64), ("embed", "mlp"), 1 / 2),
    ((128, 16), ("mlp", "embed"), 1 / 4),
    ((16, 4, 8), ("embed", "heads", "head_dim"), 1 / 2),
    ((8, 8, 16), ("heads", "head_dim", "embed"), 1 / 4),
    # Inputs, outputs and vectors.
    ((100, 16), ("vocab", "embed"), 1),
    ((16, 100), ("embed", "vocab"), 1),
    ((16,), ("embed",), 1),
  ],
)
def test_factors_of_learning_rates(shape, axes, factor):
  spec = testing.spec("params/x", shape, axes=axes)
  assert _scaled().factor(spec) == factor
  stacked = testing.spec(
    "params/x",
    (3, *shape),
    axes=("layers", *axes),
    stacked=(("layers", 1),),
    regularized=len(shape) > 1,
  )
  assert _scaled().factor(stacked) == factor


def _specs(width):
  return {
    "params": {
      "in": testing.spec("params/in", (12, width), axes=(None, "embed")),
      "up": testing.spec("params/up", (width, width), axes=("embed", "mlp")),
      "down": testing.spec(
        "params/down", (width, width), axes=("mlp", "embed")
      ),
      "out": testing.spec("params/out", (width, 4), axes=("embed", None)),
    }
  }


def _forward(params, x, multiplier):
  p = params["params"]
  hidden = [jnp.tanh(x @ p["in"])]
  hidden.append(jnp.tanh(hidden[-1] @ p["up"]))
  hidden.append(jnp.tanh(hidden[-1] @ p["down"]))
  return [*hidden, multiplier * (hidden[-1] @ p["out"])]


@functools.cache
def _find_changes(width, is_scaled):
  """Returns the RMS changes of all activations after five steps of Adam."""
  random = np.random.default_rng(0)
  x = jnp.asarray(random.normal(size=(16, 12)), jnp.float32)
  y = jnp.asarray(random.normal(size=(16, 4)), jnp.float32)
  fan_in = {"in": 12, "up": width, "down": width, "out": width}
  specs = _specs(width)
  params = {
    "params": {
      name: jnp.asarray(
        random.normal(size=spec.shape) / np.sqrt(fan_in[name]), jnp.float32
      )
      for name, spec in specs["params"].items()
    }
  }
  optimizer = adamw.AdamW(schedule=schedules.Constant(value=0.01))
  multiplier = 1.0
  if is_scaled:
    optimizer = _scaled(optimizer, {"embed": 64, "mlp": 64})
    multiplier = 64 / width
    params["params"]["out"] *= np.sqrt(width / 64)
  transform = optimizer.transform(specs)

  def loss(params):
    return jnp.mean(jnp.square(_forward(params, x, multiplier)[-1] - y))

  @jax.jit
  def step(params, state):
    updates, state = transform.update(jax.grad(loss)(params), state, params)
    return optax.apply_updates(params, updates), state

  before = _forward(params, x, multiplier)
  state = transform.init(params)
  for _ in range(5):
    params, state = step(params, state)
  after = _forward(params, x, multiplier)
  return np.array(
    [
      float(jnp.sqrt(jnp.mean(jnp.square(a - b))))
      for a, b in zip(after, before, strict=True)
    ]
  )


def test_coordinate_check():
  # The change of each activation is O(1) in the width in muP, and grows
  # without.
  ratios = {
    is_scaled: _find_changes(1024, is_scaled) / _find_changes(64, is_scaled)
    for is_scaled in (True, False)
  }
  assert np.all(ratios[True] > 0.4), ratios
  assert np.all(ratios[True] < 1.6), ratios
  # Logits, which are not bounded by tanh.
  assert ratios[False][-1] > 4, ratios


def test_wrong_settings():
  with pytest.raises(ValueError, match="must name an axis"):
    _scaled(base={})
  with pytest.raises(ValueError, match="'width' is no logical axis"):
    _scaled(base={"width": 2})
  with pytest.raises(ValueError, match="must be positive, got 0"):
    _scaled(base={"embed": 0})
  with pytest.raises(ValueError, match="requires the specs"):
    _scaled().transform()
