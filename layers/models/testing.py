"""Small models of each kind and batches for them, for tests."""

from typing import Any

from flax import linen as nn
import jax
import numpy as np

from paxon.layers import embedding, feed_forward, linear, unembedding
from paxon.layers.attention import (
  cross_attention,
  grouped_query,
  kernels,
  position_bias,
  projections,
)
from paxon.layers.attention import mask as attention_mask
from paxon.layers.attention import testing as attention_testing
from paxon.layers.models import (
  classifier,
  decoder_lm,
  encoder_decoder,
  masked_lm,
  prefix_lm,
  random_masking,
)
from paxon.layers.norms import layer_norm, rms_norm
from paxon.layers.positions import position_embedding, rotary_embedding
from paxon.layers.stacks import block, encoder_decoder_block, shared, stack
from paxon.sharding import axes

VOCAB = 16
EMBED = 8


def tiny_decoder(
  *,
  num_layers: int = 3,
  tied: bool = True,
  dtype: Any = None,
  dropout: Any = None,
  kernel: kernels.Kernel = kernels.auto,
  **stack_fields: Any,
) -> decoder_lm.DecoderLm:
  """Returns a model whose sizes divide by four devices a mesh axis.

  Args:
    num_layers: Number of layers; the pattern is a local and a global layer.
    tied: Whether the head shares the embedding table.
    dtype: Dtype of the computation.
    dropout: The blocks' dropout.
    kernel: The attention kernel.
    **stack_fields: Fields of the stack.
  """

  def layer(window: int | None) -> block.TransformerBlock:
    return block.TransformerBlock(
      attention_norm=rms_norm.RmsNorm(dtype=dtype),
      attention=grouped_query.GroupedQueryAttention(
        4,
        num_kv_heads=2,
        head_dim=4,
        rotary=rotary_embedding.Rotary(),
        kernel=kernel,
        mask=attention_mask.MaskRules(window=window),
        dtype=dtype,
      ),
      feed_forward_norm=rms_norm.RmsNorm(dtype=dtype),
      feed_forward=feed_forward.GatedFeedForward(12, dtype=dtype),
      dropout=dropout,
    )

  head = None if tied else unembedding.Unembedding(VOCAB, dtype=dtype)
  return decoder_lm.DecoderLm(
    embedding=embedding.Embedding(VOCAB, embed_dim=EMBED, dtype=dtype),
    stack=stack.Stack(
      (layer(3), layer(None)), num_layers=num_layers, **stack_fields
    ),
    final_norm=rms_norm.RmsNorm(dtype=dtype),
    head=head,
  )


def tiny_gpt2(
  *, positions: Any = None, dtype: Any = None, **stack_fields: Any
) -> decoder_lm.DecoderLm:
  """Returns a model of the first transformers: absolute positions and biases.

  Args:
    positions: The position embedding; by default a table of 16 positions.
    dtype: Dtype of the computation.
    **stack_fields: Fields of the stack.
  """
  layer = block.TransformerBlock(
    attention_norm=layer_norm.LayerNorm(dtype=dtype),
    attention=grouped_query.GroupedQueryAttention(
      4,
      num_kv_heads=4,
      head_dim=4,
      projections=projections.CombinedProjections(use_bias=True),
      logits=kernels.Logits(cap=5.0),
      dtype=dtype,
    ),
    feed_forward_norm=layer_norm.LayerNorm(dtype=dtype),
    feed_forward=feed_forward.FeedForward(
      12, activation=jax.nn.gelu, dtype=dtype
    ),
  )
  return decoder_lm.DecoderLm(
    embedding=embedding.Embedding(VOCAB, embed_dim=EMBED, dtype=dtype),
    stack=stack.Stack((layer,), num_layers=2, **stack_fields),
    final_norm=layer_norm.LayerNorm(dtype=dtype),
    position_embedding=positions
    or position_embedding.LearnedPositions(16, dtype=dtype),
  )


