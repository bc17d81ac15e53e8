"""Tests of epsilon: published values and a bound that is easy to compute."""

import math

import pytest

from paxon.learners import privacy, privacy_accounting

Accountant = privacy_accounting.Accountant


def _compute(**fields):
  given = {
    "noise_multiplier": 1.1,
    "sampling_probability": 0.01,
    "num_steps": 1000,
    "delta": 1e-5,
  } | fields
  return privacy_accounting.compute_epsilon(**given)


def test_known_setting():
  assert _compute(accountant=Accountant.RDP) == pytest.approx(1.7118, abs=5e-5)
  assert _compute() == pytest.approx(1.5154, abs=5e-5)


def test_one_gaussian_mechanism_matches_its_definition():
  # Balle & Wang 2018, theorem 8: delta of a Gaussian mechanism at epsilon.
  sigma, delta = 2.0, 1e-4

  def phi(x):
    return math.erfc(-x / math.sqrt(2)) / 2

  def delta_of(epsilon):
    return phi(0.5 / sigma - epsilon * sigma) - math.exp(epsilon) * phi(
      -0.5 / sigma - epsilon * sigma
    )

  low, high = 0.0, 10.0
  for _ in range(60):
    middle = (low + high) / 2
    low, high = (middle, high) if delta_of(middle) > delta else (low, middle)
  computed = _compute(
    noise_multiplier=sigma, sampling_probability=1.0, num_steps=1, delta=delta
  )
  assert computed == pytest.approx(low, rel=1e-3)


def test_edges():
  assert _compute(num_steps=0) == 0
  assert _compute(noise_multiplier=0.0) == math.inf


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"sampling_probability": 1.5}, "sampling_probability must be in"),
    (
      {"noise_multiplier": -1.0},
      "noise_multiplier must be at least 0, got -1.0",
    ),
    ({"num_steps": -1}, "num_steps must be at least 0"),
    ({"delta": 0.0}, "delta must be in"),
  ],
)
def test_wrong_values(fields, message):
  with pytest.raises(ValueError, match=message):
    _compute(**fields)


def test_line_of_a_run():
  settings = privacy.Privacy(
    clip_norm=1.0, noise_multiplier=1.1, num_examples=10_000
  )
  line = privacy_accounting.describe(settings, batch_size=100, num_steps=1000)
  assert line.startswith("privacy: epsilon 1.515 at delta 1e-05 after 1,000")
  with pytest.raises(ValueError, match="must be at least that of a batch"):
    privacy_accounting.describe(settings, batch_size=20_000, num_steps=1)
  settings = privacy.Privacy(clip_norm=1.0, noise_multiplier=1.1)
  line = privacy_accounting.describe(settings, batch_size=1, num_steps=1)
  assert "no epsilon" in line


def test_missing_library(monkeypatch):
  monkeypatch.setitem(__import__("sys").modules, "dp_accounting", None)
  with pytest.raises(ImportError, match="extra `privacy`"):
    _compute()
