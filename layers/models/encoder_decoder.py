"""Encoder-decoder language model.

Learners call `loss`; decoding calls `prefill`, which runs the encoder once, and
`decode_step`. Packed sequences have several pairs: tokens of the decoder attend
to the encoder's document with the same segment id.

Letters: B batch, T length of the decoder, S length of the encoder, V vocab.
"""

from collections.abc import Sequence

from flax import linen as nn
import jax
from jaxtyping import Array, Float, Int

from paxon.layers import token_context
from paxon.layers.losses import softmax_loss
from paxon.layers.models import decoder_lm, document_scores, language_model

# Ids, or features that `encoder_embedding` maps to the encoder's length.
Source = Int[Array, "batch source"] | Float[Array, "batch frames features"]

_ENCODER_KEYS = ("encoder_inputs", "encoder_positions", "encoder_segment_ids")


class EncoderDecoder(nn.Module):
  """Predicts the next token from those before it and from a source.

  Attributes:
    embedding: Maps ids [B,T] to [B,T,D], and back by `attend`. T5 has
      `Embedding(attend_scale=D ** -0.5)`.
    encoder: Called with tokens and their `TokenContext`; its attention is not
      causal.
    encoder_norm: Maps [B,S,D] to [B,S,D]; `None` if the last block ends with a
      norm.
    decoder: Called with tokens, their `TokenContext`, the memory [B,S,D] (the
      output of the encoder), its segment ids, and the keyword `skip_memory`.
    decoder_norm: Like `encoder_norm`, for the decoder.
    head: Maps [B,T,D] to logits; `None` uses `embedding.attend` (tied).
    encoder_embedding: Embedding of the encoder; `None` uses `embedding`. One of
      audio, such as `audio_encoder.ConvEmbedding`, maps features [B,F,K] to
      [B,S,D], possibly with F larger than S.
    encoder_position_embedding: Maps positions and the width of a token to
      vectors that are added; `None` leaves positions to attention. To share one
      table with the decoder, use `layers.stacks.shared.shared` for both.
    decoder_position_embedding: Like `encoder_position_embedding`.
    encoder_embedding_norm: Normalizes the encoder's sum of embeddings; `None`
      disables it.
    decoder_embedding_norm: Like `encoder_embedding_norm`.
    embedding_dropout: Dropout of the inputs of both stacks; `None` disables it.
    source_optional: Whether batches without encoder keys train the decoder
      without cross-attention. Otherwise they are an error.

  The other attributes are those of `DecoderLm`.
  """

  embedding: nn.Module
  encoder: nn.Module
  encoder_norm: nn.Module | None
  decoder: nn.Module
  decoder_norm: nn.Module | None
  head: nn.Module | None = None
  encoder_embedding: nn.Module | None = None
  encoder_position_embedding: nn.Module | None = None
  decoder_position_embedding: nn.Module | None = None
  logit_cap: float | None = None
  token_loss: softmax_loss.SoftmaxLoss = softmax_loss.SoftmaxLoss()
  encoder_embedding_norm: nn.Module | None = None
  decoder_embedding_norm: nn.Module | None = None
  embedding_dropout: nn.Module | None = None
  source_optional: bool = False
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
    positions: Int[Array, "batch length"],
    segment_ids: Int[Array, "batch length"],
    encoder_inputs: Source,
    encoder_positions: Int[Array, "batch source"],
    encoder_segment_ids: Int[Array, "batch source"],
    *,
    cache_length: int | None = None,
    deterministic: bool = True,
  ) -> Float[Array, "batch length vocab"]:
    """Returns logits in at least float32.

    Positions are from 0 in each segment. Segment 0 is padding; a document has
    one id on both sides. `cache_length` makes a cache with this number of
    slots.
    """
    source = token_context.TokenContext(
      encoder_positions, encoder_segment_ids, deterministic=deterministic
    )
    context = token_context.TokenContext(
      positions,
      segment_ids,
      cache_length=cache_length,
      deterministic=deterministic,
    )
    memory = self.encode(encoder_inputs, source)
    x = self._decode(inputs, context, memory, encoder_segment_ids)
    return language_model.LanguageHead(self).logits(x)

  def encode(
    self,
    encoder_inputs: Source,
    context: token_context.TokenContext,
  ) -> Float[Array, "batch source embed"]:
    """Returns the output of the encoder, the decoder's memory."""
    table = self.encoder_embedding
    x = language_model.embed_tokens(
      encoder_inputs,
      context,
      embedding=self.embedding if table is None else table,
      position_embedding=self.encoder_position_embedding,
      norm=self.encoder_embedding_norm,
      dropout=self.embedding_dropout,
    )
    x = self.encoder(x, context)
    return language_model.apply_norm(x, self.encoder_norm)

  def hidden(
    self, batch: language_model.Batch, *, deterministic: bool = True
  ) -> Float[Array, "batch length embed"]:
    """Returns the input of the head for a batch of `loss`.

    Raises:
      ValueError: Encoder keys are missing.
    """
    missing = [key for key in _ENCODER_KEYS if key not in batch]
    skip = self.source_optional and len(missing) == len(_ENCODER_KEYS)
    if missing and not skip:
      raise ValueError(
        f"EncoderDecoder needs batch[{missing[0]!r}], int32 [B,S]; the "
        f"batch has {sorted(batch)}."
      )
    memory = segments = None
    if not skip:
      segments = batch["encoder_segment_ids"]
      source = token_context.TokenContext(
        batch["encoder_positions"], segments, deterministic=deterministic
      )
      memory = self.encode(batch["encoder_inputs"], source)
    context = token_context.TokenContext(
      batch["positions"], batch["segment_ids"], deterministic=deterministic
    )
    return self._decode(
      batch["inputs"], context, memory, segments, skip_memory=skip
    )

  def loss(
    self, batch: language_model.Batch, *, deterministic: bool = True
  ) -> language_model.Result:
    """Returns the loss, metrics and outputs, as `DecoderLm.loss`.

    The batch also has `encoder_inputs`, `encoder_positions` and
    `encoder_segment_ids` int32 [B,S].

    Raises:
      ValueError: Encoder keys are missing and not optional.
    """
    return language_model.LanguageHead(self).loss(
      self.hidden(batch, deterministic=deterministic),
      batch,
      deterministic=deterministic,
    )

  def score(
    self, batch: language_model.Batch
  ) -> document_scores.DocumentScores:
    """Returns log likelihood and length of each document of a batch."""
    return language_model.LanguageHead(self).score(self.hidden(batch), batch)

  def prefill(
    self,
    inputs: Int[Array, "batch length"],
    positions: Int[Array, "batch length"],
    segment_ids: Int[Array, "batch length"],
    *,
    encoder_inputs: Source,
    encoder_positions: Int[Array, "batch source"],
    encoder_segment_ids: Int[Array, "batch source"],
    cache_length: int,
    at: Int[Array, " batch"] | None = None,
  ) -> Float[Array, "batch tokens vocab"]:
    """Reads sources and prompts; apply with `mutable=["cache"]`.

    Both are padded on the right with segment 0. See `DecoderLm.prefill`.

    Raises:
      ValueError: The cache is not mutable.
    """
    decoder_lm.check_prefill(self)
    memory = self.encode(
      encoder_inputs,
      token_context.TokenContext(encoder_positions, encoder_segment_ids),
    )
    context = token_context.TokenContext(
      positions, segment_ids, cache_length=cache_length
    )
    x = self._decode(inputs, context, memory, encoder_segment_ids)
    return language_model.LanguageHead(self).logits(x, at)

  def decode_step(
    self,
    inputs: Int[Array, "batch length"],
    positions: Int[Array, "batch length"],
    segment_ids: Int[Array, "batch length"],
  ) -> Float[Array, "batch length vocab"]:
    """Appends tokens to the cache; apply with `mutable=["cache"]`.

    Raises:
      ValueError: There is no cache, or it is not mutable.
    """
    decoder_lm.check_decode_step(self)
    context = token_context.TokenContext(positions, segment_ids)
    x = self._decode(inputs, context, None, None)
    return language_model.LanguageHead(self).logits(x)

  def _decode(
    self,
    inputs: jax.Array,
    context: token_context.TokenContext,
    memory: jax.Array | None,
    memory_segment_ids: jax.Array | None,
    *,
    skip_memory: bool = False,
  ) -> jax.Array:
    """Returns the hidden states of the decoder, [B,T,D]."""
    x = language_model.embed_tokens(
      inputs,
      context,
      embedding=self.embedding,
      position_embedding=self.decoder_position_embedding,
      norm=self.decoder_embedding_norm,
      dropout=self.embedding_dropout,
    )
    x = self.decoder(
      x, context, memory, memory_segment_ids, skip_memory=skip_memory
    )
    return language_model.apply_norm(x, self.decoder_norm)
