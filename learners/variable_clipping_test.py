"""Tests for clipping, with float64 numpy and optax as oracles."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from paxon.learners import testing, variable_clipping

SPECS = {
  "params": {
    "stack": testing.spec("params/stack", (3, 4, 5), stacked=(("layers", 1),)),
    "matrix": testing.spec("params/matrix", (4, 5)),
    "scalar": testing.spec("params/scalar", ()),
  }
}


def _values(seed=0):
  random = np.random.default_rng(seed)
  values = jax.tree.map(
    lambda s: np.float32(random.normal(size=s.shape)), SPECS
  )
  # Layers of very different size, one of them zero.
  scales = np.float32([0.01, 10.0, 0.0])[:, None, None]
  values["params"]["stack"] *= scales
  return jax.device_put(values)


def _norm(x):
  return np.sqrt(np.sum(np.square(x)))


def _rms(x):
  return np.sqrt(np.mean(np.square(x)))


@pytest.mark.parametrize(
  ("clip", "size"),
  [
    (
      lambda v: variable_clipping.clip_by_norm(v, max_norm=1.5, specs=SPECS),
      _norm,
    ),
    (
      lambda v: variable_clipping.clip_by_rms(v, max_rms=0.5, specs=SPECS),
      _rms,
    ),
  ],
  ids=["norm", "rms"],
)
def test_layers_are_clipped_separately(clip, size):
  limit = 1.5 if size is _norm else 0.5
  values = _values()
  clipped = jax.device_get(jax.jit(clip)(values)["params"])
  for name, spec in SPECS["params"].items():
    before = np.asarray(values["params"][name], np.float64)
    for i in np.ndindex(spec.shape[: len(spec.stacked)]):
      largest = size(before[i])
      share = 1.0 if largest <= limit else limit / largest
      np.testing.assert_allclose(clipped[name][i], before[i] * share, rtol=1e-6)


@pytest.mark.parametrize("limit", [0.3, 1e3], ids=["above", "below"])
def test_global_norm_clipping_matches_optax(limit):
  values = _values()
  clip = lambda v: variable_clipping.clip_by_global_norm(v, max_norm=limit)  # noqa: E731
  clipped = jax.jit(clip)(values)
  with jax.numpy_dtype_promotion("standard"):
    oracle = optax.clip_by_global_norm(limit)
    expected, _ = jax.jit(lambda v: oracle.update(v, oracle.init(v)))(values)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), clipped, expected
  )


def test_without_specs_a_stack_is_one_variable():
  x = jnp.full((3, 4), 2.0)
  clipped = variable_clipping.clip_by_norm({"x": x}, max_norm=1.0)["x"]
  np.testing.assert_allclose(clipped, x / _norm(x), rtol=1e-6)


def test_scaling_by_the_rms_of_parameters():
  values, params = _values(0), _values(1)
  scaled = variable_clipping.scale_by_rms(
    values, params, min_rms=1e-3, specs=SPECS
  )["params"]
  for name, spec in SPECS["params"].items():
    for i in np.ndindex(spec.shape[: len(spec.stacked)]):
      size = max(_rms(np.asarray(params["params"][name][i])), 1e-3)
      np.testing.assert_allclose(
        scaled[name][i], size * values["params"][name][i], rtol=1e-5
      )
