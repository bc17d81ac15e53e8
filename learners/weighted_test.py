"""Tests for weighted sums."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.learners import weighted


def test_total_ignores_values_of_weight_zero():
  values = jax.device_put(np.float32([[1.0, 2.0], [3.0, 100.0]]))
  weights = jax.device_put(np.float32([[1.0, 0.5], [2.0, 0.0]]))
  value, weight = weighted.total(values, weights=weights)
  assert (float(value), float(weight)) == (8.0, 3.5)


def test_total_of_bfloat16_is_summed_in_float32():
  values = jnp.ones((1000,), jnp.bfloat16)
  value, weight = weighted.total(values, weights=values)
  # A bfloat16 sum would stop at 256.
  assert (float(value), float(weight)) == (1000.0, 1000.0)
  assert value.dtype == weight.dtype == jnp.float32


def test_mean_over_batches_is_the_mean_over_all_tokens():
  random = np.random.default_rng(0)
  values = random.normal(size=(5, 8)).astype(np.float32)
  weights = (random.random(size=(5, 8)) < 0.6).astype(np.float32)
  totals = weighted.Totals()
  for row, mask in zip(values, weights, strict=True):
    pair = weighted.total(jax.device_put(row), weights=jax.device_put(mask))
    totals.add({"loss": pair})
  expected = np.sum(values * weights, dtype=np.float64) / weights.sum()
  assert totals.means()["loss"] == pytest.approx(expected, rel=1e-6)
  assert totals.weight("loss") == weights.sum()


def test_mean_does_not_depend_on_the_order():
  random = np.random.default_rng(1)
  values = random.normal(size=1000) * 10.0 ** random.integers(-6, 6, 1000)
  pairs = [(jnp.float32(v), jnp.float32(1)) for v in values]
  forward, backward = weighted.Totals(), weighted.Totals()
  for pair in pairs:
    forward.add({"x": pair})
  for pair in reversed(pairs):
    backward.add({"x": pair})
  assert forward.means() == backward.means()


def test_scalar_counts_once():
  value, weight = weighted.scalar(jnp.bfloat16(0.5))
  assert (value.dtype, float(value)) == (jnp.float32, 0.5)
  assert float(weight) == 1.0


def test_nothing_has_no_mean():
  totals = weighted.Totals()
  totals.add({"x": (jnp.float32(0), jnp.float32(0))})
  assert math.isnan(totals.means()["x"])
  assert totals.weight("never added") == 0.0


def test_infinities_of_both_signs_have_no_mean():
  totals = weighted.Totals()
  for value in (math.inf, -math.inf, math.nan):
    totals.add({"x": (jnp.float32(value), jnp.float32(1))})
    totals.add({"y": (jnp.float32(math.inf), jnp.float32(1))})
  means = totals.means()
  assert math.isnan(means["x"])
  assert means["y"] == math.inf


def test_a_metric_of_several_values_is_shown_as_one_for_each():
  totals = weighted.Totals()
  name = f"layers/{weighted.indexed(1, 2)}/rms"
  for scale in (1.0, 3.0):
    values = scale * jax.device_put(np.float32([10.0, 20.0, 30.0]))
    totals.add({name: (values, jnp.float32(2))})
  assert totals.means() == {
    "layers/1/rms": 10.0,
    "layers/3/rms": 20.0,
    "layers/5/rms": 30.0,
  }


def test_each_dimension_has_its_place_in_the_name():
  totals = weighted.Totals()
  name = f"a/{weighted.indexed(0, 1)}/b/{weighted.indexed(0, 2)}/x"
  values = jnp.arange(6.0).reshape(2, 3)
  totals.add({name: (values, jnp.float32(1))})
  assert totals.means() == {
    f"a/{i}/b/{2 * j}/x": 3.0 * i + j for i in range(2) for j in range(3)
  }
