"""Pax's optimal-scaling models, whose width is 128 times their depth.

Sizes, batches and meshes are those of
`paxml/tasks/lm/params/optimal_scaling.py`; names are the shapes of TPU v4
slices. Tokens are synthetic; models are described in
`tasks.lm.transformer_lm_spmd`.
"""

from paxon.layers import remat
from paxon.tasks.lm.params import lm_cloud


class _OptimalScaling(lm_cloud.LmCloudSpmd):
  """Base class of this module."""

  remat_policy = remat.save_projections

  @property
  def embed_dim(self) -> int:  # pyrefly: ignore[bad-override]
    """128 times the number of layers."""
    return 128 * self.num_layers


class OptimalScaling2x2x1(_OptimalScaling):
  """4.4 B parameters on 4 chips, 16 sequences per chip."""

  num_layers = 28
  global_batch_size = 64
  mesh = "fsdp=4"


class OptimalScaling2x2x2(_OptimalScaling):
  """6.6 B parameters on 8 chips, 8 sequences per chip."""

  num_layers = 32
  global_batch_size = 64
  mesh = "fsdp=8"


class OptimalScaling2x2x4(_OptimalScaling):
  """9.3 B parameters on 16 chips, 8 sequences per chip."""

  num_layers = 36
  global_batch_size = 128
  mesh = "fsdp=16"


class OptimalScaling2x4x4(_OptimalScaling):
  """12.8 B parameters on 32 chips, 8 sequences per chip."""

  num_layers = 40
  global_batch_size = 256
  mesh = "fsdp=32"


class OptimalScaling4x4x4(_OptimalScaling):
  """18.1 B parameters on 64 chips, 8 sequences per chip."""

  num_layers = 45
  global_batch_size = 512
  mesh = "fsdp=64"


class OptimalScaling4x4x8(_OptimalScaling):
  """24.8 B parameters on 128 chips, 4 sequences per chip."""

  num_layers = 50
  global_batch_size = 512
  mesh = "fsdp=128"


class OptimalScaling4x8x8(_OptimalScaling):
  """34.8 B parameters on 256 chips, 2 sequences per chip."""

  num_layers = 56
  global_batch_size = 512
  mesh = "fsdp=64,tensor=4"


class OptimalScaling4x8x16(_OptimalScaling):
  """51.8 B parameters on 512 chips, 2 sequences per chip."""

  num_layers = 64
  global_batch_size = 1024
  mesh = "fsdp=128,tensor=4"


class OptimalScaling4x16x16(_OptimalScaling):
  """51.8 B parameters on 1,024 chips, one sequence per chip."""

  num_layers = 64
  global_batch_size = 1024
  mesh = "fsdp=256,tensor=4"


class OptimalScaling4x16x32(_OptimalScaling):
  """51.8 B parameters on 2,048 chips, one sequence per chip."""

  num_layers = 64
  global_batch_size = 2048
  mesh = "fsdp=512,tensor=4"


class OptimalScaling4x24x32(_OptimalScaling):
  """51.8 B parameters on 3,072 chips, one sequence per chip.

  Pax splits 8,192 features over 768 chips, with padding; here three replicas
  are split over 256 chips each.
  """

  num_layers = 64
  global_batch_size = 3072
  mesh = "data=3,fsdp=256,tensor=4"