def tiny_prefix_lm(**stack_fields: Any) -> prefix_lm.PrefixLm:
  """Returns a prefix language model of two layers with rotary embedding."""
  layer = block.TransformerBlock(
    attention_norm=rms_norm.RmsNorm(),
    attention=_attention(rotary=rotary_embedding.Rotary()),
    feed_forward_norm=rms_norm.RmsNorm(),
    feed_forward=feed_forward.GatedFeedForward(12),
  )
  return prefix_lm.PrefixLm(
    embedding=embedding.Embedding(VOCAB, embed_dim=EMBED),
    stack=stack.Stack((layer,), num_layers=2, **stack_fields),
    final_norm=rms_norm.RmsNorm(),
  )


def tiny_t5(
  *, tied: bool = True, **stack_fields: Any
) -> encoder_decoder.EncoderDecoder:
  """Returns an encoder-decoder as T5: pre-norm, one bias by distance a side.

  Args:
    tied: Whether the head shares the embedding table, with its smaller scale.
    **stack_fields: Fields of both stacks.
  """

  def attention(side: str, *, causal: bool) -> nn.Module:
    bias = position_bias.RelativeBias(8, 16, bidirectional=not causal)
    return _attention(
      causal=causal,
      logit_scale=1.0,
      position_bias=shared.shared(f"{side}_bias", bias),
    )

  def mlp() -> nn.Module:
    return feed_forward.FeedForward(12, use_bias=False)

  encoder = block.TransformerBlock(
    attention_norm=rms_norm.RmsNorm(),
    attention=attention("encoder", causal=False),
    feed_forward_norm=rms_norm.RmsNorm(),
    feed_forward=mlp(),
  )
  decoder = encoder_decoder_block.CrossBlock(
    self_attention_norm=rms_norm.RmsNorm(),
    self_attention=attention("decoder", causal=True),
    cross_attention_norm=rms_norm.RmsNorm(),
    cross_attention=cross_attention.CrossAttention(
      4, num_kv_heads=4, head_dim=4, logits=kernels.Logits(scale=1.0)
    ),
    feed_forward_norm=rms_norm.RmsNorm(),
    feed_forward=mlp(),
  )
  scale = EMBED**-0.5 if tied else 1.0
  return encoder_decoder.EncoderDecoder(
    embedding=embedding.Embedding(VOCAB, embed_dim=EMBED, attend_scale=scale),
    encoder=stack.Stack((encoder,), num_layers=2, **stack_fields),
    encoder_norm=rms_norm.RmsNorm(),
    decoder=stack.Stack((decoder,), num_layers=2, **stack_fields),
    decoder_norm=rms_norm.RmsNorm(),
    head=None if tied else unembedding.Unembedding(VOCAB),
  )


def tiny_transformer(**stack_fields: Any) -> encoder_decoder.EncoderDecoder:
  """Returns the first encoder-decoder: post-norm, biases, sinusoids, 3 tables.

  Args:
    **stack_fields: Fields of both stacks.
  """
  norm = layer_norm.LayerNorm
  encoder = block.PostNormBlock(
    _attention(causal=False, use_bias=True),
    norm(),
    feed_forward.FeedForward(12),
    norm(),
  )
  decoder = encoder_decoder_block.PostNormCrossBlock(
    self_attention=_attention(use_bias=True),
    self_attention_norm=norm(),
    cross_attention=cross_attention.CrossAttention(
      4,
      num_kv_heads=2,
      head_dim=4,
      projections=projections.SeparateProjections(use_bias=True),
    ),
    cross_attention_norm=norm(),
    feed_forward=feed_forward.FeedForward(12),
    feed_forward_norm=norm(),
  )
  sinusoids = position_embedding.SinusoidalPositions
  return encoder_decoder.EncoderDecoder(
    embedding=embedding.Embedding(VOCAB, embed_dim=EMBED),
    encoder=stack.Stack((encoder,), num_layers=2, **stack_fields),
    encoder_norm=None,
    decoder=stack.Stack((decoder,), num_layers=2, **stack_fields),
    decoder_norm=None,
    head=unembedding.Unembedding(VOCAB),
    encoder_embedding=embedding.Embedding(VOCAB, embed_dim=EMBED),
    encoder_position_embedding=sinusoids(),
    decoder_position_embedding=sinusoids(),
  )


