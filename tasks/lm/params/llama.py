"""Llama 2 and 3 (Touvron et al. 2023, Grattafiori et al. 2024).

Hyper-parameters are those of pre-training in the papers, except the batch.
Models are described in `tasks.lm.llama_lm`.
"""

from typing import Any

from paxon.layers.attention import cudnn_attention
from paxon.tasks.lm import llama_lm, lm_data


class _Llama(lm_data.Text, llama_lm.LlamaLm):
  """Base class of this module."""

  num_train_steps = 500_000
  checkpoint_every_steps = 1000
  eval_every_steps = 1000
  summary_every_steps = 10
  attention_kernel = cudnn_attention.cudnn
  # Logits of all positions at once would be the largest tensor.
  loss_chunk_length = 1024
  learning_rate = 3e-4
  warmup_steps = 2000
  weight_decay = 0.1

  def shrink(self) -> Any:
    """Returns a toy-sized version for a CPU, still with a chunked loss."""
    return super().shrink().replace(loss_chunk_length=12)


class Llama2_7B(_Llama):  # noqa: N801
  """Llama 2 of 6.7 B parameters on 8 GPUs, 2 sequences of 4,096 tokens per GPU.

  Not run at full size here; `docs/plans.md` has a plan.
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
  """Llama 3 of 8.0 B parameters on 8 GPUs, 1 sequence of 8,192 tokens per GPU.

  Not run at full size here; `docs/plans.md` has a plan.
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
