"""A language model trained on rewards of answers that it samples.

The parameters of the policy have the names that they have without this model,
so its checkpoints generate, evaluate and export like those of the policy alone.
The reference's variables are `frozen/reference/...` (`fixed_model`).
"""

from typing import ClassVar

from flax import linen as nn
import jax
import jax.numpy as jnp

from paxon.layers.losses import policy_losses
from paxon.layers.models import fixed_model, language_model

REWARDS = "rewards"
_IS_TOKEN = "is_token"
# `learners.loss_function.TARGETS`.
_TARGETS = "targets"


class PolicyLm(language_model.OtherLoss):
  """Learns from the rewards of answers that it has sampled (GRPO).

  Attributes:
    policy: The trained model, a `DecoderLm`.
    group_size: Number of answers of each prompt.
    answer_length: Largest number of tokens of an answer.
    reference: The model of the KL divergence; None without one.
    beta: Weight of the KL divergence.
    low: Largest decrease of a token's probability ratio.
    high: Largest increase; None is `low`.
    mean: The mean of the losses of tokens, see `policy_losses.Mean`.
    scaled: Whether advantages are divided by the standard deviation.
  """

  policy: nn.Module
  group_size: int
  answer_length: int
  reference: fixed_model.FixedModel | None = None
  beta: float = 0.0
  low: float = 0.2
  high: float | None = None
  mean: policy_losses.Mean = policy_losses.Mean.ANSWERS
  scaled: bool = True

  trained: ClassVar[str] = "policy"

  def __post_init__(self) -> None:
    super().__post_init__()
    if self.group_size < 2:
      raise ValueError(
        "PolicyLm.group_size must be at least 2, because rewards are compared"
        f" within a group, got {self.group_size}."
      )

  def loss(
    self, batch: language_model.Batch, *, deterministic: bool = True
  ) -> language_model.Result:
    """Returns the loss of a batch of groups.

    Args:
      batch: `inputs`, `targets` and `is_token` int32, `weights` and `rewards`
        float32, all [B, G T]: the G answers to a prompt, each after the prompt
        and padded to T. Weights are 1 for the tokens of answers. The reward of
        an answer is its first entry. A batch without `is_token` is text, for
        the policy alone.
      deterministic: Disables dropout of the policy; the reference has none.

    Returns:
      The loss. Metrics per answer: `reward`, `answer_tokens`, and per prompt
      `reward_deviation`, its standard deviation, and `equal_rewards`, whether
      there is nothing to learn; `kl` per token with a reference. Without a KL
      divergence a batch whose prompts all have equal rewards has no targets.
    """
    if _IS_TOKEN not in batch:
      if self.is_initializing() and self.reference is not None:
        self.reference(batch, method="token_nll")
      return self.policy.loss(batch, deterministic=deterministic)
    parts = split_groups(batch, self.group_size)
    weights = parts["weights"].astype(jnp.float32)
    log_probs = -self.policy.token_nll(parts, deterministic=deterministic)
    log_probs = jnp.where(weights != 0, log_probs, 0)
    reference = None
    if self.reference is not None:
      fixed = -self.reference(parts, method="token_nll")
      reference = jnp.where(weights != 0, fixed, 0)
    rewards = parts[REWARDS][:, 0].reshape(-1, self.group_size)
    advantages = policy_losses.find_advantages(rewards, scaled=self.scaled)
    total, count = policy_losses.grpo(
      log_probs,
      advantages.reshape(-1),
      weights,
      reference=reference,
      low=self.low,
      high=self.high,
      beta=self.beta,
      mean=self.mean,
    )
    if self.mean is policy_losses.Mean.LENGTH:
      # Of what can be generated, and not of prompts.
      count = jnp.float32(rewards.size * self.answer_length)
    answers, prompts = jnp.float32(rewards.size), jnp.float32(len(rewards))
    equal = policy_losses.are_equal(rewards)
    deviations = jnp.where(equal, 0, jnp.std(rewards, axis=1, ddof=1))
    num_equal = jnp.sum(equal.astype(jnp.float32))
    metrics = {
      "reward": (jnp.sum(rewards), answers),
      "reward_deviation": (jnp.sum(deviations), prompts),
      "equal_rewards": (num_equal, prompts),
      "answer_tokens": (jnp.sum(weights), answers),
    }
    if reference is None or not self.beta:
      metrics[_TARGETS] = prompts - num_equal, prompts
    if reference is not None:
      x = reference - jax.lax.stop_gradient(log_probs)
      kl = jnp.sum((jnp.expm1(x) - x) * weights)
      metrics["kl"] = kl, jnp.sum(weights)
    return (total, count), metrics, {}


def split_groups(
  batch: language_model.Batch, group_size: int
) -> dict[str, jax.Array]:
  """Returns the parts of sequences [B, G T] as a batch [B G, T].

  Each part is one segment from position 0.
  """

  def split(x: jax.Array) -> jax.Array:
    return x.reshape(group_size * x.shape[0], x.shape[1] // group_size)

  names = ("inputs", "targets", "weights", REWARDS)
  is_token = split(batch[_IS_TOKEN])
  positions = jnp.arange(is_token.shape[1], dtype=jnp.int32)
  return {
    **{name: split(batch[name]) for name in names},
    "segment_ids": is_token,
    "positions": jnp.broadcast_to(positions, is_token.shape),
  }
