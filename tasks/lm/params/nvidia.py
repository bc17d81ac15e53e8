"""NVIDIA's experiments in Pax, on synthetic tokens.

Sizes, batches and meshes are those of `paxml/tasks/lm/params/nvidia.py`. Models
are `tasks.lm.transformer_lm_spmd` with learned positions, normal initialization
and a cosine schedule; Llama models have the layers of `tasks.lm.llama_lm`. On
GPUs, cuDNN's attention is several times faster than the default:

  --fdl.attention_kernel=layers.attention.cudnn_attention.cudnn
"""

from typing import Any

import fiddle as fdl
from flax import linen as nn

from paxon.layers import feed_forward, remat
from paxon.layers.attention import (
  grouped_query,
  kernels,
  projections,
)
from paxon.layers.norms import rms_norm
from paxon.layers.positions import position_embedding, rotary_embedding
from paxon.learners.optimizers import adamw
from paxon.tasks.lm import lm_data, mixture_lm, transformer_lm_spmd


class NVIDIA1_3B(lm_data.Synthetic, transformer_lm_spmd.TransformerLmSpmd):  # noqa: N801
  """1.3 B parameters replicated on 16 GPUs, 4 sequences per GPU."""

  activation = nn.gelu
  init_stddev = 0.023
  learning_rate = 6e-4
  warmup_steps = 0
  decay_steps = 500_000
  num_train_steps = 500_000
  max_grad_norm = 1.0
  checkpoint_every_steps = 100_000
  length = 2048
  vocab_size = 51_200
  num_layers = 24
  embed_dim = 2048
  head_dim = 64
  global_batch_size = 64
  mesh = "data=16"

  def position_embedding(self) -> fdl.Config[Any] | None:
    """Returns a learned position embedding."""
    return fdl.Config(
      position_embedding.LearnedPositions,
      max_length=self.length,
      **self.initial("embedding_init"),
    )

  def schedule(self) -> fdl.Config[Any]:
    """Returns a cosine schedule that ends at a tenth of the peak."""
    return self.cosine_schedule()

  def optimizer(self) -> fdl.Config[Any]:
    """Returns AdamW with updates clipped by their RMS."""
    return fdl.Config(
      adamw.AdamW,
      schedule=self.schedule(),
      b2=0.95,
      weight_decay=self.weight_decay,
      max_update_rms=1.0,
    )


class _WithAdafactor(NVIDIA1_3B):
  """`NVIDIA1_3B` with Adafactor, which needs less memory."""

  def optimizer(self) -> fdl.Config[Any]:
    """Returns Pax's Adafactor."""
    return self.adafactor()


class NVIDIA8_3B(NVIDIA1_3B):  # noqa: N801
  """8.3 B parameters on 16 GPUs, 4 sequences per GPU."""

  num_layers = 40
  embed_dim = 4096
  mesh = "data=4,tensor=4"


class NVIDIA10B(NVIDIA1_3B):
  """10.3 B parameters on 16 GPUs, 4 sequences in total."""

  num_layers = 32
  embed_dim = 5120
  head_dim = 128
  global_batch_size = 4
  mesh = "data=2,tensor=8"


class NVIDIA5B(NVIDIA1_3B):
  """5.0 B parameters on 16 GPUs: 4 stages of 4, one sequence per GPU."""

  embed_dim = 4096
  head_dim = 128
  global_batch_size = 16
  mesh = "stage=4,data=2,tensor=2"
  num_stages = 4
  pipeline_microbatch_size = 2


class NVIDIA40BProxy(NVIDIA5B):
  """12 layers of a 40 B on 16 GPUs: 2 stages of 8, 16 sequences per GPU."""

  num_layers = 12
  embed_dim = 8192
  global_batch_size = 256
  mesh = "stage=2,data=2,tensor=4"
  num_stages = 2
  pipeline_microbatch_size = 4


class NVIDIA70BProxy(NVIDIA40BProxy):
  """20 layers of a 70 B on 16 GPUs: 2 stages of 8, 8 sequences per GPU."""

  num_layers = 20
  global_batch_size = 128


