"""Llama 2 and 3 (Touvron et al. 2023, Grattafiori et al. 2024).

Root-mean-square norm before each part, rotary positions, gated feed-forward
layers with SiLU, no biases, and a head of its own. The hyper-parameters are
those of the papers' pre-training, for the batch that is given here.
"""

from collections.abc import Callable
from typing import Any

import fiddle as fdl

from paxon.layers import (
  embedding,
  feed_forward,
  remat,
  rms_norm,
  rotary_embedding,
  softmax_loss,
  unembedding,
)
from paxon.layers.attention import cudnn_attention, grouped_query, kernels
from paxon.layers.models import pre_norm_decoder
from paxon.learners import adamw, warmup_cosine
from paxon.tasks.lm import datasets, decoder


class _Llama(datasets.Text, decoder.Decoder):
  """The base of this module.

  Attributes:
    num_kv_heads: Number of key/value heads; divides `num_heads`.
    rotary_wavelength: Of the slowest pair of features.
    attention_kernel: Computes attention. cuDNN's is for NVIDIA GPUs; elsewhere
      set `layers.attention.kernels.plain`.
    loss_chunk_length: How many positions of a row the head computes at once:
      the logits of whole rows would be the largest tensor of all.
    warmup_steps: Steps until the highest learning rate.
  """

  num_kv_heads: int
  rotary_wavelength: float = 10_000.0
  attention_kernel: Callable[..., Any] = cudnn_attention.cudnn
  loss_chunk_length: int | None = 1024
  warmup_steps: int = 2000

  num_train_steps = 500_000
  checkpoint_every_steps = 1000
  eval_every_steps = 1000
  summary_every_steps = 10
  dtype = "bfloat16"
  remat_policy = remat.save_nothing
  learning_rate = 3e-4
  weight_decay = 0.1

  def model(self) -> fdl.Config[Any]:
    """Returns the model."""
    return pre_norm_decoder.compose(
      fdl.Config,
      embedding=fdl.Config(
        embedding.Embedding,
        vocab_size=self.vocab_size,
        embed_dim=self.embed_dim,
      ),
      norm=lambda: fdl.Config(rms_norm.RmsNorm, epsilon=1e-5),
      attention=fdl.Config(
        grouped_query.GroupedQueryAttention,
        num_heads=self.num_heads,
        num_kv_heads=self.num_kv_heads,
        head_dim=self.head_dim,
        rotary=fdl.Config(
          rotary_embedding.Rotary, max_wavelength=self.rotary_wavelength
        ),
        kernel=self.attention_kernel,
      ),
      feed_forward=fdl.Config(
        feed_forward.GatedFeedForward, mlp_dim=self.mlp_dim
      ),
      num_layers=self.num_layers,
      remat_policy=self.remat_policy,
      head=fdl.Config(unembedding.Unembedding, vocab_size=self.vocab_size),
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
    """Returns a toy for a CPU that still groups heads where the model does."""
    groups = self.num_heads // self.num_kv_heads
    toy = super().shrink()
    return toy.replace(
      num_kv_heads=max(1, toy.num_heads // groups),
      attention_kernel=kernels.plain,
      loss_chunk_length=12,
    )


class Llama2_7B(_Llama):  # noqa: N801
  """Llama 2 of 6.7 B parameters on 8 GPUs, 2 rows of 4,096 tokens each.

  Not run at its size here; what a step takes is in `docs/plans.md`.
  """

  length = 4096
  num_layers = 32
  embed_dim = 4096
  mlp_dim = 11_008
  num_heads = 32
  num_kv_heads = 32
  head_dim = 128
  vocab_size = 32_000
  global_batch_size = 16
  mesh = "fsdp=8"


class Llama3_8B(_Llama):  # noqa: N801
  """Llama 3 of 8.0 B parameters on 8 GPUs, one row of 8,192 tokens each.

  Not run at its size here; what a step takes is in `docs/plans.md`.
  """

  length = 8192
  num_layers = 32
  embed_dim = 4096
  mlp_dim = 14_336
  num_heads = 32
  num_kv_heads = 8
  head_dim = 128
  vocab_size = 128_256
  rotary_wavelength = 500_000.0
  global_batch_size = 8
  mesh = "fsdp=8"
