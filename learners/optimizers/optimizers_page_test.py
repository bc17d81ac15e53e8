"""The table of optimizers, and parameters from other implementations."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from paxon.learners import optimizer_state, schedules, testing
from paxon.learners.optimizers import optimizers_page

_GOLDENS = json.loads(optimizers_page.GOLDENS.read_text())
_ROOT = pathlib.Path(__file__).parents[2]
# Shampoo's roots and Prodigy's estimate of a distance amplify rounding.
_TOLERANCES = {"Shampoo": 2e-4, "Prodigy": 2e-4}


def test_page_is_up_to_date():
  stored = (_ROOT / optimizers_page.PAGE).read_text()
  assert optimizers_page.page() == stored, optimizers_page.UPDATE


def _specs(shape, is_scanned):
  if is_scanned:
    return {
      "params": {
        "kernel": testing.spec(
          "params/kernel",
          shape,
          axes=("layers", "embed", "mlp"),
          stacked=(("layers", 1),),
        )
      }
    }
  return {
    "params": {
      name: testing.spec(f"params/{name}", shape[1:], axes=("embed", "mlp"))
      for name in ("layers_0", "layers_1")
    }
  }


def _draw(seed, shape, is_scanned):
  x = jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)
  if is_scanned:
    return {"params": {"kernel": x}}
  return {"params": {"layers_0": x[0], "layers_1": x[1]}}


# Prodigy has one distance for all variables, of separate layers here.
@pytest.mark.nightly(keep=9)
@pytest.mark.parametrize(
  ("name", "is_scanned"),
  [
    (name, is_scanned)
    for name in sorted(_GOLDENS)
    for is_scanned in (True, False)
    if is_scanned or name != "Prodigy"
  ],
)
def test_twelve_steps_match_another_implementation(name, is_scanned):
  expected = np.array(_GOLDENS[name]["params"])
  rate = 1.0 if name == "Prodigy" else 0.1
  optimizer = optimizers_page.ROWS[name].make(schedules.Constant(value=rate))
  transform = optimizer.transform(_specs(expected.shape, is_scanned))
  params = _draw(0, expected.shape, is_scanned)
  state = optimizer_state.initial(transform, params)
  update = jax.jit(transform.update)
  for t in range(1, 13):
    updates, state = update(_draw(t, expected.shape, is_scanned), state, params)
    params = optax.apply_updates(params, updates)
  actual = np.stack(jax.tree.leaves(params)).reshape(expected.shape)
  np.testing.assert_allclose(
    actual, expected, rtol=1e-5, atol=_TOLERANCES.get(name, 2e-5)
  )


@pytest.mark.nightly(keep=7)
@pytest.mark.parametrize("name", sorted(optimizers_page.ROWS))
def test_resumes_bitwise_with_bfloat16_parameters(name):
  shape = (2, 16, 32)
  optimizer = optimizers_page.ROWS[name].make(schedules.Constant(value=0.01))
  transform = optax.with_extra_args_support(
    optimizer.transform(_specs(shape, is_scanned=True))
  )

  @jax.jit
  def step(params, state, t):
    key = jax.random.fold_in(jax.random.key(0), t)
    gradient = {"params": {"kernel": jax.random.normal(key, shape)}}
    # Only Sophia uses it.
    updates, state = transform.update(
      gradient,
      state,
      optimizer_state.as_float32(params),
      hessian=lambda: jax.tree.map(jnp.square, gradient),
    )
    return (
      jax.tree.map(
        lambda p, u: (p.astype(jnp.float32) + u).astype(p.dtype),
        params,
        updates,
      ),
      state,
    )

  params = {"params": {"kernel": jnp.ones(shape, jnp.bfloat16)}}
  state = optimizer_state.initial(transform, params)
  kept = None
  for t in range(4):
    if t == 2:
      # As a checkpoint: numpy arrays and the structure of the state.
      kept = jax.device_get((params, state))
    params, state = step(params, state, t)
  resumed = jax.tree.map(jnp.asarray, kept)
  for t in (2, 3):
    resumed = step(*resumed, t)
  jax.tree.map(np.testing.assert_array_equal, resumed, (params, state))
  assert params["params"]["kernel"].dtype == jnp.bfloat16
  assert bool(jnp.all(jnp.isfinite(params["params"]["kernel"])))