def tiny_bert(
  *, masking: random_masking.RandomMasking | None = None, **stack_fields: Any
) -> masked_lm.MaskedLm:
  """Returns a masked language model as BERT.

  Args:
    masking: Hides tokens in each step.
    **stack_fields: Fields of the stack.
  """
  dense = linear.Linear(
    EMBED, activation=jax.nn.gelu, kernel_axes=(axes.EMBED, None)
  )
  return masked_lm.MaskedLm(
    **_text_parts(**stack_fields),
    transform=masked_lm.HeadTransform(dense, layer_norm.LayerNorm()),
    masking=masking,
  )


def tiny_classifier(
  num_classes: int = 6, **stack_fields: Any
) -> classifier.Classifier:
  """Returns a classifier of texts.

  Args:
    num_classes: Number of classes.
    **stack_fields: Fields of the stack.
  """
  return classifier.Classifier(
    encoder=masked_lm.TextEncoder(**_text_parts(**stack_fields)),
    head=linear.Linear(num_classes, kernel_axes=(axes.EMBED, None)),
    pooling=classifier.pool_mean,
  )


def _text_parts(**stack_fields: Any) -> dict[str, Any]:
  layer = block.PostNormBlock(
    _attention(causal=False, use_bias=True),
    layer_norm.LayerNorm(),
    feed_forward.FeedForward(12, activation=jax.nn.gelu),
    layer_norm.LayerNorm(),
  )
  return {
    "embedding": embedding.Embedding(VOCAB, embed_dim=EMBED, use_bias=True),
    "stack": stack.Stack((layer,), num_layers=2, **stack_fields),
    "position_embedding": position_embedding.LearnedPositions(16),
    "type_embedding": embedding.Embedding(2, embed_dim=EMBED),
    "embedding_norm": layer_norm.LayerNorm(),
  }


def _attention(**fields: Any) -> grouped_query.GroupedQueryAttention:
  return attention_testing.grouped_query_attention(
    4, num_kv_heads=4, head_dim=4, **fields
  )


def packed_batch(rows: list[list[int]], length: int) -> dict[str, jax.Array]:
  """Returns a batch of random documents of the given lengths, packed.

  Args:
    rows: The lengths of the documents of each sequence.
    length: Length of a sequence; the rest is padding.
  """
  rng = np.random.default_rng(5)
  shape = (len(rows), length)
  batch: dict[str, np.ndarray] = {
    name: np.zeros(shape, np.int32)
    for name in ("inputs", "targets", "positions", "segment_ids")
  }
  for row, documents in enumerate(rows):
    start = 0
    for number, size in enumerate(documents, start=1):
      ids = rng.integers(1, VOCAB, size + 1)
      inside = (row, slice(start, start + size))
      batch["inputs"][inside] = ids[:-1]
      batch["targets"][inside] = ids[1:]
      batch["positions"][inside] = np.arange(size)
      batch["segment_ids"][inside] = number
      start += size
  batch["weights"] = (batch["segment_ids"] > 0).astype(np.float32)
  return {name: jax.numpy.asarray(x) for name, x in batch.items()}


def paired_batch(
  rows: list[list[tuple[int, int]]], *, source: int, length: int
) -> dict[str, jax.Array]:
  """Returns a batch of random pairs of documents, packed on both sides.

  Args:
    rows: The lengths of each pair of each sequence, the encoder's first.
    source: Length of a sequence of the encoder.
    length: Length of a sequence of the decoder.
  """
  encoder = packed_batch([[size for size, _ in row] for row in rows], source)
  batch = packed_batch([[size for _, size in row] for row in rows], length)
  for name in ("inputs", "positions", "segment_ids"):
    batch[f"encoder_{name}"] = encoder[name]
  return batch


def paired_args(batch: dict[str, jax.Array]) -> tuple[jax.Array, ...]:
  """Returns the positional arguments of an encoder-decoder."""
  names = ("inputs", "positions", "segment_ids")
  return (
    *token_args(batch),
    *(batch[f"encoder_{name}"] for name in names),
  )


def token_args(batch: dict[str, jax.Array]) -> tuple[jax.Array, ...]:
  """Returns the positional arguments of the model."""
  return batch["inputs"], batch["positions"], batch["segment_ids"]
