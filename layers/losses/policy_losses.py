"""Losses of sampled answers with rewards: GRPO and its variants.

G answers are sampled for each prompt. With r the reward of an answer, and the
mean and standard deviation over the answers of its prompt, its advantage is

  A = (r - mean) / (std + 1e-4)                   std of a sample, G - 1
  A = r - mean                                    Dr. GRPO

and with p the probability of a token, p_old that by the model that sampled it,
and c = p / p_old, the loss of a token is

  -min(c A, clip(c, 1 - low, 1 + high) A) + beta (q - log q - 1),  q = p_ref / p

whose mean is taken as `Mean` says. On policy c is 1, and the gradient is that
of -A log p.

GRPO: https://arxiv.org/abs/2402.03300, equations 3 and 4; Dr. GRPO:
https://arxiv.org/abs/2503.20783; DAPO: https://arxiv.org/abs/2503.14476, with
`high` above `low`.
"""

import enum
from typing import Final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

_EPSILON: Final = 1e-4


class Mean(enum.Enum):
  """The mean of the losses of tokens."""

  # Over the tokens of an answer, then over answers.
  ANSWERS = "grpo"
  # Over all tokens.
  TOKENS = "dapo"
  # The sum, divided by the number of answers times their maximum length.
  LENGTH = "dr_grpo"


def find_advantages(
  rewards: Float[Array, "prompts answers"], *, scaled: bool = True
) -> Float[Array, "prompts answers"]:
  """Returns the advantages of the answers of each prompt.

  Args:
    rewards: Rewards; of at least two answers if scaled.
    scaled: Whether to divide by the standard deviation.
  """
  advantages = rewards - jnp.mean(rewards, axis=1, keepdims=True)
  # Exactly zero: the mean of equal numbers may be rounded.
  advantages = jnp.where(are_equal(rewards)[:, None], 0, advantages)
  if not scaled:
    return advantages
  deviation = jnp.std(rewards, axis=1, keepdims=True, ddof=1)
  return advantages / (deviation + _EPSILON)


def are_equal(
  rewards: Float[Array, "prompts answers"],
) -> Bool[Array, " prompts"]:
  """Returns whether the answers of a prompt have equal rewards."""
  return jnp.max(rewards, axis=1) == jnp.min(rewards, axis=1)


def grpo(
  log_probs: Float[Array, "answers length"],
  advantages: Float[Array, " answers"],
  weights: Float[Array, "answers length"],
  *,
  old: Float[Array, "answers length"] | None = None,
  reference: Float[Array, "answers length"] | None = None,
  low: float = 0.2,
  high: float | None = None,
  beta: float = 0.0,
  mean: Mean = Mean.ANSWERS,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
  """Returns the sum of the losses and what it is divided by.

  Args:
    log_probs: Log probabilities of the tokens.
    advantages: Of the answers; not differentiated.
    weights: 1 for the tokens of answers, 0 elsewhere.
    old: Log probabilities by the model that sampled; None for the same model.
    reference: Log probabilities by the reference of beta.
    low: Largest decrease of the probability ratio.
    high: Largest increase; None is `low`.
    beta: Weight of the KL divergence from the reference.
    mean: The mean over tokens.

  Raises:
    ValueError: There is a beta but no reference.
  """
  if beta and reference is None:
    raise ValueError(
      f"GRPO with beta={beta} compares with a reference model, and there is"
      " none; set one, or beta=0."
    )
  fixed = log_probs if old is None else old
  ratio = jnp.exp(log_probs - jax.lax.stop_gradient(fixed))
  a = jax.lax.stop_gradient(advantages)[:, None]
  clipped = jnp.clip(ratio, 1 - low, 1 + (low if high is None else high))
  losses = -jnp.minimum(ratio * a, clipped * a)
  if beta and reference is not None:
    x = jax.lax.stop_gradient(reference) - log_probs
    losses += beta * (jnp.expm1(x) - x)
  # Tokens of weight zero may be NaN, their gradient too.
  losses = jnp.where(weights != 0, losses, 0) * weights
  match mean:
    case Mean.ANSWERS:
      lengths = jnp.maximum(jnp.sum(weights, axis=1), 1)
      count = jnp.full((), losses.shape[0], losses.dtype)
      return jnp.sum(jnp.sum(losses, axis=1) / lengths), count
    case Mean.TOKENS:
      return jnp.sum(losses), jnp.sum(weights).astype(losses.dtype)
    case Mean.LENGTH:
      return jnp.sum(losses), jnp.full((), losses.size, losses.dtype)
