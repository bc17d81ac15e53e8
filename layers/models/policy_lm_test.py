"""Tests for the model of rewards: its loss from its own log probabilities."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers.losses import policy_losses
from paxon.layers.models import fixed_model, policy_lm
from paxon.layers.models import testing as models_testing
from paxon.sharding import initialization, variables

_ANSWER = 3
# Prompts of two tokens, answers of one to three.
_IDS = [
  [[5, 6, 7], [5, 6, 8, 9, 3], [5, 6, 1, 1]],
  [[4, 2, 9, 9], [4, 2, 3], [4, 2, 6, 5, 1]],
]
_REWARDS = np.asarray([[1.0, 0.0, 0.5], [0.0, 0.0, 2.0]], np.float32)


def _batch(length=6):
  names = ("inputs", "targets", "is_token", "weights", "rewards")
  arrays = {name: np.zeros((2, 3, length), np.float32) for name in names}
  for i, group in enumerate(_IDS):
    for j, ids in enumerate(group):
      n = len(ids) - 1
      arrays["inputs"][i, j, :n] = ids[:-1]
      arrays["targets"][i, j, :n] = ids[1:]
      arrays["is_token"][i, j, :n] = 1
      arrays["weights"][i, j, 1:n] = 1
      arrays["rewards"][i, j] = _REWARDS[i, j]
  dtypes = {"weights": jnp.float32, "rewards": jnp.float32}
  return {
    name: jnp.asarray(x.reshape(2, -1), dtypes.get(name, jnp.int32))
    for name, x in arrays.items()
  }


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("mean", list(policy_losses.Mean))
def test_the_gradient_is_that_of_rewarded_log_probabilities(mean):
  decoder = models_testing.tiny_decoder()
  model = policy_lm.PolicyLm(
    policy=decoder,
    group_size=3,
    answer_length=_ANSWER,
    mean=mean,
    reference=fixed_model.FixedModel(model=models_testing.tiny_decoder()),
    beta=0.5,
  )
  batch = _batch()
  made = jax.eval_shape(
    lambda: model.init(jax.random.key(0), batch, method="loss")
  )
  values = initialization.initial_values(variables.get_specs(made), 0)
  # The reference is the policy itself, so its divergence and gradient are zero.
  values = {**values, "frozen": {"reference": values["params"]}}

  def loss(params):
    found: Any = model.apply({**values, "params": params}, batch, method="loss")
    (total, count), metrics, _ = found
    return total / count, metrics

  advantages = (_REWARDS - _REWARDS.mean(1, keepdims=True)) / (
    _REWARDS.std(1, ddof=1, keepdims=True) + 1e-4
  )

  def define(params):
    answers = [ids for group in _IDS for ids in group]
    x = jnp.asarray([ids + [0] * (5 - len(ids)) for ids in answers])
    places = jnp.broadcast_to(jnp.arange(5), x.shape)
    logits: Any = decoder.apply({"params": params}, x, places, jnp.ones_like(x))
    logs = jax.nn.log_softmax(logits.astype(jnp.float32))
    sums = []
    for i, (ids, a) in enumerate(zip(answers, advantages.flat, strict=True)):
      tokens = [logs[i, t - 1, ids[t]] for t in range(2, len(ids))]
      sums.append((-a * sum(tokens), len(tokens)))
    if mean is policy_losses.Mean.ANSWERS:
      return sum(s / n for s, n in sums) / len(sums)
    count = sum(n for _, n in sums)
    if mean is policy_losses.Mean.LENGTH:
      count = len(sums) * _ANSWER
    return sum(s for s, _ in sums) / count

  gradient, metrics = jax.jit(jax.grad(loss, has_aux=True))(values["params"])
  expected = jax.jit(jax.grad(define))(values["params"])
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
    gradient,
    expected,
  )
  means = {name: float(a / b) for name, (a, b) in metrics.items()}
  assert means["reward"] == pytest.approx(_REWARDS.mean())
  assert means["answer_tokens"] == pytest.approx(2)
  assert means["equal_rewards"] == 0
  assert means["kl"] == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("scaled", [True, False])
def test_equal_rewards_have_no_advantage(scaled):
  # Their mean in float32 is another number.
  rewards = np.full((4, 3), 0.1, np.float32)
  rewards[1, 2] = 0.2
  advantages = policy_losses.find_advantages(
    jnp.asarray(rewards), scaled=scaled
  )
  assert np.any(np.asarray(advantages)[1])
  assert not np.any(np.asarray(advantages)[[0, 2, 3]])


def test_targets_are_prompts_with_different_rewards():
  model = policy_lm.PolicyLm(
    policy=models_testing.tiny_decoder(), group_size=3, answer_length=_ANSWER
  )
  batch = _batch()
  made = jax.eval_shape(
    lambda: model.init(jax.random.key(0), batch, method="loss")
  )
  values = initialization.initial_values(variables.get_specs(made), 0)

  @jax.jit
  def measure(rewards):
    found: Any = model.apply(
      values, {**batch, "rewards": rewards}, method="loss"
    )
    metrics = found[1]
    return metrics["targets"], metrics["equal_rewards"]

  for num_equal in range(3):
    rewards = np.asarray(batch["rewards"]).copy()
    rewards[:num_equal] = 0.1
    targets, equal = measure(jnp.asarray(rewards))
    assert float(targets[0]) == 2 - num_equal
    assert float(equal[0]) == num_equal


def test_a_group_of_one_is_an_error():
  with pytest.raises(ValueError, match="group_size must be at least 2"):
    policy_lm.PolicyLm(
      policy=models_testing.tiny_decoder(), group_size=1, answer_length=3
    )
