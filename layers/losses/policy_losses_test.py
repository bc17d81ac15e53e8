"""Tests for losses of sampled answers, against their definition in float64."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers.losses import policy_losses

_GOLDENS = pathlib.Path(__file__).parent / "testdata/preference_losses.json"
_RANDOM = np.random.default_rng(0)
_LOGS = -_RANDOM.uniform(0.01, 4, (6, 5))
# Ratios from 0.5 to 2, so that both limits clip.
_OLD = _LOGS + _RANDOM.uniform(-0.7, 0.7, (6, 5))
_REFERENCE = _LOGS + _RANDOM.normal(0, 0.5, (6, 5))
_REWARDS = np.asarray([[1.0, 0.0, 0.5], [0.0, 0.0, 2.0]])
_WEIGHTS = (np.arange(5) < np.asarray([[5], [3], [1], [0], [4], [2]])) * 1.0


@pytest.fixture(autouse=True)
def _x64():
  with jax.enable_x64(True):
    yield


def _define_advantages(rewards, scaled):
  found = []
  for group in rewards:
    mean = sum(group) / len(group)
    std = np.sqrt(sum((r - mean) ** 2 for r in group) / (len(group) - 1))
    found += [(r - mean) / (std + 1e-4 if scaled else 1) for r in group]
  return np.asarray(found).reshape(rewards.shape)


def _define(logs, advantages, *, low, high, beta, mean, has_old=True):
  """Returns the loss as in TRL's `_compute_loss`, answer by answer."""
  total, count = 0.0, 0.0
  old = _OLD if has_old else _LOGS
  for i, row in enumerate(logs):
    losses, length = 0.0, 0.0
    for t, x in enumerate(row):
      if not _WEIGHTS[i, t]:
        continue
      c = np.exp(x - old[i, t])
      a = advantages[i]
      loss = -min(c * a, min(max(c, 1 - low), 1 + high) * a)
      d = _REFERENCE[i, t] - x
      losses += loss + beta * (np.exp(d) - d - 1)
      length += 1
    if mean is policy_losses.Mean.ANSWERS:
      total, count = total + losses / max(length, 1), count + 1
    elif mean is policy_losses.Mean.TOKENS:
      total, count = total + losses, count + length
    else:
      total, count = total + losses, count + len(row)
  return total / count


@pytest.mark.parametrize("scaled", [True, False])
def test_advantages(scaled):
  np.testing.assert_allclose(
    policy_losses.find_advantages(jnp.asarray(_REWARDS), scaled=scaled),
    _define_advantages(_REWARDS, scaled),
    rtol=1e-12,
  )


@pytest.mark.parametrize("mean", list(policy_losses.Mean))
@pytest.mark.parametrize("beta", [0.0, 0.3])
@pytest.mark.parametrize("has_old", [True, False])
def test_values_and_gradients(mean, beta, has_old):
  advantages = _define_advantages(_REWARDS, True).reshape(-1)
  options = {"low": 0.2, "high": 0.28, "beta": beta, "mean": mean}

  def loss(logs):
    total, count = policy_losses.grpo(
      logs,
      jnp.asarray(advantages),
      jnp.asarray(_WEIGHTS),
      old=jnp.asarray(_OLD) if has_old else None,
      reference=jnp.asarray(_REFERENCE),
      **options,
    )
    return total / count

  def define(logs):
    return _define(logs, advantages, has_old=has_old, **options)

  found, gradient = jax.jit(jax.value_and_grad(loss))(jnp.asarray(_LOGS))
  np.testing.assert_allclose(found, define(_LOGS), rtol=1e-12)
  numeric = np.zeros_like(_LOGS)
  for at in np.ndindex(_LOGS.shape):
    e = np.zeros_like(_LOGS)
    e[at] = 1e-6
    numeric[at] = (define(_LOGS + e) - define(_LOGS - e)) / 2e-6
  np.testing.assert_allclose(gradient, numeric, atol=2e-9)


@pytest.mark.parametrize("case", json.loads(_GOLDENS.read_text())["groups"])
def test_as_the_trainer_of_trl(case):
  def loss(logs):
    total, count = policy_losses.grpo(
      logs,
      jnp.asarray(case["advantages"]),
      jnp.asarray(case["weights"]),
      old=jnp.asarray(case["old"]),
      reference=jnp.asarray(case["reference"]),
      low=0.2,
      high=0.28,
      beta=case["beta"],
      mean=policy_losses.Mean(case["mean"]),
    )
    return total / count

  logs = jnp.asarray(case["log_probs"])
  value, gradient = jax.jit(jax.value_and_grad(loss))(logs)
  np.testing.assert_allclose(value, case["value"], rtol=1e-12)
  np.testing.assert_allclose(gradient, case["gradients"], atol=1e-12)


def test_beta_requires_a_reference():
  logs = jnp.asarray(_LOGS)
  with pytest.raises(ValueError, match=r"GRPO with beta=0\.1 compares with a"):
    policy_losses.grpo(logs, logs[:, 0], logs, beta=0.1)
