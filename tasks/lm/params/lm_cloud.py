"""Pax's scaling experiments: dense models from 2 B to 1 T on synthetic tokens.

They measure speed and memory; nothing is learnt but the number one. Sizes,
batches and meshes are those of `paxml/tasks/lm/params/lm_cloud.py`; see
`tasks.lm.transformer_lm_spmd` for what the models are and what differs.

On other hardware give another mesh and batch:

  bazel run --config=plan //runner:main -- --mode=plan --target=h200:4x8 \
      --exp=tasks.lm.params.lm_cloud.LmCloudSpmd2B \
      --fdl.mesh=fsdp=8,dcn.data=4 --fdl.global_batch_size=256

What each takes is in `docs/plans.md`, from plans; none was run at its size.
"""

from flax import linen as nn

from paxon.tasks.lm import datasets, transformer_lm_spmd


class _LmCloudSpmd(datasets.Synthetic, transformer_lm_spmd.TransformerLmSpmd):
  """The base of this module: GELU, and a smaller learning rate."""

  learning_rate = 2.5e-4
  activation = nn.gelu


class LmCloudSpmdTest(_LmCloudSpmd):
  """Two small layers, for one device of any kind."""

  num_layers = 2
  embed_dim = 64
  head_dim = 8
  global_batch_size = 4


class LmCloudSpmd2B(_LmCloudSpmd):
  """2.1 B parameters on 4 chips of TPU v4, 8 rows each."""

  num_layers = 18
  embed_dim = 3072
  global_batch_size = 32
  mesh = "fsdp=4"


class LmCloudSpmd2BLimitSteps(LmCloudSpmd2B):
  """`LmCloudSpmd2B` for 300 steps."""

  num_train_steps = 300


class LmCloudSpmd32B(_LmCloudSpmd):
  """32 B parameters on 64 chips of TPU v4, 8 rows each."""

  num_layers = 40
  embed_dim = 8192
  global_batch_size = 512
  mesh = "fsdp=16,tensor=4"
  remat_policy = transformer_lm_spmd.SAVE_CONTEXT_AND_OUTPUT


class LmCloudSpmd64B(_LmCloudSpmd):
  """65 B parameters on 128 chips of TPU v4, 4 rows each."""

  num_layers = 51
  embed_dim = 10_240
  global_batch_size = 512
  mesh = "fsdp=16,tensor=8"
  remat_policy = transformer_lm_spmd.SAVE_CONTEXT_AND_OUTPUT


class LmCloudSpmd128B(_LmCloudSpmd):
  """129 B parameters on 256 chips of TPU v4, 4 rows each."""

  num_layers = 71
  embed_dim = 12_288
  global_batch_size = 1024
  mesh = "fsdp=64,tensor=4"


class LmCloudSpmd256B(_LmCloudSpmd):
  """258 B parameters on 512 chips of TPU v4, 4 rows each."""

  num_layers = 80
  embed_dim = 16_384
  global_batch_size = 2048
  mesh = "fsdp=64,tensor=8"


class LmCloudSpmd512B(_LmCloudSpmd):
  """514 B parameters on 1,024 chips of TPU v4, 4 rows each."""

  num_layers = 102
  embed_dim = 20_480
  global_batch_size = 4096
  mesh = "fsdp=64,tensor=16"


class LmCloudSpmd1024B(_LmCloudSpmd):
  """1,030 B parameters on 2,048 chips of TPU v4, 2 rows each."""

  num_layers = 142
  embed_dim = 24_576
  global_batch_size = 4096
  mesh = "fsdp=256,tensor=8"


class LmCloudSpmdMultislice2B(LmCloudSpmd2B):
  """`LmCloudSpmd2B` on two slices of 4 chips, 16 rows a chip."""

  global_batch_size = 128
  mesh = "fsdp=4,dcn.data=2"
