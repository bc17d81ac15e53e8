"""Pax's dense language models trained on C4.

Sizes, batches and meshes are those of `paxml/tasks/lm/params/c4.py`. Models and
differences from Pax are described in `tasks.lm.transformer_lm_spmd`.

Text comes from files of JSON lines, compressed or not:

  bazel run //runner:main -- --exp=tasks.lm.params.c4.C4Spmd1BAdam4Replicas \
      --fdl.train_files='c4/en/c4-train.0000?-of-01024.json.gz' \
      --fdl.validation_files='c4/en/c4-validation.*.json.gz'

Tokens are bytes. To read Pax's SeqIO mixture with its vocabulary, set
`--fdl.c4_folder` and `--fdl.vocabulary_file`; see `tasks.lm.seqio_datasets`.
`docs/experiments.md` lists memory and FLOPs, `docs/plans.md` has plans. None
was run at full size.
"""

from flax import linen as nn

from paxon.layers import remat
from paxon.tasks.lm import (
  gpt3,
  lm_data,
  seqio_datasets,
  transformer_lm_spmd,
)


class LmCloudSpmdAdam(lm_data.Synthetic, transformer_lm_spmd.TransformerLmSpmd):
  """0.2 B float32 parameters on 8 chips, 16 synthetic sequences per chip."""

  learning_rate = 1e-3
  dtype = "float32"
  activation = nn.gelu
  num_layers = 2
  embed_dim = 2048
  global_batch_size = 128
  mesh = "fsdp=4,tensor=2"


class LmCloudSpmdAdamLimitSteps(LmCloudSpmdAdam):
  """`LmCloudSpmdAdam` for 4,000 steps."""

  num_train_steps = 4000


class C4SpmdAdam(seqio_datasets.C4, transformer_lm_spmd.TransformerLmSpmd):
  """1.3 B float32 parameters on 8 chips, one sequence per chip."""

  learning_rate = 1e-3
  dtype = "float32"
  activation = nn.gelu
  num_layers = 24
  embed_dim = 2048
  head_dim = 64
  vocab_size = 32_128
  remat_policy = transformer_lm_spmd.SAVE_ATTENTION
  checkpoint_every_steps = 1000
  global_batch_size = 8
  mesh = "fsdp=4,tensor=2"


class C4Spmd1BAdam4Replicas(C4SpmdAdam):
  """1.1 B parameters on 4 TPU v4 chips, 32 sequences per chip."""

  dtype = "bfloat16"
  remat_policy = remat.save_nothing
  summary_every_steps = 10
  num_layers = 13
  embed_dim = 2560
  head_dim = 128
  vocab_size = 32_000
  global_batch_size = 128
  mesh = "fsdp=4"


class C4Spmd1BAdam4ReplicasLimitSteps(C4Spmd1BAdam4Replicas):
  """`C4Spmd1BAdam4Replicas` for 15,000 steps."""

  num_train_steps = 15_000


class C4Spmd2BAdam4Replicas(C4Spmd1BAdam4Replicas):
  """2.1 B parameters on 4 TPU v4 chips, 32 sequences per chip."""

  num_layers = 18
  embed_dim = 3072


class C4Spmd16BAdam32Replicas(C4Spmd1BAdam4Replicas):
  """16.5 B parameters on 32 TPU v4 chips, 16 sequences per chip."""

  num_layers = 36
  embed_dim = 6144
  global_batch_size = 512
  mesh = "fsdp=16,tensor=2"


class C4Spmd32BAdam64Replicas(C4Spmd1BAdam4Replicas):
  """32.5 B parameters on 64 TPU v4 chips, 8 sequences per chip."""

  num_layers = 40
  embed_dim = 8192
  global_batch_size = 512
  mesh = "fsdp=16,tensor=4"


class C4SpmdGpt3AdamOrgHP(seqio_datasets.C4, gpt3.Gpt3):
  """GPT-3 of 175 B float32 parameters, base class of the GPT-3 experiments.

  As in Pax, it does not fit on its 8 chips.
  """

  dtype = "float32"
  global_batch_size = 8
  mesh = "fsdp=4,tensor=2"


class C4SpmdGpt3AdamOrgHPBS1p5k1536Replicas(C4SpmdGpt3AdamOrgHP):
  """GPT-3 of 175 B float32 parameters on 1,536 chips, one sequence per chip.

  The vocabulary is padded from 51,200 to 51,456, which 24 chips divide.
  """

  vocab_size = 51_456
  eval_every_steps = 25
  summary_every_steps = 1
  global_batch_size = 1536
  mesh = "fsdp=64,tensor=24"


class C4SpmdGpt3L16AdamOrgHP(C4SpmdGpt3AdamOrgHP):
  """16 layers of GPT-3, 29.6 B, on 64 chips, 3 sequences per chip."""

  dtype = "bfloat16"
  num_layers = 16
  eval_every_steps = 25_000
  global_batch_size = 192
  mesh = "fsdp=16,tensor=4"


class C4SpmdPipelineAdam(C4SpmdAdam):
  """`C4SpmdAdam` in two stages, each on 4 chips."""

  mesh = "stage=2,fsdp=2,tensor=2"
  num_stages = 2
  pipeline_microbatch_size = 2


