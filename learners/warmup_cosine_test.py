"""Tests for the warm-up and cosine schedule."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from paxon.learners import warmup_cosine


def _definition(step, *, peak, warmup, total, end):
  """The docstring's formula in float64."""
  if step >= total:
    return end
  if step <= warmup:
    return peak * (step + 1) / (warmup + 1)
  angle = np.pi * (step - warmup) / (total - warmup)
  return end + (peak - end) * (1 + np.cos(angle)) / 2


@pytest.mark.parametrize(
  ("warmup", "total", "end"),
  [
    pytest.param(10, 100, 0.0, id="to zero"),
    pytest.param(7, 50, 1e-4, id="to a floor"),
    pytest.param(0, 20, 0.0, id="no warm-up"),
    pytest.param(20, 20, 1e-4, id="no decay"),
    pytest.param(0, 0, 0.0, id="no steps"),
  ],
)
def test_matches_the_definition_at_every_step(warmup, total, end):
  peak = 3e-3
  schedule = warmup_cosine.WarmupCosine(
    peak=peak, warmup_steps=warmup, total_steps=total, end=end
  )
  steps = np.arange(total + 5)
  expected = [
    _definition(s, peak=peak, warmup=warmup, total=total, end=end)
    for s in steps
  ]
  actual = jax.jit(jax.vmap(schedule))(np.int32(steps))
  assert actual.dtype == jnp.float32
  np.testing.assert_allclose(actual, expected, rtol=2e-6, atol=2e-10)


def test_agrees_with_optax():
  peak, warmup, total, end = 1e-2, 9, 60, 1e-3
  schedule = warmup_cosine.WarmupCosine(
    peak=peak, warmup_steps=warmup, total_steps=total, end=end
  )
  reference = optax.warmup_cosine_decay_schedule(
    init_value=peak / (warmup + 1),
    peak_value=peak,
    warmup_steps=warmup,
    decay_steps=total,
    end_value=end,
  )
  for step in (0, 1, 8, 9, 10, 35, 59, 60, 70):
    np.testing.assert_allclose(schedule(step), reference(step), rtol=1e-5)


def test_boundary_values_are_exact():
  schedule = warmup_cosine.WarmupCosine(
    peak=0.3, warmup_steps=4, total_steps=10, end=0.01
  )
  assert float(schedule(0)) == pytest.approx(0.06, rel=1e-6)
  assert np.float32(schedule(4)) == np.float32(0.3)
  assert np.float32(schedule(10)) == np.float32(0.01)
  assert np.float32(schedule(10**7)) == np.float32(0.01)


def test_works_on_traced_int32_steps():
  schedule = warmup_cosine.WarmupCosine(
    peak=0.3, warmup_steps=4, total_steps=10
  )
  assert float(jax.jit(schedule)(jnp.int32(6))) == pytest.approx(
    float(schedule(6)), rel=1e-6
  )


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"peak": 0.0}, r"peak must be positive, got 0.0"),
    ({"end": 0.5}, r"end must be at most the peak \(0.1\), got 0.5"),
    ({"end": -0.5}, r"end must not be negative, got -0.5"),
    ({"warmup_steps": 11}, r"warmup_steps .* total_steps \(10\), got 11"),
    ({"warmup_steps": -1}, r"warmup_steps .* total_steps \(10\), got -1"),
  ],
)
def test_rejects(fields, message):
  good = {"peak": 0.1, "warmup_steps": 2, "total_steps": 10}
  with pytest.raises(ValueError, match=message):
    warmup_cosine.WarmupCosine(**good | fields)
