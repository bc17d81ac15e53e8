"""Tests for all schedules, against their definition in float64."""

import functools

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

# Schedules of Pax, from its definitions in float64.


def _path(t, start, limit, rate):
  (x0, y0), (x1, y1) = start, limit
  if t < x0:
    return y0
  return y1 if t >= x1 else rate((t - x0) / (x1 - x0), y0, y1)


def _polynomial(power, origin="start"):
  def rate(f, y0, y1):
    share = f**power if origin == "start" else 1 - (1 - f) ** power
    return y0 + share * (y1 - y0)

  return rate


def _exponent(f, y0, y1):
  return np.exp(np.log(y0) + f * (np.log(y1) - np.log(y0)))


def _half_cosine(f, y0, y1):
  return y1 + 0.5 * (y0 - y1) * (1 + np.cos(np.pi * f))


def _paths():
  for name, start, limit, kind, fields, rate in (
    ("line", (5, 0.1), (40, 0.7), "Polynomial", {}, _polynomial(1)),
    ("power 3", (5, PEAK), (40, END), "Polynomial", {"power": 3}, None),
    ("root", (0, 0.0), (40, PEAK), "Polynomial", {"power": 0.5}, None),
    (
      "power 2 from the limit",
      (5, PEAK),
      (40, END),
      "Polynomial",
      {"power": 2, "origin": schedules.Origin.LIMIT},
      _polynomial(2, "limit"),
    ),
    ("growth", (3, END), (50, PEAK), "Exponential", {}, _exponent),
    ("delayed cosine", (20, PEAK), (60, END), "Cosine", {}, _half_cosine),
  ):
    rate = rate or _polynomial(fields["power"])
    schedule = getattr(schedules, kind)(start=start, limit=limit, **fields)
    yield (
      name,
      (
        schedule,
        lambda t, start=start, limit=limit, rate=rate: _path(
          t, start, limit, rate
        ),
      ),
    )


def _ramp(t, warmup, begin, end, rate, ratio=0.01):
  """Phases with own counts of steps, as Pax joins them."""
  if t < warmup:
    return PEAK * t / warmup
  if t < begin:
    return PEAK
  return _path(t - begin, (0, PEAK), (end - begin, PEAK * ratio), rate)


def _ramps():
  for name, warmup, begin, decay, rate in (
    ("Polynomial", 10, 20, functools.partial(schedules.Polynomial, power=2), 2),
    ("Cosine", 10, 30, schedules.Cosine, _half_cosine),
    ("Exponential", 10, 10, schedules.Exponential, _exponent),
    ("constant, then linear", 0, 20, schedules.Polynomial, 1),
  ):
    definition = _polynomial(rate) if isinstance(rate, int) else rate
    schedule = schedules.RampHoldDecay(
      peak=PEAK,
      warmup_steps=warmup,
      decay_start=begin,
      decay_end=60,
      decay=decay,
    )
    yield (
      f"ramp, hold, {name}",
      (
        schedule,
        lambda t, warmup=warmup, begin=begin, rate=definition: _ramp(
          t, warmup, begin, 60, rate
        ),
      ),
    )


_LINE = schedules.Polynomial(start=(0, 0.5), limit=(50, 0.1))
_STEPS = schedules.PiecewiseConstant(boundaries=(5, 9), values=(3.0, 2.0, 1.0))


def _line(t):
  return _path(t, (0, 0.5), (50, 0.1), _polynomial(1))


def _stairs(t):
  return 3.0 if t < 5 else 2.0 if t < 9 else 1.0


