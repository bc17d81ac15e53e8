"""Losses of pairs of answers, from their log probabilities.

With log p the sum of the log probabilities of an answer's tokens, n their
number, r = log p - log p_ref (the reference is a fixed model), w the chosen and
l the rejected answer:

  dpo    -log sigmoid(beta (r_w - r_l)); Praxis' LanguageModelDPO.
         Rafailov et al. 2023, https://arxiv.org/abs/2305.18290
  ipo    (r_w / n_w - r_l / n_l - 1 / (2 beta))^2.
         Azar et al. 2023, https://arxiv.org/abs/2310.12036, equation 17, per
         token as its authors computed it
  kto    v_w (1 - sigmoid(beta (r - kl))) or v_l (1 - sigmoid(beta (kl - r)));
         of single answers. Ethayarajh et al. 2024,
         https://arxiv.org/abs/2402.01306, equation 7
  orpo   -log p_w / n_w - beta log sigmoid(log odds_w - log odds_l), with
         log odds = log q - log(1 - q) and log q = log p / n.
         Hong et al. 2024, https://arxiv.org/abs/2403.07691, equations 4 and 6
  simpo  -log sigmoid(beta (log p_w / n_w - log p_l / n_l) - margin).
         Meng et al. 2024, https://arxiv.org/abs/2405.14734, equation 6

All return one loss for each pair or answer.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


class Answers(NamedTuple):
  """Log probabilities of one answer of each pair.

  Attributes:
    log_prob: Sum over the tokens of the answer.
    length: Number of tokens; at least 1 is assumed.
    reference: Sum by the reference model; None without one.
  """

  log_prob: Float[Array, " pairs"]
  length: Float[Array, " pairs"]
  reference: Float[Array, " pairs"] | None = None


def dpo(
  chosen: Answers,
  rejected: Answers,
  *,
  beta: float = 0.1,
  label_smoothing: float = 0.0,
) -> Float[Array, " pairs"]:
  """Returns the DPO loss.

  `label_smoothing` is the probability that a pair is swapped (conservative
  DPO).
  """
  x = beta * (log_ratio(chosen) - log_ratio(rejected))
  loss = -jax.nn.log_sigmoid(x)
  if label_smoothing:
    flipped = -jax.nn.log_sigmoid(-x)
    loss = (1 - label_smoothing) * loss + label_smoothing * flipped
  return loss


def ipo(
  chosen: Answers, rejected: Answers, *, beta: float = 0.1
) -> Float[Array, " pairs"]:
  """Returns the IPO loss of log ratios per token; `beta` is tau there."""
  gap = log_ratio(chosen) / _at_least_one(chosen.length) - log_ratio(
    rejected
  ) / _at_least_one(rejected.length)
  return jnp.square(gap - 1 / (2 * beta))


def kto(
  answers: Answers,
  is_desirable: Bool[Array, " pairs"],
  *,
  kl: Float[Array, ""],
  beta: float = 0.1,
  desirable_weight: float = 1.0,
  undesirable_weight: float = 1.0,
) -> Float[Array, " pairs"]:
  """Returns the KTO loss of single answers.

  Args:
    answers: The answers.
    is_desirable: Whether each is good.
    kl: Estimate of the KL divergence from the reference, such as the mean log
      ratio of answers to other prompts. Not differentiated; negative values are
      0.
    beta: Scale of the reward.
    desirable_weight: Weight of good answers.
    undesirable_weight: Weight of bad answers.
  """
  kl = jax.lax.stop_gradient(jnp.maximum(kl, 0))
  x = beta * (log_ratio(answers) - kl)
  return jnp.where(
    is_desirable,
    desirable_weight * (1 - jax.nn.sigmoid(x)),
    undesirable_weight * (1 - jax.nn.sigmoid(-x)),
  )


def orpo(
  chosen: Answers, rejected: Answers, *, beta: float = 0.1
) -> Float[Array, " pairs"]:
  """Returns the ORPO loss; it uses no reference."""
  means = [x.log_prob / _at_least_one(x.length) for x in (chosen, rejected)]
  chosen_odds, rejected_odds = (x - _log1mexp(x) for x in means)
  ratio = jax.nn.log_sigmoid(chosen_odds - rejected_odds)
  return -means[0] - beta * ratio


def simpo(
  chosen: Answers,
  rejected: Answers,
  *,
  beta: float = 2.0,
  margin: float = 1.0,
) -> Float[Array, " pairs"]:
  """Returns the SimPO loss; it uses no reference. `margin` is gamma there."""
  one, other = (
    x.log_prob / _at_least_one(x.length) for x in (chosen, rejected)
  )
  return -jax.nn.log_sigmoid(beta * (one - other) - margin)


def log_ratio(answers: Answers) -> Float[Array, " pairs"]:
  """Returns log p - log p_ref; the reference is not differentiated.

  Raises:
    ValueError: There is no reference.
  """
  if answers.reference is None:
    raise ValueError(
      "This preference loss compares with a reference model, and there is none;"
      " set one, or use `orpo` or `simpo`."
    )
  return answers.log_prob - jax.lax.stop_gradient(answers.reference)


def _at_least_one(length: jax.Array) -> jax.Array:
  return jnp.maximum(length, 1)


def _log1mexp(x: jax.Array) -> jax.Array:
  """Returns log(1 - exp(x)) of x < 0, exact near 0 and far from it."""
  # A certain answer has log probability 0 and infinite odds.
  x = jnp.minimum(x, -jnp.finfo(x.dtype).eps)
  near = x > -0.693
  # Each branch must be finite where the other is taken, for the gradient.
  small = jnp.log(-jnp.expm1(jnp.where(near, x, -1.0)))
  large = jnp.log1p(-jnp.exp(jnp.where(near, -1.0, x)))
  return jnp.where(near, small, large)
