"""Pax's scaling experiments: dense models from 2 B to 1 T on synthetic tokens.

They measure speed and memory. Sizes, batches and meshes are those of
`paxml/tasks/lm/params/lm_cloud.py`. Models and differences from Pax are
described in `tasks.lm.transformer_lm_spmd`, pipelines in `tasks.lm.pipelining`.

For other hardware, set the mesh and the batch size:

  bazel run --config=plan //runner:main -- --mode=plan --target=h200:4x8 \
      --exp=tasks.lm.params.lm_cloud.LmCloudSpmd2B \
      --fdl.mesh=fsdp=8,dcn.data=4 --fdl.global_batch_size=256

`docs/plans.md` has plans. None was run at full size.
"""

from flax import linen as nn

from paxon.tasks.lm import lm_data, mlp_lm, transformer_lm_spmd


class LargeMlp(lm_data.Synthetic, mlp_lm.MlpLm):
  """384 M parameters, 8 MLP layers of width 7,168, replicated on 8 chips."""

  embed_dim = 4096
  mlp_dim = 7168
  global_batch_size = 128
  mesh = "data=8"


class SmallMlp(LargeMlp):
  """9 M parameters, 8 MLP layers of width 1,024, replicated on 8 chips."""

  embed_dim = 1024
  mlp_dim = 1024


class LmCloudTransformerAdam(
  lm_data.Synthetic, transformer_lm_spmd.TransformerLmSpmd
):
  """0.4 B float32 parameters replicated on each device (Pax's pmap).

  Pax has 16 sequences per device: for 8 devices, set
  `--fdl.global_batch_size=128`.
  """

  learning_rate = 1e-3
  dtype = "float32"
  rules = "replicated"
  remat_policy = None
  num_layers = 32
  embed_dim = 1024
  head_dim = 64
  global_batch_size = 16
  mesh = "data=-1"


class LmCloudTransformerAdamTest(LmCloudTransformerAdam):
  """`LmCloudTransformerAdam` with two layers."""

  num_layers = 2


class LmCloudTransformerAdamLimitSteps(LmCloudTransformerAdam):
  """`LmCloudTransformerAdam` with 10 layers, for 2,000 steps."""

  num_layers = 10
  num_train_steps = 2000


class LmCloudSpmd(lm_data.Synthetic, transformer_lm_spmd.TransformerLmSpmd):
  """0.6 B parameters on one chip, 16 sequences; base class."""

  learning_rate = 2.5e-4
  activation = nn.gelu
  num_layers = 10
  embed_dim = 2048
  global_batch_size = 16
  mesh = "fsdp=1"


class LmCloudSpmdTest(LmCloudSpmd):
  """Two small layers on one device, 4 sequences."""

  num_layers = 2
  embed_dim = 64
  head_dim = 8
  global_batch_size = 4


class LmCloudSpmd2B(LmCloudSpmd):
  """2.1 B parameters on 4 TPU v4 chips, 8 sequences per chip."""

  num_layers = 18
  embed_dim = 3072
  global_batch_size = 32
  mesh = "fsdp=4"


class LmCloudSpmd2BLimitSteps(LmCloudSpmd2B):
  """`LmCloudSpmd2B` for 300 steps."""

  num_train_steps = 300


class LmCloudSpmd32B(LmCloudSpmd):
  """32 B parameters on 64 TPU v4 chips, 8 sequences per chip."""

  num_layers = 40
  embed_dim = 8192
  global_batch_size = 512
  mesh = "fsdp=16,tensor=4"
  remat_policy = transformer_lm_spmd.SAVE_CONTEXT_AND_OUTPUT


class LmCloudSpmd64B(LmCloudSpmd):
  """65 B parameters on 128 TPU v4 chips, 4 sequences per chip."""

  num_layers = 51
  embed_dim = 10_240
  global_batch_size = 512
  mesh = "fsdp=16,tensor=8"
  remat_policy = transformer_lm_spmd.SAVE_CONTEXT_AND_OUTPUT


class LmCloudSpmd128B(LmCloudSpmd):
  """129 B parameters on 256 TPU v4 chips, 4 sequences per chip."""

  num_layers = 71
  embed_dim = 12_288
  global_batch_size = 1024
  mesh = "fsdp=64,tensor=4"


class LmCloudSpmd256B(LmCloudSpmd):
  """258 B parameters on 512 TPU v4 chips, 4 sequences per chip."""

  num_layers = 80
  embed_dim = 16_384
  global_batch_size = 2048
  mesh = "fsdp=64,tensor=8"


class LmCloudSpmd512B(LmCloudSpmd):
  """514 B parameters on 1,024 TPU v4 chips, 4 sequences per chip."""

  num_layers = 102
  embed_dim = 20_480
  global_batch_size = 4096
  mesh = "fsdp=64,tensor=16"


class LmCloudSpmd1024B(LmCloudSpmd):
  """1,030 B parameters on 2,048 TPU v4 chips, 2 sequences per chip."""

  num_layers = 142
  embed_dim = 24_576
  global_batch_size = 4096
  mesh = "fsdp=256,tensor=8"


class LmCloudSpmdMultislice2B(LmCloudSpmd2B):
  """`LmCloudSpmd2B` on two slices of 4 chips, 16 sequences per chip."""

  global_batch_size = 128
  mesh = "fsdp=4,dcn.data=2"


class LmCloudSpmdPipeline9B(LmCloudSpmd):
  """9.8 B float32 parameters in 16 stages of 4 chips, 8 sequences per chip."""

  dtype = "float32"
  num_layers = 48
  embed_dim = 4096
  global_batch_size = 512
  mesh = "stage=16,data=4"
  num_stages = 16
  pipeline_microbatch_size = 4


class LmCloudSpmdPipeline175B(LmCloudSpmd):
  """174 B parameters in 8 stages of 16 GPUs, 96 sequences in total."""

  num_layers = 96
  embed_dim = 12_288
  length = 2048
  global_batch_size = 96
  mesh = "tensor=16,dcn.stage=8"
  num_stages = 8
  pipeline_microbatch_size = 2


class LmCloudSpmdPipelineMultislice2B(LmCloudSpmd2B):
  """`LmCloudSpmd2B` in two stages, each a slice of 4 chips."""

  global_batch_size = 128
  mesh = "data=4,dcn.stage=2"
  num_stages = 2
  pipeline_microbatch_size = 4
  stream_io = True


class LmCloudSpmdPipelineMultislice2BCircular(LmCloudSpmdPipelineMultislice2B):
  """`LmCloudSpmdPipelineMultislice2B` with 3 circular repeats."""

  pipeline_microbatch_size = 8
  circular_repeats = 3
