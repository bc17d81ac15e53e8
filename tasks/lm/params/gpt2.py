"""GPT-2 (Radford et al. 2019), the smallest of its four sizes.

Learned positions, layer norm before each part, GELU, biases everywhere, one
kernel for queries, keys and values, and a head tied to the embedding. The
optimizer is the one that reproductions use: AdamW with half a cosine.
"""

from collections.abc import Callable
import functools
from typing import Any

import fiddle as fdl
from flax import linen as nn

from paxon.layers import (
  embedding,
  feed_forward,
  layer_norm,
  position_embedding,
  softmax_loss,
)
from paxon.layers.attention import (
  cudnn_attention,
  grouped_query,
  kernels,
  projections,
)
from paxon.layers.models import pre_norm_decoder
from paxon.learners import adamw, warmup_cosine
from paxon.tasks.lm import datasets, decoder

_STDDEV = 0.02


class Gpt2Small124M(datasets.Text, decoder.Decoder):
  """GPT-2 of 124 M parameters: 9.8 G tokens on one GPU, 64 rows a step.

  bazel run --config=cuda //runner:main -- \
      --exp=tasks.lm.params.gpt2.Gpt2Small124M \
      --fdl.train_files='c4/en/c4-train.0000?-of-01024.json.gz'

  The vocabulary of 50,257 ids is rounded up to a multiple of 128. Not run at
  its size here; what a step takes is in `docs/plans.md`.

  Attributes:
    attention_kernel: Computes attention. cuDNN's is for NVIDIA GPUs; elsewhere
      set `layers.attention.kernels.plain`.
    loss_chunk_length: How many positions of a row the head computes at once;
      None is all of them, whose logits take 13 GB.
    warmup_steps: Steps until the highest learning rate.
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

  attention_kernel: Callable[..., Any] = cudnn_attention.cudnn
  loss_chunk_length: int | None = 256
  warmup_steps: int = 700

  def model(self) -> fdl.Config[Any]:
    """Returns the model."""
    init = functools.partial(fdl.Config, nn.initializers.normal)
    # The parts that add to the residual stream begin small, so that its size
    # does not grow with the number of layers.
    last = _STDDEV / (2 * self.num_layers) ** 0.5
    return pre_norm_decoder.compose(
      fdl.Config,
      embedding=fdl.Config(
        embedding.Embedding,
        vocab_size=self.vocab_size,
        embed_dim=self.embed_dim,
        embedding_init=init(_STDDEV),
      ),
      position_embedding=fdl.Config(
        position_embedding.LearnedPositions,
        max_length=self.length,
        embedding_init=init(_STDDEV),
      ),
      norm=lambda: fdl.Config(layer_norm.LayerNorm, epsilon=1e-5),
      attention=fdl.Config(
        grouped_query.GroupedQueryAttention,
        num_heads=self.num_heads,
        num_kv_heads=self.num_heads,
        head_dim=self.head_dim,
        kernel=self.attention_kernel,
        projections=fdl.Config(projections.CombinedProjections),
        use_bias=True,
        projection_init=init(_STDDEV),
        output_init=init(last),
      ),
      feed_forward=fdl.Config(
        feed_forward.FeedForward,
        mlp_dim=self.mlp_dim,
        activation=nn.gelu,
        kernel_init=init(_STDDEV),
      ),
      num_layers=self.num_layers,
      remat_policy=self.remat_policy,
      token_loss=fdl.Config(
        softmax_loss.SoftmaxLoss, chunk_length=self.loss_chunk_length
      ),
    )

  def optimizer(self) -> fdl.Config[adamw.AdamW]:
    """Returns AdamW, whose learning rate ends at a tenth."""
    return fdl.Config(
      adamw.AdamW,
      schedule=fdl.Config(
        warmup_cosine.WarmupCosine,
        peak=self.learning_rate,
        warmup_steps=min(self.warmup_steps, self.num_train_steps),
        total_steps=self.num_train_steps,
        end=0.1 * self.learning_rate,
      ),
      b2=0.95,
      weight_decay=self.weight_decay,
    )

  def shrink(self) -> Any:
    """Returns a toy for a CPU, whose head still works in chunks."""
    return (
      super()
      .shrink()
      .replace(attention_kernel=kernels.plain, loss_chunk_length=12)
    )
