"""Masked language model: predicts the tokens that its input hides.

Devlin et al. 2018, https://arxiv.org/abs/1810.04805, section 3.1. It reads both
ways, so it cannot generate text from left to right.

Letters: B batch, T length, D embed, V vocab.
"""

from collections.abc import Sequence

from flax import linen as nn
import jax
from jaxtyping import Array, Float, Int

from paxon.layers import softmax_loss
from paxon.layers.models import language_head, random_masking, text_encoder


class MaskedLm(text_encoder.TextEncoder):
  """A text encoder with a head.

  Attributes:
    head: Maps [B,T,D] to logits; `None` uses `embedding.attend` (tied; BERT
      adds a bias: `Embedding(use_bias=True)`).
    transform: Maps states [B,T,D] to what the head is applied to, such as
      `head_transform.HeadTransform`; `None` leaves them.
    masking: Chooses and hides tokens in each step. `None` takes batches that
      were masked before.
    logit_cap: Bends logits into `(-logit_cap, logit_cap)`; `None` does not.
    token_loss: What `loss` computes from the head, and in which chunks.
    record: As in `DecoderLm`.
    auxiliary_loss_weight: As in `DecoderLm`.
  """

  head: nn.Module | None = None
  transform: nn.Module | None = None
  masking: random_masking.RandomMasking | None = None
  logit_cap: float | None = None
  token_loss: softmax_loss.SoftmaxLoss = softmax_loss.SoftmaxLoss()
  record: Sequence[str] = ()
  auxiliary_loss_weight: float = 1.0

  def __post_init__(self) -> None:
    # A tuple keeps the module hashable where a list was given.
    self.record = tuple(self.record)
    super().__post_init__()
    language_head.check(self)

  def __call__(
    self,
    inputs: Int[Array, "batch length"],
    positions: Int[Array, "batch length"] | None = None,
    segment_ids: Int[Array, "batch length"] | None = None,
    type_ids: Int[Array, "batch length"] | None = None,
    *,
    deterministic: bool = True,
  ) -> Float[Array, "batch length vocab"]:
    """Returns logits in at least float32; called as `hidden` is."""
    x = self.hidden(
      inputs, positions, segment_ids, type_ids, deterministic=deterministic
    )
    return language_head.LanguageHead(self).logits(self._transformed(x))

  def loss(
    self, batch: language_head.Batch, *, deterministic: bool = True
  ) -> language_head.Result:
    """Returns the loss, metrics and per-example outputs of a batch.

    Args:
      batch: `inputs`, `positions`, `segment_ids` int32 [B,T] and `weights`
        float32 [B,T]; `type_ids` int32 [B,T] where tokens have types, and
        `example_weights` as `DecoderLm.loss` has them. With `masking`, `inputs`
        are the text, and weights of zero exclude tokens from being hidden.
        Without, tokens are hidden in `inputs`, `targets` int32 [B,T] has the
        text, and `weights` are 1 for hidden tokens.
      deterministic: Whether dropout is off; otherwise `masking` needs the
        random stream `masking`.

    Returns:
      As `DecoderLm.loss`; `token_weights` are zero where nothing was hidden.
      With `masking`, outputs have also the `inputs` that the model was given.

    Raises:
      ValueError: There are no targets and no `masking`.
    """
    hidden: dict[str, jax.Array] = {}
    if self.masking is not None:
      key = None if deterministic else self.make_rng(random_masking.STREAM)
      batch = {**batch, **self.masking(batch, key=key)}
      hidden["inputs"] = batch["inputs"]
    elif "targets" not in batch:
      raise ValueError(
        "MaskedLm.loss needs batch['targets'], the text without masks, or "
        "MaskedLm.masking to hide tokens of batch['inputs'] itself."
      )
    x = self.hidden(
      batch["inputs"],
      batch["positions"],
      batch["segment_ids"],
      batch.get("type_ids"),
      deterministic=deterministic,
    )
    loss, metrics, outputs = language_head.LanguageHead(self).loss(
      self._transformed(x), batch, deterministic=deterministic
    )
    return loss, metrics, outputs | hidden

  def _transformed(self, x: jax.Array) -> jax.Array:
    return x if self.transform is None else self.transform(x)
