"""A language model trained on pairs of answers, with its reference.

The parameters of the policy have the names that they have without this model,
so its checkpoints generate, evaluate and export like those of the policy alone.
The reference's variables are `frozen/reference/...` (`fixed_model`).
"""

from collections.abc import Callable
from typing import ClassVar, Final

from flax import linen as nn
import jax
import jax.numpy as jnp

from paxon.layers.losses import preference_losses
from paxon.layers.models import fixed_model, language_model

IS_TOKEN: Final = "is_token"
_CUT = "cut_tokens"
_REFERENCES = "reference_log_probs"


class PreferenceLm(language_model.OtherLoss):
  """Learns to prefer the first of two answers to the second.

  Attributes:
    policy: The trained model, a `DecoderLm`.
    reference: The model to compare with, usually the policy's initial weights;
      None for losses without one.
    preference: Loss of pairs, `(chosen, rejected) -> [pairs]`; see
      `layers.losses.preference_losses`.
    beta: Scale of the reported rewards, beta (log p - log p_ref).
  """

  policy: nn.Module
  reference: fixed_model.FixedModel | None = None
  preference: Callable[..., jax.Array] = preference_losses.dpo
  beta: float = 0.1

  trained: ClassVar[str] = "policy"

  def loss(
    self, batch: language_model.Batch, *, deterministic: bool = True
  ) -> language_model.Result:
    """Returns the loss of a batch of pairs.

    Args:
      batch: `inputs`, `targets` and `is_token` int32 and `weights` float32, all
        [B,2T]: the conversation with the chosen answer, padded to T, then that
        with the rejected one. Weights are 1 for the tokens of answers. A pair
        without weight in one answer does not count. A batch without `is_token`
        is text, for the policy alone.
      deterministic: Disables dropout of the policy; the reference has none.

    Returns:
      `(sum, number of pairs)`. Metrics per pair: `preference_accuracy`, the
      share of pairs whose chosen answer has the larger reward; `reward_margin`,
      `reward_chosen` and `reward_rejected`; and per token of an answer
      `log_prob_chosen` and `log_prob_rejected`; and `cut_tokens`, the share of
      tokens that inputs have cut, if the batch counts them. Outputs
      `pair_loss`, `pair_margin` and `pair_weight` [B].
    """
    if IS_TOKEN not in batch:
      if self.is_initializing() and self.reference is not None:
        self.reference(batch, method="token_nll")
      return self.policy.loss(batch, deterministic=deterministic)
    halves = split_pairs(batch)
    weights = halves["weights"].astype(jnp.float32)
    nll = self.policy.token_nll(halves, deterministic=deterministic)
    references = self.find_references(batch, halves)
    log_probs, lengths = sum_answers(nll, weights), sum_halves(weights)
    chosen, rejected = (
      preference_losses.Answers(*values)
      for values in zip(log_probs, lengths, references, strict=True)
    )
    losses = self.preference(chosen, rejected)
    counts = ((chosen.length > 0) & (rejected.length > 0)).astype(jnp.float32)
    total = jnp.sum(counts)

    rewards = [
      self.beta * (x.log_prob - (0.0 if x.reference is None else x.reference))
      for x in (chosen, rejected)
    ]
    margin = jax.lax.stop_gradient(rewards[0] - rewards[1])

    def mean(values: jax.Array) -> language_model.Weighted:
      return jnp.sum(jnp.where(counts > 0, values, 0)), total

    losses = jnp.where(counts > 0, losses, 0)
    metrics = {
      "preference_accuracy": mean((margin > 0).astype(jnp.float32)),
      "reward_margin": mean(margin),
      "reward_chosen": mean(rewards[0]),
      "reward_rejected": mean(rewards[1]),
      "log_prob_chosen": (jnp.sum(chosen.log_prob), jnp.sum(chosen.length)),
      "log_prob_rejected": (
        jnp.sum(rejected.log_prob),
        jnp.sum(rejected.length),
      ),
    }
    metrics |= count_cut(batch)
    outputs = {
      "pair_loss": losses,
      "pair_margin": margin,
      "pair_weight": counts,
    }
    return (jnp.sum(losses), total), metrics, outputs

  def find_references(
    self, batch: language_model.Batch, halves: language_model.Batch
  ) -> tuple[jax.Array | None, jax.Array | None]:
    """Returns log probabilities [B] of both answers; None without a reference.

    Args:
      batch: With `reference_log_probs` [B,2T], first in each half, if they were
        computed before.
      halves: Halves of `split_pairs`.
    """
    if _REFERENCES in batch:
      stored = batch[_REFERENCES]
      return stored[:, 0], stored[:, stored.shape[1] // 2]
    if self.reference is None:
      return None, None
    fixed = self.reference(halves, method="token_nll")
    return sum_answers(fixed, halves["weights"].astype(jnp.float32))


def split_pairs(batch: language_model.Batch) -> dict[str, jax.Array]:
  """Returns the two halves of sequences [B,2T] as a batch [2B,T].

  Even sequences are the first halves. Each is one segment from position 0.
  """

  def split(x: jax.Array) -> jax.Array:
    if x.shape[1] % 2:
      raise ValueError(
        f"Sequences of pairs must have an even length, got {x.shape[1]}."
      )
    return x.reshape(2 * x.shape[0], x.shape[1] // 2)

  halves = {
    name: split(batch[name]) for name in ("inputs", "targets", "weights")
  }
  is_token = split(batch[IS_TOKEN])
  positions = jnp.arange(is_token.shape[1], dtype=jnp.int32)
  return {
    **halves,
    "segment_ids": is_token,
    "positions": jnp.broadcast_to(positions, is_token.shape),
  }


def count_cut(
  batch: language_model.Batch,
) -> dict[str, language_model.Weighted]:
  """Returns the metric `cut_tokens` of a batch that counts them."""
  if _CUT not in batch:
    return {}
  cut = jnp.sum(batch[_CUT].astype(jnp.float32))
  return {_CUT: (cut, cut + jnp.sum(batch[IS_TOKEN].astype(jnp.float32)))}


def sum_halves(values: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns the sum of each sequence, of even and of odd ones."""
  sums = jnp.sum(values, axis=1).reshape(-1, 2)
  return sums[:, 0], sums[:, 1]


def sum_answers(
  nll: jax.Array, weights: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Returns the log probabilities of even and of odd sequences."""
  # Tokens of weight zero may be NaN, their gradient too.
  return sum_halves(-jnp.where(weights != 0, nll, 0) * weights)
