"""Tests for all schedules, against their definition in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from paxon.learners import schedules

PEAK, END = 3e-3, 2e-4


def _linear(t, warmup, total):
  if t <= warmup and t < total:
    return PEAK * (t + 1) / (warmup + 1)
  if t >= total:
    return END
  return END + (PEAK - END) * (total - t) / (total - warmup)


def _rsqrt(t, warmup):
  if t <= warmup:
    return PEAK * (t + 1) / (warmup + 1)
  return PEAK * np.sqrt((warmup + 1) / (t + 1))


def _exponential(t, warmup, total):
  if t <= warmup and t < total:
    return PEAK * (t + 1) / (warmup + 1)
  if t >= total:
    return END
  return PEAK * (END / PEAK) ** ((t - warmup) / (total - warmup))


def _stable(t, warmup, decay, total, shape):
  if t >= total:
    return END
  if t <= warmup:
    return PEAK * (t + 1) / (warmup + 1)
  if t <= total - decay:
    return PEAK
  return END + (PEAK - END) * shape((t - (total - decay)) / decay)


def _wsd(warmup, decay, total, **fields):
  return schedules.WarmupStableDecay(
    peak=PEAK,
    warmup_steps=warmup,
    decay_steps=decay,
    total_steps=total,
    end=END,
    **fields,
  )


def _warm(kind, warmup, total):
  return kind(peak=PEAK, warmup_steps=warmup, total_steps=total, end=END)


CASES = {
  "constant": (schedules.Constant(value=PEAK), lambda t: PEAK),
  "linear": (
    _warm(schedules.WarmupLinear, 10, 60),
    lambda t: _linear(t, 10, 60),
  ),
  "linear, no warm-up": (
    _warm(schedules.WarmupLinear, 0, 20),
    lambda t: _linear(t, 0, 20),
  ),
  "linear, no decay": (
    _warm(schedules.WarmupLinear, 20, 20),
    lambda t: _linear(t, 20, 20),
  ),
  "rsqrt": (
    schedules.WarmupRsqrt(peak=PEAK, warmup_steps=9),
    lambda t: _rsqrt(t, 9),
  ),
  "rsqrt, no warm-up": (
    schedules.WarmupRsqrt(peak=PEAK, warmup_steps=0),
    lambda t: _rsqrt(t, 0),
  ),
  "exponential": (
    _warm(schedules.WarmupExponential, 7, 50),
    lambda t: _exponential(t, 7, 50),
  ),
  "warm-up, stable, decay": (
    _wsd(5, 20, 60),
    lambda t: _stable(t, 5, 20, 60, lambda x: 1 - x),
  ),
  "square root": (
    _wsd(5, 20, 60, shape=schedules.one_minus_sqrt),
    lambda t: _stable(t, 5, 20, 60, lambda x: 1 - np.sqrt(x)),
  ),
  "never stable": (
    _wsd(10, 10, 20),
    lambda t: _stable(t, 10, 10, 20, lambda x: 1 - x),
  ),
  "stable only": (_wsd(0, 0, 20), lambda t: PEAK if t < 20 else END),
  "steps": (
    schedules.PiecewiseConstant(boundaries=(3, 9), values=(1.0, 0.5, 0.1)),
    lambda t: 1.0 if t < 3 else 0.5 if t < 9 else 0.1,
  ),
  "lines": (
    schedules.PiecewiseLinear(steps=(4, 10, 40), values=(0.0, 0.3, 0.1)),
    lambda t: np.interp(t, (4, 10, 40), (0.0, 0.3, 0.1)),
  ),
}


@pytest.mark.parametrize("case", CASES)
def test_matches_the_definition_at_every_step(case):
  schedule, definition = CASES[case]
  steps = np.arange(80)
  actual = jax.jit(jax.vmap(schedule))(np.int32(steps))
  assert actual.dtype == jnp.float32
  expected = [definition(int(t)) for t in steps]
  np.testing.assert_allclose(actual, expected, rtol=3e-6, atol=1e-9)


@pytest.mark.parametrize("case", CASES)
def test_never_negative_and_finite_far_out(case):
  schedule = CASES[case][0]
  rates = np.asarray([schedule(t) for t in (0, 1, 10**6, 2**31 - 1)])
  assert np.isfinite(rates).all()
  assert (rates >= 0).all()


@pytest.mark.parametrize(
  ("case", "exact"),
  [
    ("linear", {10: PEAK, 60: END, 10**7: END}),
    ("rsqrt", {9: PEAK, 39: PEAK / 2}),
    ("exponential", {7: PEAK, 50: END}),
    ("warm-up, stable, decay", {5: PEAK, 40: PEAK, 60: END}),
    ("steps", {2: 1.0, 3: 0.5, 8: 0.5, 9: 0.1}),
    ("lines", {0: 0.0, 4: 0.0, 10: 0.3, 40: 0.1, 41: 0.1}),
  ],
)
def test_boundaries_are_exact(case, exact):
  schedule = CASES[case][0]
  for step, rate in exact.items():
    assert np.float32(schedule(step)) == np.float32(rate), step


def test_rsqrt_keeps_decaying():
  schedule = schedules.WarmupRsqrt(peak=1.0, warmup_steps=0)
  np.testing.assert_allclose(schedule(999_999), 1e-3, rtol=1e-6)


def test_piecewise_constant_agrees_with_optax():
  ours = schedules.PiecewiseConstant(boundaries=(5, 7), values=(1.0, 0.5, 0.25))
  theirs = optax.piecewise_constant_schedule(1.0, {5: 0.5, 7: 0.5})
  for step in range(10):
    np.testing.assert_allclose(ours(step), theirs(step), rtol=1e-6)


_WARM = {"peak": 0.1, "warmup_steps": 2, "total_steps": 10, "end": 0.01}


@pytest.mark.parametrize(
  ("kind", "fields", "message"),
  [
    (schedules.Constant, {"value": -1.0}, r"Constant.value must not be neg"),
    (schedules.Constant, {"value": float("nan")}, r"value .* got nan"),
    *(
      (kind, _WARM | fields, message)
      for kind in (schedules.WarmupLinear, schedules.WarmupExponential)
      for fields, message in (
        ({"peak": 0.0}, r"peak must be positive, got 0.0"),
        ({"end": 0.5}, r"end must be at most the peak \(0.1\), got 0.5"),
        ({"end": -0.5}, r"end must .*, got -0.5"),
        ({"warmup_steps": 11}, r"warmup_steps .* total_steps \(10\), got 11"),
        ({"warmup_steps": -1}, r"warmup_steps must be .* got -1"),
      )
    ),
    (
      schedules.WarmupExponential,
      _WARM | {"end": 0.0},
      r"WarmupExponential.end must be positive, got 0.0",
    ),
    (
      schedules.WarmupRsqrt,
      {"peak": 1.0, "warmup_steps": -1},
      r"WarmupRsqrt.warmup_steps must not be negative, got -1",
    ),
    (
      schedules.WarmupStableDecay,
      _WARM | {"decay_steps": 9},
      r"total_steps must be at least warmup_steps \+ decay_steps \(11\), got",
    ),
    (
      schedules.WarmupStableDecay,
      _WARM | {"decay_steps": 1, "end": 1.0},
      r"WarmupStableDecay.end must be at most the peak \(0.1\), got 1.0",
    ),
    (
      schedules.PiecewiseConstant,
      {"boundaries": (1,), "values": (1.0,)},
      r"values must have one more entry than boundaries \(1\), got 1",
    ),
    (
      schedules.PiecewiseConstant,
      {"boundaries": (3, 3), "values": (1.0, 2.0, 3.0)},
      r"boundaries must increase, got \(3, 3\)",
    ),
    (
      schedules.PiecewiseLinear,
      {"steps": (-1, 3), "values": (1.0, 2.0)},
      r"steps must not be negative, got \(-1, 3\)",
    ),
    (
      schedules.PiecewiseLinear,
      {"steps": (1, 3), "values": (1.0, -2.0)},
      r"values must not be negative, got \(1.0, -2.0\)",
    ),
    (
      schedules.PiecewiseLinear,
      {"steps": (), "values": ()},
      r"as many entries as steps \(0\) and at least one, got 0",
    ),
  ],
)
def test_rejects(kind, fields, message):
  with pytest.raises(ValueError, match=message):
    kind(**fields)


def _cosine_definition(step, *, peak, warmup, total, end):
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
def test_cosine_matches_the_definition(warmup, total, end):
  peak = 3e-3
  schedule = schedules.WarmupCosine(
    peak=peak, warmup_steps=warmup, total_steps=total, end=end
  )
  steps = np.arange(total + 5)
  expected = [
    _cosine_definition(s, peak=peak, warmup=warmup, total=total, end=end)
    for s in steps
  ]
  actual = jax.jit(jax.vmap(schedule))(np.int32(steps))
  assert actual.dtype == jnp.float32
  np.testing.assert_allclose(actual, expected, rtol=2e-6, atol=2e-10)


def test_agrees_with_optax():
  peak, warmup, total, end = 1e-2, 9, 60, 1e-3
  schedule = schedules.WarmupCosine(
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
  schedule = schedules.WarmupCosine(
    peak=0.3, warmup_steps=4, total_steps=10, end=0.01
  )
  assert float(schedule(0)) == pytest.approx(0.06, rel=1e-6)
  assert np.float32(schedule(4)) == np.float32(0.3)
  assert np.float32(schedule(10)) == np.float32(0.01)
  assert np.float32(schedule(10**7)) == np.float32(0.01)


def test_works_on_traced_int32_steps():
  schedule = schedules.WarmupCosine(peak=0.3, warmup_steps=4, total_steps=10)
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
def test_cosine_rejects(fields, message):
  good = {"peak": 0.1, "warmup_steps": 2, "total_steps": 10}
  with pytest.raises(ValueError, match=message):
    schedules.WarmupCosine(**good | fields)
