"""Pax's masked language models, up to 200 B parameters.

Sizes, batches and meshes are those of `paxml/tasks/lm/params/bert.py`. Models
are described in `tasks.lm.masked_lm`, data in `c4`; Pax reads MLPerf's files of
masked word pieces.
"""

from paxon.tasks.lm import lm_data, masked_lm, transformer_lm_spmd


class BertAdamL4H128(lm_data.Text, masked_lm.MaskedTransformerLm):
  """5 M parameters replicated on each device (Pax's pmap), 8 sequences."""

  learning_rate = 1e-3
  dtype = "bfloat16"
  rules = "replicated"
  num_layers = 4
  embed_dim = 128
  head_dim = 16
  global_batch_size = 8
  mesh = "data=-1"


class BertSpmdL4H128(lm_data.Text, masked_lm.AdafactorMaskedLm):
  """5 M parameters on 8 chips, 4 sequences per chip."""

  dtype = "bfloat16"
  num_layers = 4
  embed_dim = 128
  head_dim = 16
  global_batch_size = 32
  mesh = "fsdp=4,tensor=2"


class BertSpmdL33H12kBiggerBatch(lm_data.Text, masked_lm.AdafactorMaskedLm):
  """100 B parameters on 512 chips, 4 sequences per chip."""

  dtype = "bfloat16"
  weight_decay = 1e-2
  label_smoothing = 0.1
  checkpoint_every_steps = 1000
  num_layers = 33
  embed_dim = 12_288
  mlp_dim = 98_304
  head_dim = 96
  global_batch_size = 2048
  mesh = "fsdp=64,tensor=8"


class BertSpmdL33H12kBiggerBatch8x8x16(BertSpmdL33H12kBiggerBatch):
  """100 B parameters on 1,024 chips, 4 sequences per chip."""

  checkpoint_every_steps = 500
  global_batch_size = 4096
  mesh = "fsdp=64,tensor=16"


class BertSpmdL66H12kBiggerBatch8x8x16(BertSpmdL33H12kBiggerBatch8x8x16):
  """200 B parameters on 1,024 chips, 4 sequences per chip."""

  remat_policy = transformer_lm_spmd.SAVE_ATTENTION
  checkpoint_every_steps = 200
  num_layers = 66


class BertSpmdL66H12kBiggerBatch8x8x8(BertSpmdL66H12kBiggerBatch8x8x16):
  """200 B parameters on 512 chips, one sequence per chip."""

  global_batch_size = 512
  mesh = "fsdp=64,tensor=8"