CASES |= dict(_paths()) | dict(_ramps())
CASES |= {
  "half-life": (
    schedules.HalfLife(value=0.5, start_step=20, half_life_steps=7),
    lambda t: 0.5 * max(0.5 ** (max(t - 20, 0) / 7), 0.01),
  ),
  "inverse root after a constant": (
    schedules.Rsqrt(multiplier=0.3, decay_start=10, offset=4.0, decay_end=60),
    lambda t: 0.3 / np.sqrt(max(min(t, 60) - 4, 10)),
  ),
  "joined": (
    schedules.Joined(boundaries=(10, 30), schedules=(_LINE, _STEPS, _LINE)),
    lambda t: (
      _line(t) if t < 10 else _stairs(t - 10) if t < 30 else _line(t - 30)
    ),
  ),
  "a cycle": (
    schedules.Cycle(
      schedules=(_LINE, _STEPS, optax.constant_schedule(0.2)), steps=(3, 2, 1)
    ),
    lambda t: (_line(t), _stairs(t), 0.2)[(0, 0, 0, 1, 1, 2)[t % 6]],
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
    ("power 3", {0: PEAK, 5: PEAK, 40: END, 10**7: END}),
    ("growth", {3: END, 50: PEAK}),
    ("delayed cosine", {20: PEAK, 60: END}),
    ("ramp, hold, Cosine", {0: 0.0, 10: PEAK, 30: PEAK, 60: PEAK * 0.01}),
    ("half-life", {20: 0.5, 27: 0.25, 10**6: 0.005}),
    # Beyond 2^24 steps, where float32 has no odd numbers.
    ("a cycle", {6 * 2**24 + 5: 0.2, 6 * 2**24 + 3: 1.0}),
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
    (
      schedules.Polynomial,
      {"start": (5, 1.0), "limit": (5, 0.0)},
      r"Polynomial.limit must have a later step than start \(5\), got 5",
    ),
    (
      schedules.Polynomial,
      {"start": (0, 1.0), "limit": (5, 0.0), "power": 0},
      r"Polynomial.power must be positive, got 0",
    ),
    (
      schedules.Cosine,
      {"start": (-1, 1.0), "limit": (5, 0.0)},
      r"Cosine.start must be two numbers, .*, got \(-1, 1.0\)",
    ),
    (
      schedules.Cosine,
      {"start": (0, 1.0), "limit": (5, -1.0)},
      r"Cosine.limit must be two numbers, .*, got \(5, -1.0\)",
    ),
    (
      schedules.Exponential,
      {"start": (0, 1.0), "limit": (5, 0.0)},
      r"Exponential.start and limit must have positive rates, got .* 0.0\)",
    ),
    (schedules.Rsqrt, {"decay_start": 0}, r"decay_start must be positive"),
    (
      schedules.HalfLife,
      {"value": 1.0, "min_ratio": 0.0},
      r"HalfLife.min_ratio must be in \(0, 1\], got 0.0",
    ),
    (
      schedules.Joined,
      {"boundaries": (1,), "schedules": (_LINE,)},
      r"Joined.schedules must have one more entry than boundaries \(1\), got 1",
    ),
    (
      schedules.Joined,
      {"boundaries": (3, 2), "schedules": (_LINE, _LINE, _LINE)},
      r"Joined.boundaries must increase, got \(3, 2\)",
    ),
    (
      schedules.Cycle,
      {"steps": (1, 2), "schedules": (_LINE,)},
      r"Cycle.schedules must have as many entries as steps \(2\)",
    ),
    (
      schedules.Cycle,
      {"steps": (0,), "schedules": (_LINE,)},
      r"Cycle.steps must be positive, got \(0,\)",
    ),
    *(
      (
        schedules.RampHoldDecay,
        {"peak": 1.0, "warmup_steps": 5, "decay_start": 9, "decay_end": 20}
        | fields,
        message,
      )
      for fields, message in (
        ({"peak": 0.0}, r"RampHoldDecay.peak must be positive, got 0.0"),
        ({"decay_start": 4}, r"decay_start .* warmup_steps \(5\), got 4"),
        ({"decay_end": 9}, r"decay_end must be more .* \(9\), got 9"),
        ({"min_ratio": 1.5}, r"min_ratio must be in \[0, 1\], got 1.5"),
        (
          {"min_ratio": 0.0, "decay": schedules.Exponential},
          r"Exponential.start and limit must have positive rates, got .* 0.0\)",
        ),
      )
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
