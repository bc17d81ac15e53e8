"""Tests for the combination of microbatches' values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.learners import combining, testing, variable_updates
from paxon.sharding import axes, variables

MEAN, SUM, MAX = variables.CombineRule
OVERWRITE = variables.UpdateRule.OVERWRITE_WITH_GRADIENT
REPLACE = variables.UpdateRule.REPLACE


def _overwritten(values, rule, names=()):
  values = jax.device_put(np.float32(values))
  spec = testing.spec(
    "fp8/x", values.shape[1:], axes=names, update=OVERWRITE, combine=rule
  )
  specs = {"fp8": {"x": spec}}

  @jax.jit
  def run(values):
    combined = combining.combine_overwritten(
      {"fp8": {"x": values}}, specs=specs
    )
    old = {"fp8": {"x": jnp.full(values.shape[1:], 9.0)}}
    return variable_updates.overwrite(old, combined, specs=specs)["fp8"]["x"]

  return np.asarray(run(values)).tolist()


@pytest.mark.parametrize(
  ("rule", "expected"), [(MEAN, 3.0), (SUM, 6.0), (MAX, 4.0)]
)
def test_overwritten_values_ignore_zero_gradients(rule, expected):
  # The second microbatch did not reach the variable.
  assert _overwritten([2.0, 0.0, 4.0], rule) == expected


@pytest.mark.parametrize("rule", [MEAN, SUM, MAX])
def test_all_zero_gradients_keep_the_value(rule):
  assert _overwritten([0.0, 0.0], rule) == 9.0


def test_max_of_negative_values():
  assert _overwritten([-2.0, 0.0, -4.0], MAX) == -2.0


def test_experts_are_combined_separately():
  values = [[[1.0, 5.0], [0.0, 0.0]], [[3.0, 0.0], [2.0, 4.0]]]
  names = (axes.EXPERTS, None)
  assert _overwritten(values, MEAN, names) == [[2.0, 2.5], [2.0, 4.0]]
  assert _overwritten(values, MAX, names) == [[3.0, 5.0], [2.0, 4.0]]


def _replaced(values, old, rule, dtype=jnp.float32):
  values, old = (
    jax.device_put(np.asarray(values, dtype)),
    jax.device_put(np.asarray(old, dtype)),
  )
  spec = testing.spec("stats/x", (), update=REPLACE, combine=rule)
  return combining.combine_replaced(
    {"stats": {"x": values}},
    old={"stats": {"x": old}},
    specs={"stats": {"x": spec}},
  )["stats"]["x"]


@pytest.mark.parametrize(
  ("rule", "expected"), [(MEAN, 4.0), (SUM, 8.0), (MAX, 5.0)]
)
def test_replaced_values(rule, expected):
  # A sum counts on: 2 + (3 - 2) + (5 - 2) + (4 - 2).
  assert float(_replaced([3.0, 5.0, 4.0], 2.0, rule)) == expected


def test_integer_counter_by_combine_rule():
  steps = _replaced([8, 8], 7, MEAN, jnp.int32)
  parts = _replaced([8, 8], 7, SUM, jnp.int32)
  assert (int(steps), int(parts)) == (8, 9)
  assert steps.dtype == parts.dtype == jnp.int32


def test_running_mean_equals_the_full_batch():
  x = np.random.default_rng(0).normal(size=(4, 6))
  parts = [0.9 * 2.0 + 0.1 * part.mean() for part in x]
  np.testing.assert_allclose(
    _replaced(parts, 2.0, MEAN), 0.9 * 2.0 + 0.1 * x.mean(), rtol=1e-6
  )


def test_unknown_variables_are_unchanged():
  new = combining.combine_replaced(
    {"sown": {"x": jnp.arange(3)}}, old={}, specs={}
  )
  assert jax.tree.map(int, new) == {"sown": {"x": 2}}
