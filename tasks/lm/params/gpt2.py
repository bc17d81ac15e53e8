"""GPT-2 Small (Radford et al. 2019).

Learned positions, pre-norm layers with layer norm, GELU, biases in all layers,
combined query, key and value projections, and a head tied to the embedding. The
optimizer is that of common reproductions, AdamW with a cosine schedule, as are
logits in bfloat16.
"""

import functools
from typing import Any

import fiddle as fdl
from flax import linen as nn

from paxon.layers import embedding, feed_forward, precision, remat
from paxon.layers.attention import (
  cudnn_attention,
  grouped_query,
  projections,
)
from paxon.layers.norms import layer_norm
from paxon.layers.positions import position_embedding
from paxon.tasks.lm import decoder, lm_data

_STDDEV = 0.02
_normal = functools.partial(fdl.Config, nn.initializers.normal)


class Gpt2Small124M(lm_data.Text, decoder.Decoder):
  """GPT-2 of 124 M parameters: 9.8 G tokens on one GPU, 64 sequences per step.

  bazel run --config=cuda //runner:main -- \
      --exp=tasks.lm.params.gpt2.Gpt2Small124M \
      --fdl.train_files='c4/en/c4-train.0000?-of-01024.json.gz'

  The vocabulary of 50,257 tokens is padded to a multiple of 128.
  `docs/benchmarks.md` has its speed on one H200, `docs/plans.md` a plan.
  """

  num_train_steps = 150_000
  global_batch_size = 64
  checkpoint_every_steps = 5000
  eval_every_steps = 1000
  summary_every_steps = 100
  dtype = "bfloat16"

  length = 1024
  num_layers = 12
  embed_dim = 768
  mlp_dim = 3072
  num_heads = 12
  head_dim = 64
  vocab_size = 50_304
  learning_rate = 6e-4
  weight_decay = 0.1

  attention_kernel = cudnn_attention.cudnn
  # On H200, reading back what layer norm and GELU save takes longer than
  # computing it again; matmuls and attention are not repeated.
  remat_policy = remat.save_projections | remat.save_only(
    remat.ATTENTION_RESIDUALS,
    *remat.ATTENTION_INPUTS,
    remat.ATTENTION_CONTEXT,
    remat.FEED_FORWARD_HIDDEN,
    remat.NORM_STATISTICS,
  )
  # Logits of all positions at once would take 13 GB.
  loss_chunk_length = 256
  warmup_steps = 700

  def norm(self) -> fdl.Config[Any]:
    """Returns a layer norm."""
    return fdl.Config(layer_norm.LayerNorm, epsilon=1e-5)

  def embedding(self) -> fdl.Config[embedding.Embedding]:
    """Returns the token embedding, which is also the head."""
    return fdl.Config(
      embedding.Embedding,
      vocab_size=self.vocab_size,
      embed_dim=self.embed_dim,
      embedding_init=_normal(_STDDEV),
      einsum=precision.rounded_einsum,
    )

  def position_embedding(self) -> fdl.Config[Any] | None:
    """Returns a learned position embedding."""
    return fdl.Config(
      position_embedding.LearnedPositions,
      max_length=self.length,
      embedding_init=_normal(_STDDEV),
    )

  def attention(self) -> fdl.Config[Any]:
    """Returns attention with biases and combined projections."""
    # Output projections are initialized small, so that the scale of the
    # residual stream does not grow with the number of layers.
    last = _STDDEV / (2 * self.num_layers) ** 0.5
    return fdl.Config(
      grouped_query.GroupedQueryAttention,
      num_heads=self.num_heads,
      num_kv_heads=self.num_heads,
      head_dim=self.head_dim,
      kernel=self.attention_kernel,
      projections=fdl.Config(
        projections.CombinedProjections,
        use_bias=True,
        kernel_init=_normal(_STDDEV),
        output_init=_normal(last),
      ),
    )

  def feed_forward(self) -> fdl.Config[Any]:
    """Returns a feed-forward layer without gates."""
    return fdl.Config(
      feed_forward.FeedForward,
      mlp_dim=self.mlp_dim,
      activation=nn.gelu,
      kernel_init=_normal(_STDDEV),
    )

  def model(self) -> fdl.Config[Any]:
    """Returns the model, with unrolled layers.

    A loop would copy each saved value into an array of all layers.
    """
    model = super().model()
    model.stack.scan = False
    return model

  def shrink(self) -> Any:
    """Returns a toy-sized version for a CPU, still with a chunked loss."""
    return super().shrink().replace(loss_chunk_length=12)
