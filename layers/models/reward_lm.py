"""A reward model: a number for a conversation, learned from pairs of answers.

With r the reward of a conversation, w the chosen and l the rejected answer,

  loss = -log sigmoid(r_w - r_l) + center (r_w + r_l)^2

(Bradley and Terry; Ouyang et al. 2022, https://arxiv.org/abs/2203.02155,
equation 1; `center`: https://arxiv.org/abs/2312.09244). The reward is linear in
the decoder's state of the last token. The decoder's parameters have the names
that they have without this model; its own head has none.
"""

from collections.abc import Callable
from typing import Any, Final

from flax import linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from paxon.layers import linear, precision, token_context
from paxon.layers.models import classifier, language_model, preference_lm
from paxon.sharding import checks

HEAD_PATTERN: Final = "params/reward_head/.*"


def make_head(make: Callable[..., Any] | None = None) -> Any:
  """Returns the head of rewards; its configuration with `fdl.Config`."""
  given = {"output_dim": 1, "use_bias": False, "kernel_axes": ("embed", None)}
  if make is None:
    return linear.Linear(**given)
  return make(linear.Linear, **given)


class RewardLm(nn.Module):
  """Rewards conversations.

  Attributes:
    decoder: A `DecoderLm`.
    reward_head: Maps [B,D] to [B,1], such as `linear.Linear`.
    center: Weight of the squared sum of the rewards of a pair.
  """

  decoder: nn.Module
  reward_head: nn.Module
  center: float = 0.0

  def __post_init__(self) -> None:
    super().__post_init__()
    checks.check_non_negative(self, "center")

  def setup(self) -> None:
    """Gives the decoder's variables the names that they have without this."""
    nn.share_scope(self, self.decoder)

  def rewards(
    self,
    ids: Int[Array, "batch length"],
    is_token: Int[Array, "batch length"],
    *,
    deterministic: bool = True,
  ) -> Float[Array, " batch"]:
    """Returns the rewards of conversations, float32.

    Args:
      ids: Token ids, each conversation from the first position.
      is_token: 1 for tokens and 0 for padding.
      deterministic: Disables dropout.
    """
    positions = jnp.arange(ids.shape[1], dtype=jnp.int32)
    positions = jnp.broadcast_to(positions, ids.shape)
    context = token_context.TokenContext(
      positions, is_token, deterministic=deterministic
    )
    x = self.decoder.hidden(ids, context)
    last = classifier.pool_last(x, is_token)
    return precision.widen(self.reward_head(last))[:, 0]

  def loss(
    self, batch: language_model.Batch, *, deterministic: bool = True
  ) -> language_model.Result:
    """Returns the loss of a batch of pairs, as `PreferenceLm.loss`.

    Returns:
      `(sum, number of pairs)`. Metrics per pair: `reward_accuracy`, the share
      of pairs whose chosen answer has the larger reward; `reward_margin`,
      `reward_chosen` and `reward_rejected`; and `cut_tokens`. Outputs
      `pair_loss`, `pair_margin` and `pair_weight` [B].

    Raises:
      ValueError: The batch has no pairs.
    """
    if preference_lm.IS_TOKEN not in batch:
      if not self.is_initializing():
        raise ValueError("RewardLm is for pairs of answers, got text.")
      ids = batch["inputs"]
      rewards = self.rewards(ids, jnp.ones_like(ids))
      return (jnp.sum(rewards), jnp.float32(rewards.size)), {}, {}
    halves = preference_lm.split_pairs(batch)
    # The whole conversation: its reward depends on its last token.
    ids, is_token = (
      jnp.concatenate([first[:, :1], rest], axis=1)
      for first, rest in (
        (halves["inputs"], halves["targets"]),
        (halves["segment_ids"], halves["segment_ids"]),
      )
    )
    rewards = self.rewards(ids, is_token, deterministic=deterministic)
    chosen, rejected = rewards[::2], rewards[1::2]
    lengths = preference_lm.sum_halves(halves["weights"])
    counts = ((lengths[0] > 0) & (lengths[1] > 0)).astype(jnp.float32)
    total = jnp.sum(counts)
    margin = chosen - rejected
    losses = -jax.nn.log_sigmoid(margin)
    if self.center:
      losses += self.center * jnp.square(chosen + rejected)
    losses = jnp.where(counts > 0, losses, 0)

    def mean(values: jax.Array) -> language_model.Weighted:
      return jnp.sum(jnp.where(counts > 0, values, 0)), total

    metrics = {
      "reward_accuracy": mean((margin > 0).astype(jnp.float32)),
      "reward_margin": mean(margin),
      "reward_chosen": mean(chosen),
      "reward_rejected": mean(rejected),
      **preference_lm.count_cut(batch),
    }
    outputs = {
      "pair_loss": losses,
      "pair_margin": margin,
      "pair_weight": counts,
    }
    return (jnp.sum(losses), total), metrics, outputs