class NVIDIA116BProxy(NVIDIA5B):
  """16 layers of a 116 B on 16 GPUs: 4 stages of 4, 6 sequences per GPU."""

  num_layers = 16
  embed_dim = 12_288
  global_batch_size = 96
  mesh = "stage=4,tensor=4"


class NVIDIA175BProxy(NVIDIA116BProxy):
  """24 layers of a 175 B on 16 GPUs: 4 stages of 4, 6 sequences per GPU."""

  num_layers = 24
  pipeline_microbatch_size = 1


class NVIDIA175B(_WithAdafactor, NVIDIA175BProxy):
  """175 B parameters: 6 stages of 16 GPUs, 6 sequences in total."""

  num_layers = 96
  global_batch_size = 6
  mesh = "tensor=16,dcn.stage=6"
  num_stages = 6


class TestSmallConfig(NVIDIA40BProxy):
  """3.4 B parameters on 16 GPUs: 2 stages of 8, 2 sequences per GPU."""

  num_layers = 16
  embed_dim = 4096
  global_batch_size = 32
  pipeline_microbatch_size = 2


class NVIDIA175B_FSDP(_WithAdafactor):  # noqa: N801
  """175 B parameters on 128 GPUs, one sequence per GPU."""

  num_layers = 96
  embed_dim = 12_288
  head_dim = 128
  global_batch_size = 128
  mesh = "fsdp=16,dcn.fsdp=8"


class Llama33BProxy(_WithAdafactor):
  """25 B parameters with Llama 33 B's widths on 16 GPUs, 1 sequence per GPU.

  As in Pax, layers are those of `NVIDIA1_3B`, without gates, so there are fewer
  parameters than in Llama 33 B.
  """

  num_layers = 60
  embed_dim = 6656
  mlp_dim = 17_920
  head_dim = 128
  vocab_size = 32_000
  global_batch_size = 16
  mesh = "fsdp=16"


