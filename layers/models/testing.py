"""A small decoder language model and batches for it, for tests."""

from typing import Any

import jax
import numpy as np

from paxon.layers import (
  block,
  embedding,
  feed_forward,
  layer_norm,
  position_embedding,
  rms_norm,
  rotary_embedding,
  stack,
  unembedding,
)
from paxon.layers.attention import grouped_query, kernels, projections
from paxon.layers.models import decoder_lm

VOCAB = 16
EMBED = 8


def tiny_decoder(
  *,
  num_layers: int = 3,
  tied: bool = True,
  dtype: Any = None,
  dropout: Any = None,
  kernel: kernels.Kernel = kernels.plain,
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
        window=window,
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
      projections=projections.CombinedProjections(),
      use_bias=True,
      logit_cap=5.0,
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


def packed_batch(rows: list[list[int]], length: int) -> dict[str, jax.Array]:
  """Returns a batch of random documents of the given lengths, packed.

  Args:
    rows: The lengths of the documents of each row.
    length: Length of a row; what the documents leave is padding.
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


def token_args(batch: dict[str, jax.Array]) -> tuple[jax.Array, ...]:
  """Returns the positional arguments of the model."""
  return batch["inputs"], batch["positions"], batch["segment_ids"]
