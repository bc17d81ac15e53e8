"""Pax's experiments on GPUs with The Pile, LAMBADA and synthetic tokens.

Sizes, batches and meshes are those of
`paxml/contrib/gpu/scripts_gpu/configs.py`. GPT models are those of
`tasks.lm.gpt3`, LLaMA models those of `tasks.lm.llama_lm`. Pax's LLaMA models
could only be evaluated (on BoolQ, fine-tuned by LoRA); these train. To continue
from Hugging Face weights, see `params.hugging_face`; for data, see `c4`.
"""

from typing import Any

import fiddle as fdl

from paxon.layers import remat
from paxon.learners import schedules
from paxon.tasks.lm import gpt3, llama_lm, lm_data, mixture_lm


class GPT126MBase(gpt3.Gpt3):
  """124 M parameters on 64 GPUs, 4 sequences per GPU."""

  num_train_steps = 600_000
  decay_steps = 500_000
  warmup_steps = 636
  learning_rate = 6e-4
  init_stddev = 0.023
  checkpoint_every_steps = 5000
  summary_every_steps = 100
  target_log_pplx = None
  max_positions = None
  num_layers = 12
  embed_dim = 768
  head_dim = 64
  global_batch_size = 256
  mesh = "data=8,dcn.data=8"


class GPT5BBase(GPT126MBase):
  """5.0 B parameters on 256 GPUs, 8 sequences per GPU."""

  num_train_steps = 75_000
  decay_steps = 62_500
  warmup_steps = 115
  learning_rate = 1.6e-4
  init_stddev = 0.01
  embedding_dropout = 0.1
  checkpoint_every_steps = 250
  summary_every_steps = 10
  remat_policy = remat.save_projections
  num_layers = 24
  embed_dim = 4096
  head_dim = 128
  global_batch_size = 2048
  mesh = "fsdp=8,dcn.fsdp=32"


class GPT175BBase(GPT126MBase):
  """175 B parameters on 256 GPUs, 6 sequences per GPU."""

  num_train_steps = 75_000
  decay_steps = 108_600
  warmup_steps = 265
  learning_rate = 2e-5
  checkpoint_every_steps = 100
  summary_every_steps = 10
  num_layers = 96
  embed_dim = 12_288
  head_dim = 128
  global_batch_size = 1536
  mesh = "fsdp=8,dcn.fsdp=32"


class Synthetic126M(lm_data.Synthetic, GPT126MBase):
  """`GPT126MBase` for 100 steps on synthetic tokens."""

  num_train_steps = 100


class Synthetic5B(lm_data.Synthetic, GPT5BBase):
  """`GPT5BBase` for 100 steps on synthetic tokens."""

  num_train_steps = 100


class Synthetic175B(lm_data.Synthetic, GPT175BBase):
  """`GPT175BBase` for 100 steps on synthetic tokens."""

  num_train_steps = 100


class Pile126M(lm_data.Text, GPT126MBase):
  """`GPT126MBase` on The Pile."""


class Pile5B(lm_data.Text, GPT5BBase):
  """`GPT5BBase` on The Pile."""


class Pile175B(lm_data.Text, GPT175BBase):
  """`GPT175BBase` on The Pile."""


class Lambada126M(Pile126M):
  """`Pile126M`; set `validation_files` to LAMBADA."""


class BaseLLaMA(lm_data.Text, llama_lm.LlamaLm):
  """8.7 B parameters on one device, base class of the LLaMA experiments."""

  num_train_steps = 300_000
  checkpoint_every_steps = 5000
  eval_every_steps = 100
  summary_every_steps = 100
  learning_rate = 1e-3
  warmup_steps = 4000
  weight_decay = 1e-3
  max_grad_norm = 5.0
  length = 4096
  num_layers = 32
  embed_dim = 4096
  mlp_dim = 16_384
  num_heads = 32
  num_kv_heads = 32
  head_dim = 128
  vocab_size = 32_000
  global_batch_size = 1
  mesh = "fsdp=1"

  def schedule(self) -> fdl.Config[Any]:
    """Returns an exponential schedule that ends at a tenth of the peak."""
    return fdl.Config(
      schedules.WarmupExponential,
      peak=self.learning_rate,
      warmup_steps=min(self.warmup_steps, self.num_train_steps),
      total_steps=self.num_train_steps,
      end=0.1 * self.learning_rate,
    )


class LLaMA7B(BaseLLaMA):
  """6.7 B parameters on 8 GPUs, 16 sequences per GPU."""

  mlp_dim = 11_008
  global_batch_size = 128
  mesh = "fsdp=8"


class LLaMA13B(LLaMA7B):
  """13.0 B parameters on 8 GPUs, 8 sequences per GPU."""

  num_layers = 40
  embed_dim = 5120
  mlp_dim = 13_824
  num_heads = 40
  num_kv_heads = 40
  global_batch_size = 64


class LLaMA70B(LLaMA7B):
  """69 B parameters on 16 GPUs, 4 sequences per GPU, 8 KV heads."""

  num_layers = 80
  embed_dim = 8192
  mlp_dim = 28_672
  num_heads = 64
  num_kv_heads = 8
  global_batch_size = 64
  mesh = "fsdp=8,dcn.fsdp=2"


class PileGLaM126M64E(mixture_lm.MixtureLm, Pile126M):
  """64 experts in every 2nd of 12 layers, on 64 GPUs, 4 sequences per GPU."""

  mesh = "fsdp=64"
  num_experts = 64
  num_groups = 64
  load_balance_weight = 0.01 / 6
  mixture_every = 2


class PileGLaM64B64E(PileGLaM126M64E):
  """64 experts in every 2nd of 64 layers, on 512 GPUs, 4 sequences per GPU."""

  learning_rate = 2e-5
  warmup_steps = 398
  decay_steps = 162_900
  length = 1024
  num_layers = 64
  embed_dim = 8192
  head_dim = 128
  global_batch_size = 2048
  mesh = "tensor=8,dcn.fsdp=64"
  load_balance_weight = 0.01 / 32


class LambadaGLaM126M64E(PileGLaM126M64E):
  """`PileGLaM126M64E`; set `validation_files` to LAMBADA."""


class LambadaGLaM64B64E(PileGLaM64B64E):
  """`PileGLaM64B64E`; set `validation_files` to LAMBADA."""