class Llama2_7B(NVIDIA1_3B):  # noqa: N801
  """Llama 2 layers, 6.7 B parameters, on 16 GPUs, one sequence per GPU.

  The head is tied to the embedding of 51,200 tokens, as in Pax;
  `params.llama.Llama2_7B` is the model of the paper.

  Attributes:
    num_kv_heads: Number of key/value heads; must divide `num_heads`.
  """

  num_train_steps = 100
  attention_logit_cap = None
  length = 4096
  num_layers = 32
  embed_dim = 4096
  mlp_dim = 11_008
  head_dim = 128
  global_batch_size = 16
  mesh = "fsdp=16"

  num_kv_heads: int = 32

  def norm(self) -> fdl.Config[Any]:
    """Returns an RMS norm."""
    return fdl.Config(rms_norm.RmsNorm)

  def position_embedding(self) -> fdl.Config[Any] | None:
    """Returns None: attention has rotary positions."""
    return None

  def attention(self) -> fdl.Config[Any]:
    """Returns attention with rotary positions."""
    return fdl.Config(
      grouped_query.GroupedQueryAttention,
      num_heads=self.num_heads,
      num_kv_heads=self.num_kv_heads,
      head_dim=self.head_dim,
      rotary=fdl.Config(rotary_embedding.Rotary),
      kernel=self.attention_kernel,
      logits=fdl.Config(kernels.Logits, cap=self.attention_logit_cap),
      projections=fdl.Config(
        projections.SeparateProjections,
        **self.initial("kernel_init", "output_init"),
      ),
    )

  def feed_forward(self) -> fdl.Config[Any]:
    """Returns a gated feed-forward layer."""
    return fdl.Config(
      feed_forward.GatedFeedForward,
      mlp_dim=self.mlp_dim,
      activation=self.activation,
      **self.initial("kernel_init"),
    )

  activation = nn.silu

  def shrink(self) -> Any:
    """Returns a toy-sized version with grouped heads if the model has them."""
    groups = self.num_heads // self.num_kv_heads
    toy = super().shrink()
    return toy.replace(num_kv_heads=max(1, toy.num_heads // groups))


class Llama2_13B(Llama2_7B):  # noqa: N801
  """Llama 2 layers, 12.9 B parameters, on 16 GPUs, one sequence per GPU."""

  num_layers = 40
  embed_dim = 5120
  mlp_dim = 13_824
  num_kv_heads = 40


class Llama2_70B(Llama2_7B):  # noqa: N801
  """Llama 2 layers, 68.9 B parameters, on 64 GPUs, one sequence per GPU."""

  num_layers = 80
  embed_dim = 8192
  mlp_dim = 28_672
  num_kv_heads = 8
  global_batch_size = 64
  mesh = "fsdp=16,dcn.fsdp=4"


class NVIDIA_CIRCULAR_REPEAT(  # noqa: N801
  lm_data.Synthetic, transformer_lm_spmd.TransformerLmSpmd
):
  """6.6 B float32 parameters on 8 GPUs: 8 stages, 4 circular repeats."""

  dtype = "float32"
  activation = nn.gelu
  remat_policy = remat.save_matmuls
  learning_rate = 1.6e-4
  num_layers = 32
  embed_dim = 4096
  global_batch_size = 8
  mesh = "stage=8"
  num_stages = 8
  num_pipeline_microbatches = 8
  circular_repeats = 4


class MoELarge(mixture_lm.MixtureLm, NVIDIA1_3B):
  """26.8 B parameters, 16 experts in each of 12 layers, on 32 GPUs."""

  num_layers = 12
  embed_dim = 4096
  head_dim = 128
  global_batch_size = 128
  mesh = "fsdp=16,dcn.fsdp=2"
  num_experts = 16
  num_groups = 16
  load_balance_weight = 1.0
  gated_experts = False


class GLaM64B64EProxy(MoELarge):
  """212 B parameters, 64 experts in 4 of 8 layers, on 128 GPUs."""

  num_layers = 8
  embed_dim = 8192
  global_batch_size = 512
  mesh = "fsdp=128"
  num_experts = 64
  num_groups = 128
  load_balance_weight = 0.01
  gated_experts = True
  mixture_every = 2
  output_z_loss = 1e-4


class GLaM64B64EProxy_EP(GLaM64B64EProxy):  # noqa: N801
  """`GLaM64B64EProxy` with 8 experts, split over 8 GPUs."""

  mesh = "fsdp=16,expert=8"
  num_experts = 8


class Grok(MoELarge):
  """Grok 1: 8 experts in each of 64 layers, on 256 GPUs, 1 sequence per GPU.

  Attributes:
    num_kv_heads: Number of key/value heads; must divide `num_heads`.
  """

  num_train_steps = 10
  remat_policy = remat.save_only(
    *remat.ATTENTION_INPUTS, remat.ATTENTION_OUTPUT
  )
  length = 8192
  num_layers = 64
  embed_dim = 6144
  mlp_dim = 32_768
  vocab_size = 131_072
  global_batch_size = 256
  mesh = "expert=8,dcn.fsdp=32"
  num_experts = 8
  num_groups = 256
  load_balance_weight = 0.01
  gated_experts = True
  output_z_loss = 1e-4

  num_kv_heads: int = 8

  def attention(self) -> fdl.Config[Any]:
    """Returns attention with fewer key/value heads."""
    attention = super().attention()
    attention.num_kv_heads = self.num_kv_heads
    attention.projections = fdl.Config(
      projections.SeparateProjections,
      **self.initial("kernel_init", "output_init"),
    )
    return attention

  def shrink(self) -> Any:
    """Returns a toy-sized version for up to 8 devices."""
    return super().shrink().replace(num_kv_heads=2)


class Grok_Proxy(Grok):  # noqa: N801
  """16 layers of Grok on 64 GPUs, one sequence per GPU."""

  num_layers = 16
  global_batch_size = 64
  mesh = "expert=8,dcn.fsdp=8"
  num_groups = 64


class Grok_Proxy_PP(Grok_Proxy):  # noqa: N801
  """16 layers of Grok on 512 GPUs: 8 stages of 64, one sequence per GPU."""

  global_batch_size = 512
  mesh = "expert=8,dcn.stage=8,dcn.fsdp=8"
  num_stages = 8
  num_pipeline_microbatches = 32
  # Of a microbatch.
  num_groups = 8


class Grok_PP(Grok_Proxy_PP):  # noqa: N801
  """Grok 1 on 512 GPUs: 8 stages of 64, one sequence per GPU."""

  num_layers = 64
