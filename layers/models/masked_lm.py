"""Text encoder and masked language model.

Devlin et al. 2018, https://arxiv.org/abs/1810.04805, section 3.1. The encoder
is bidirectional if its attention is not causal.

Letters: B batch, T length, D embed, V vocab.
"""

from collections.abc import Sequence

from flax import linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from paxon.layers import token_context
from paxon.layers.losses import softmax_loss
from paxon.layers.models import language_model, random_masking


class TextEncoder(nn.Module):
  """Maps token ids to hidden states: embeddings, stack, norm.

  Attributes:
    embedding: Maps ids [B,T] to [B,T,D].
    stack: Called with tokens and their `TokenContext`.
    final_norm: Maps [B,T,D] to [B,T,D]; `None` if the last block ends with a
      norm.
    position_embedding: Called with positions [B,T] and the width of a token;
      added to embedded tokens. `None` leaves positions to the attention.
    type_embedding: Maps type ids of tokens (first or second text) to [B,T,D];
      added to embedded tokens. `None` is a model without types.
    embedding_norm: Normalizes the sum of embeddings; `None` disables it.
    embedding_dropout: Dropout of the input of the stack; `None` disables it.
  """

  embedding: nn.Module
  stack: nn.Module
  final_norm: nn.Module | None = None
  position_embedding: nn.Module | None = None
  type_embedding: nn.Module | None = None
  embedding_norm: nn.Module | None = None
  embedding_dropout: nn.Module | None = None

  def __call__(
    self,
    inputs: Int[Array, "batch length"],
    positions: Int[Array, "batch length"] | None = None,
    segment_ids: Int[Array, "batch length"] | None = None,
    type_ids: Int[Array, "batch length"] | None = None,
    *,
    deterministic: bool = True,
  ) -> Float[Array, "batch length embed"]:
    """Returns the hidden states; see `hidden`."""
    context = token_context.TokenContext(
      positions, segment_ids, deterministic=deterministic
    )
    return self.hidden(inputs, context, type_ids)

  def hidden(
    self,
    inputs: Int[Array, "batch length"],
    context: token_context.TokenContext = token_context.ONE_DOCUMENT,
    type_ids: Int[Array, "batch length"] | None = None,
  ) -> Float[Array, "batch length embed"]:
    """Returns the hidden states of the tokens; types are 0 by default.

    Raises:
      ValueError: `type_ids` are given without a `type_embedding`.
    """
    types = None
    if self.type_embedding is not None:
      type_ids = jnp.zeros_like(inputs) if type_ids is None else type_ids
      types = self.type_embedding, type_ids
    elif type_ids is not None:
      raise ValueError(
        f"{type(self).__name__}.type_embedding is None, but type_ids are given;"
        " set it, or omit them."
      )
    context = context.fill(self, inputs, rank=2)
    x = language_model.embed_tokens(
      inputs,
      context,
      embedding=self.embedding,
      types=types,
      position_embedding=self.position_embedding,
      norm=self.embedding_norm,
      dropout=self.embedding_dropout,
    )
    x = self.stack(x, context)
    return language_model.apply_norm(x, self.final_norm)


class HeadTransform(nn.Module):
  """BERT's transform before the head: `norm(dense(x))`.

  Attributes:
    dense: Maps [B,T,D] to [B,T,D]; usually a `linear.Linear` with an
      activation.
    norm: Maps [B,T,D] to [B,T,D].
  """

  dense: nn.Module
  norm: nn.Module

  def __call__(
    self, x: Float[Array, "batch length embed"]
  ) -> Float[Array, "batch length embed"]:
    """Returns the input of the head."""
    return self.norm(self.dense(x))


class MaskedLm(TextEncoder):
  """Text encoder with a masked language modeling head.

  Attributes:
    head: Maps [B,T,D] to logits; `None` uses `embedding.attend` (tied; BERT
      adds a bias: `Embedding(use_bias=True)`).
    transform: Maps hidden states to the input of the head, such as
      `HeadTransform`; `None` is the identity.
    masking: Masks random tokens in each step. `None` expects masked batches.

  The other attributes are those of `TextEncoder` and `DecoderLm`.
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
    language_model.check(self)

  def __call__(
    self,
    inputs: Int[Array, "batch length"],
    positions: Int[Array, "batch length"] | None = None,
    segment_ids: Int[Array, "batch length"] | None = None,
    type_ids: Int[Array, "batch length"] | None = None,
    *,
    deterministic: bool = True,
  ) -> Float[Array, "batch length vocab"]:
    """Returns logits in at least float32; called like `TextEncoder`."""
    context = token_context.TokenContext(
      positions, segment_ids, deterministic=deterministic
    )
    x = self.hidden(inputs, context, type_ids)
    return language_model.LanguageHead(self).logits(self._transform(x))

  def loss(
    self, batch: language_model.Batch, *, deterministic: bool = True
  ) -> language_model.Result:
    """Returns the loss, metrics and per-example outputs of a batch.

    Args:
      batch: `inputs`, `positions`, `segment_ids` int32 [B,T] and `weights`
        float32 [B,T]; optionally `type_ids` int32 [B,T] and `example_weights`
        as in `DecoderLm.loss`. With `masking`, `inputs` are the text, and
        tokens of weight zero are not masked. Without it, `inputs` are masked,
        `targets` int32 [B,T] are the text, and `weights` are 1 for masked
        tokens.
      deterministic: Disables dropout; if False, `masking` needs the random
        stream `masking`.

    Returns:
      As `DecoderLm.loss`; `token_weights` are zero for tokens that are not
      masked. With `masking`, outputs also have the masked `inputs`.

    Raises:
      ValueError: There are neither targets nor `masking`.
    """
    masked: dict[str, jax.Array] = {}
    if self.masking is not None:
      key = None if deterministic else self.make_rng(random_masking.STREAM)
      batch = {**batch, **self.masking(batch, key=key)}
      masked["inputs"] = batch["inputs"]
    elif "targets" not in batch:
      raise ValueError(
        "MaskedLm.loss needs batch['targets'], the unmasked text, or "
        "MaskedLm.masking to mask batch['inputs']."
      )
    context = token_context.TokenContext(
      batch["positions"], batch["segment_ids"], deterministic=deterministic
    )
    x = self.hidden(batch["inputs"], context, batch.get("type_ids"))
    loss, metrics, outputs = language_model.LanguageHead(self).loss(
      self._transform(x), batch, deterministic=deterministic
    )
    return loss, metrics, outputs | masked

  def _transform(self, x: jax.Array) -> jax.Array:
    return x if self.transform is None else self.transform(x)
