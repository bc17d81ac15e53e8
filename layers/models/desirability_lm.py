"""A language model trained on answers that are labelled good or bad (KTO).

With r = log p - log p_ref of an answer, and z the mean of r over answers to
other prompts, at least 0 and not differentiated, the loss of a good answer is
1 - sigmoid(beta (r - z)), and that of a bad one 1 - sigmoid(beta (z - r))
(https://arxiv.org/abs/2402.01306, equation 7).
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from paxon.layers.losses import preference_losses
from paxon.layers.models import language_model, preference_lm

_LABEL = "is_desirable"


class DesirabilityLm(preference_lm.PreferenceLm):
  """Learns which answers are good, compared with its reference.

  Attributes:
    preference: Loss of answers, `(answers, is_desirable, kl=) -> [answers]`;
      see `preference_losses.kto`.
  """

  preference: Callable[..., jax.Array] = preference_losses.kto

  def loss(
    self, batch: language_model.Batch, *, deterministic: bool = True
  ) -> language_model.Result:
    """Returns the loss of a batch of answers.

    Args:
      batch: Batch of `PreferenceLm.loss`; the second halves are prompts with
        answers to other prompts, from which z is estimated: the mean over the
        batch, or over each microbatch. `is_desirable` int32 [B,2T] is 1 for a
        good answer, at its first entry. A batch without `is_token` is text, for
        the policy alone.
      deterministic: Disables dropout of the policy; the reference has none.

    Returns:
      `(sum, number of answers)`. Metrics: `kl`, the estimate before it is
      limited; `reward_desirable` and `reward_undesirable`, the mean beta r of
      each kind. Outputs `answer_loss`, `answer_reward` and `answer_weight` [B].

    Raises:
      ValueError: There is no reference.
    """
    if preference_lm.IS_TOKEN not in batch:
      return super().loss(batch, deterministic=deterministic)
    halves = preference_lm.split_pairs(batch)
    weights = halves["weights"].astype(jnp.float32)
    nll = self.policy.token_nll(halves, deterministic=deterministic)
    log_probs = preference_lm.sum_answers(nll, weights)
    references = self.find_references(batch, halves)
    lengths = preference_lm.sum_halves(weights)
    own, other = (
      preference_losses.Answers(*values)
      for values in zip(log_probs, lengths, references, strict=True)
    )
    mismatched = (other.length > 0).astype(jnp.float32)
    ratio = jax.lax.stop_gradient(preference_losses.log_ratio(other))
    divergence = jnp.sum(ratio * mismatched), jnp.sum(mismatched)
    kl = divergence[0] / jnp.maximum(divergence[1], 1)
    good = batch[_LABEL][:, 0] == 1
    losses = self.preference(own, good, kl=kl)
    counts = (own.length > 0).astype(jnp.float32)
    losses = jnp.where(counts > 0, losses, 0)
    rewards = self.beta * jax.lax.stop_gradient(
      preference_losses.log_ratio(own)
    )

    def mean(of: jax.Array) -> language_model.Weighted:
      kept = counts * of.astype(jnp.float32)
      return jnp.sum(jnp.where(kept > 0, rewards, 0)), jnp.sum(kept)

    metrics = {
      "kl": divergence,
      "reward_desirable": mean(good),
      "reward_undesirable": mean(~good),
      **preference_lm.count_cut(batch),
    }
    outputs = {
      "answer_loss": losses,
      "answer_reward": rewards,
      "answer_weight": counts,
    }
    return (jnp.sum(losses), jnp.sum(counts)), metrics, outputs
