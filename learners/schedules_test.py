"""One battery for all schedules: the definition in float64, at every step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from paxon.learners import (
  constant,
  piecewise,
  warmup_decay,
  warmup_stable_decay,
)

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
  return warmup_stable_decay.WarmupStableDecay(
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
  "constant": (constant.Constant(value=PEAK), lambda t: PEAK),
  "linear": (
    _warm(warmup_decay.WarmupLinear, 10, 60),
    lambda t: _linear(t, 10, 60),
  ),
  "linear, no warm-up": (
    _warm(warmup_decay.WarmupLinear, 0, 20),
    lambda t: _linear(t, 0, 20),
  ),
  "linear, no decay": (
    _warm(warmup_decay.WarmupLinear, 20, 20),
    lambda t: _linear(t, 20, 20),
  ),
  "rsqrt": (
    warmup_decay.WarmupRsqrt(peak=PEAK, warmup_steps=9),
    lambda t: _rsqrt(t, 9),
  ),
  "rsqrt, no warm-up": (
    warmup_decay.WarmupRsqrt(peak=PEAK, warmup_steps=0),
    lambda t: _rsqrt(t, 0),
  ),
  "exponential": (
    _warm(warmup_decay.WarmupExponential, 7, 50),
    lambda t: _exponential(t, 7, 50),
  ),
  "warm-up, stable, decay": (
    _wsd(5, 20, 60),
    lambda t: _stable(t, 5, 20, 60, lambda x: 1 - x),
  ),
  "square root": (
    _wsd(5, 20, 60, shape=warmup_stable_decay.one_minus_sqrt),
    lambda t: _stable(t, 5, 20, 60, lambda x: 1 - np.sqrt(x)),
  ),
  "never stable": (
    _wsd(10, 10, 20),
    lambda t: _stable(t, 10, 10, 20, lambda x: 1 - x),
  ),
  "stable only": (_wsd(0, 0, 20), lambda t: PEAK if t < 20 else END),
  "steps": (
    piecewise.PiecewiseConstant(boundaries=(3, 9), values=(1.0, 0.5, 0.1)),
    lambda t: 1.0 if t < 3 else 0.5 if t < 9 else 0.1,
  ),
  "lines": (
    piecewise.PiecewiseLinear(steps=(4, 10, 40), values=(0.0, 0.3, 0.1)),
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


def test_rsqrt_goes_on_falling():
  schedule = warmup_decay.WarmupRsqrt(peak=1.0, warmup_steps=0)
  np.testing.assert_allclose(schedule(999_999), 1e-3, rtol=1e-6)


def test_piecewise_constant_agrees_with_optax():
  ours = piecewise.PiecewiseConstant(boundaries=(5, 7), values=(1.0, 0.5, 0.25))
  theirs = optax.piecewise_constant_schedule(1.0, {5: 0.5, 7: 0.5})
  for step in range(10):
    np.testing.assert_allclose(ours(step), theirs(step), rtol=1e-6)


_WARM = {"peak": 0.1, "warmup_steps": 2, "total_steps": 10, "end": 0.01}


@pytest.mark.parametrize(
  ("kind", "fields", "message"),
  [
    (constant.Constant, {"value": -1.0}, r"Constant.value must not be neg"),
    (constant.Constant, {"value": float("nan")}, r"value .* got nan"),
    *(
      (kind, _WARM | fields, message)
      for kind in (warmup_decay.WarmupLinear, warmup_decay.WarmupExponential)
      for fields, message in (
        ({"peak": 0.0}, r"peak must be positive, got 0.0"),
        ({"end": 0.5}, r"end must be at most the peak \(0.1\), got 0.5"),
        ({"end": -0.5}, r"end must .*, got -0.5"),
        ({"warmup_steps": 11}, r"warmup_steps .* total_steps \(10\), got 11"),
        ({"warmup_steps": -1}, r"warmup_steps must lie .* got -1"),
      )
    ),
    (
      warmup_decay.WarmupExponential,
      _WARM | {"end": 0.0},
      r"WarmupExponential.end must be positive, got 0.0",
    ),
    (
      warmup_decay.WarmupRsqrt,
      {"peak": 1.0, "warmup_steps": -1},
      r"WarmupRsqrt.warmup_steps must not be negative, got -1",
    ),
    (
      warmup_stable_decay.WarmupStableDecay,
      _WARM | {"decay_steps": 9},
      r"total_steps must be at least warmup_steps \+ decay_steps \(11\), got",
    ),
    (
      warmup_stable_decay.WarmupStableDecay,
      _WARM | {"decay_steps": 1, "end": 1.0},
      r"WarmupStableDecay.end must be at most the peak \(0.1\), got 1.0",
    ),
    (
      piecewise.PiecewiseConstant,
      {"boundaries": (1,), "values": (1.0,)},
      r"values must be one more than boundaries \(1\), got 1",
    ),
    (
      piecewise.PiecewiseConstant,
      {"boundaries": (3, 3), "values": (1.0, 2.0, 3.0)},
      r"boundaries must increase, got \(3, 3\)",
    ),
    (
      piecewise.PiecewiseLinear,
      {"steps": (-1, 3), "values": (1.0, 2.0)},
      r"steps must not be negative, got \(-1, 3\)",
    ),
    (
      piecewise.PiecewiseLinear,
      {"steps": (1, 3), "values": (1.0, -2.0)},
      r"values must not be negative, got \(1.0, -2.0\)",
    ),
    (
      piecewise.PiecewiseLinear,
      {"steps": (), "values": ()},
      r"as many as steps \(0\) and at least one, got 0",
    ),
  ],
)
def test_rejects(kind, fields, message):
  with pytest.raises(ValueError, match=message):
    kind(**fields)