class C4SpmdPipelineGpt3AdamOrgHP(C4SpmdGpt3AdamOrgHP):
  """`C4SpmdGpt3AdamOrgHP` in two stages; does not fit on its 8 chips."""

  mesh = "stage=2,fsdp=2,tensor=2"
  num_stages = 2
  pipeline_microbatch_size = 2


class C4SpmdPipelineGpt3AdamOrgHPBS1p5k768Replicas(C4SpmdPipelineGpt3AdamOrgHP):
  """GPT-3 in float32 on 768 chips: 8 stages of 96 chips, 2 sequences per chip.

  Microbatches have 8 sequences, as Pax intended: its `MICROBATCH_SIAZE` was a
  typing error, so Pax trained with 2. The vocabulary is padded from 51,200 to
  51,456, which 12 chips divide.
  """

  vocab_size = 51_456
  checkpoint_every_steps = 50
  eval_every_steps = 25
  summary_every_steps = 1
  global_batch_size = 1536
  mesh = "stage=8,fsdp=8,tensor=12"
  num_stages = 8
  pipeline_microbatch_size = 8


class C4SpmdPipelineGpt3AdamMLPerfHP(seqio_datasets.C4, gpt3.MlPerfGpt3):
  """GPT-3 with MLPerf's hyper-parameters, base class of MLPerf experiments.

  As in Pax, it does not fit on its 8 chips.
  """

  dtype = "float32"
  global_batch_size = 8
  mesh = "stage=2,fsdp=2,tensor=2"
  num_stages = 2
  pipeline_microbatch_size = 2


class C4SpmdPipelineGpt3AdamMLPerfHPBS1p5k768Replicas(
  C4SpmdPipelineGpt3AdamMLPerfHP
):
  """MLPerf's GPT-3 on 768 chips: 8 stages of 96, 2 sequences per chip.

  The vocabulary is padded from 51,200 to 51,456, which 12 chips divide.
  """

  vocab_size = 51_456
  checkpoint_every_steps = 32
  eval_every_steps = 16
  global_batch_size = 1536
  mesh = "stage=8,fsdp=8,tensor=12"
  num_stages = 8
  pipeline_microbatch_size = 8


class C4SpmdPipelineGpt3AdamMLPerfHPBS2k512Replicas(
  C4SpmdPipelineGpt3AdamMLPerfHP
):
  """MLPerf's GPT-3 on 512 chips: 8 stages of 64, 4 sequences per chip."""

  checkpoint_every_steps = 24
  eval_every_steps = 12
  global_batch_size = 2048
  mesh = "stage=8,fsdp=8,tensor=8"
  num_stages = 8
  pipeline_microbatch_size = 8
  stream_io = True


class C4SpmdPipelineGpt3AdamMLPerfHPBS3k768Replicas(
  C4SpmdPipelineGpt3AdamMLPerfHP
):
  """MLPerf's GPT-3 on 768 chips: 4 stages of 192, 4 sequences per chip.

  The vocabulary is padded from 51,200 to 51,456, which 12 chips divide.
  """

  vocab_size = 51_456
  checkpoint_every_steps = 16
  eval_every_steps = 8
  global_batch_size = 3072
  mesh = "stage=4,fsdp=16,tensor=12"
  num_stages = 4
  pipeline_microbatch_size = 16
  stream_io = True


class C4SpmdPipelineGpt3AdamMLPerfHPBS4k1024Replicas(
  C4SpmdPipelineGpt3AdamMLPerfHP
):
  """MLPerf's GPT-3 on 1,024 chips: 8 stages of 128, 4 sequences per chip."""

  checkpoint_every_steps = 12
  eval_every_steps = 6
  global_batch_size = 4096
  mesh = "stage=8,fsdp=8,tensor=16"
  num_stages = 8
  pipeline_microbatch_size = 8
  stream_io = True


class C4SpmdPipelineGpt3AdamMLPerfHPBS8k1024Replicas(
  C4SpmdPipelineGpt3AdamMLPerfHP
):
  """MLPerf's GPT-3 on 1,024 chips: 4 stages of 256, 8 sequences per chip."""

  checkpoint_every_steps = 6
  eval_every_steps = 3
  global_batch_size = 8192
  mesh = "stage=4,fsdp=16,tensor=16"
  num_stages = 4
  pipeline_microbatch_size = 16
  stream_io = True


class C4SpmdPipelineGpt3SmallAdam8Replicas(C4SpmdPipelineGpt3AdamOrgHP):
  """2.9 B parameters on 8 chips: two stages of 4, 64 sequences per chip."""

  dtype = "bfloat16"
  num_layers = 24
  embed_dim = 3072
  vocab_size = 51_200
  learning_rate = 2e-4
  checkpoint_every_steps = 200
  eval_every_steps = 10
  summary_every_steps = 5
  global_batch_size = 512
  pipeline_microbatch_size = 8


class C4SpmdPipelineGpt3SmallAdam64Replicas(
  C4SpmdPipelineGpt3SmallAdam8Replicas
):
  """2.9 B parameters on 64 chips: two stages of 32, 8 sequences per chip.

  Pax's README launches it, but Pax does not define it. It is the experiment for
  8 chips with the same batch, each stage split over 32 chips instead of 4.
  """

  mesh = "stage=2,fsdp=8,tensor=4"
