"""Tiny experiments that expect kernels, rightly and wrongly, for tests.

`python -m paxon.runner.planning.kernel_experiments TARGET PACKED FILE`
writes what the compiler for a target makes of cuDNN attention and its gradient.
"""

import pathlib
import sys
from typing import ClassVar, Literal

import fiddle as fdl
import jax
import jax.numpy as jnp

from paxon.layers import remat
from paxon.layers.attention import (
  cudnn_attention,
  kernels,
  position_bias,
  ring,
  splash,
)
from paxon.layers.attention import mask as attention_mask
from paxon.layers.moe import dispatch, experts, mixture, routers
from paxon.runner import job as job_lib
from paxon.runner.plan import target as targets
from paxon.runner.plan import topology
from paxon.runner.settings import expected_kernels
from paxon.runner.training import testing
from paxon.sharding import layout as layouts
from paxon.sharding import mesh as meshes

LENGTH, HEADS, HEAD_DIM = 640, 4, 64


def _both_passes(
  kernel: str,
) -> tuple[fdl.Config[expected_kernels.ExpectedKernel], ...]:
  return tuple(
    fdl.Config(expected_kernels.ExpectedKernel, part=part, kernel=kernel)
    for part in (expected_kernels.FORWARD, expected_kernels.BACKWARD)
  )


class ExpectsCudnn(testing.TinyLm):
  """Expects cuDNN's attention and has it."""

  dtype = "bfloat16"
  head_dim: int = 8
  kernel: Literal["cudnn", "plain", "fused"] = "cudnn"
  packed: bool = False
  saves_residuals: bool = False

  _kernels: ClassVar = {"plain": kernels.plain, "fused": kernels.fused}

  def expected_kernels(
    self,
  ) -> tuple[fdl.Config[expected_kernels.ExpectedKernel], ...]:
    """Returns both passes of attention."""
    return _both_passes(expected_kernels.CUDNN)

  def adjust(self, config: fdl.Config[job_lib.Job]) -> None:
    """Sets the kernel, the width of heads and what layers save."""
    stack = config.task.model.stack
    if self.saves_residuals:
      stack.remat_policy = remat.save_only(remat.ATTENTION_RESIDUALS)
    attention = stack.blocks[0].attention
    attention.head_dim = self.head_dim
    cudnn = fdl.Partial(cudnn_attention.cudnn, packed=self.packed)
    attention.kernel = self._kernels.get(self.kernel, cudnn)


class ExpectsCudnnOfPlain(ExpectsCudnn):
  """Expects cuDNN's attention, but its layers have another kernel."""

  kernel = "plain"
  packed = True


class HasKernel(testing.TinyLm):
  """Has one of the kernels that do not serve every layer."""

  dtype = "bfloat16"
  kernel: Literal["cudnn", "splash", "ring"] = "splash"
  position_bias: bool = False
  generates: bool = False

  _kernels: ClassVar = {
    "cudnn": cudnn_attention.cudnn,
    "splash": fdl.Config(splash.Splash),
    "ring": fdl.Config(ring.Ring),
  }

  def adjust(self, config: fdl.Config[job_lib.Job]) -> None:
    """Sets the kernel, and what is added to logits."""
    if not self.generates:
      config.generation = None
    attention = config.task.model.stack.blocks[0].attention
    attention.kernel = self._kernels[self.kernel]
    if self.position_bias:
      bias = fdl.Config(position_bias.Alibi)
      attention.logits = fdl.Config(kernels.Logits, position_bias=bias)


class ExpectsSplash(HasKernel):
  """Expects splash attention and has it."""

  def expected_kernels(
    self,
  ) -> tuple[fdl.Config[expected_kernels.ExpectedKernel], ...]:
    """Returns both passes of attention."""
    return _both_passes(expected_kernels.SPLASH)


class ExpectsRing(HasKernel):
  """Expects ring attention and has it."""

  kernel = "ring"

  def expected_kernels(
    self,
  ) -> tuple[fdl.Config[expected_kernels.ExpectedKernel], ...]:
    """Returns both passes of attention."""
    return _both_passes(expected_kernels.RING)


class HasMixture(testing.TinyLm):
  """Layers of eight experts, two for each token, none dropped.

  Attributes:
    mlp_dim: Hidden width of an expert.
    length: Length of a sequence.
    bound: Of the dispatch.
  """

  dtype = "bfloat16"
  embed_dim = 1024
  mlp_dim: int = 2816
  length: int = 1024
  bound: float | None = None

  def adjust(self, config: fdl.Config[job_lib.Job]) -> None:
    """Sets the feed-forward layer and the length."""
    config.generation = None
    config.train_input.length = self.length
    config.task.model.stack.blocks[0].feed_forward = fdl.Config(
      mixture.MixtureOfExperts,
      num_experts=8,
      router=fdl.Config(routers.TopK, k=2),
      experts=fdl.Config(experts.GatedExperts, mlp_dim=self.mlp_dim),
      dispatch=dispatch.Dropless(bound=self.bound),
    )

  def expected_kernels(
    self,
  ) -> tuple[fdl.Config[expected_kernels.ExpectedKernel], ...]:
    """Returns the grouped matmul of TPUs."""
    return (
      fdl.Config(
        expected_kernels.ExpectedKernel,
        part=expected_kernels.GROUPED,
        kernel=expected_kernels.MEGABLOX,
      ),
    )


class Expects(testing.TinyLm):
  """Expects one kernel, by default one that every platform has."""

  part: str = expected_kernels.MATMULS
  kernel: str = expected_kernels.XLA

  def expected_kernels(
    self,
  ) -> tuple[fdl.Config[expected_kernels.ExpectedKernel], ...]:
    """Returns what the knobs say."""
    return (
      fdl.Config(
        expected_kernels.ExpectedKernel, part=self.part, kernel=self.kernel
      ),
    )


def compiled(target: targets.Target, *, packed: bool) -> jax.stages.Compiled:
  """Compiles the gradient of attention for one device."""
  devices = topology.devices(target)
  mesh = meshes.make_mesh(meshes.MeshSpec.parse("fsdp=1"), devices=devices)
  layout = layouts.Layout(mesh)

  def loss(inputs: tuple[jax.Array, ...], ids: jax.Array) -> jax.Array:
    query, key, value = inputs
    mask = attention_mask.AttentionMask(
      q_positions=ids,
      kv_positions=ids,
      q_segment_ids=ids,
      kv_segment_ids=ids,
    )
    out = cudnn_attention.cudnn(query, key, value, mask, packed=packed)
    return jnp.sum(out.astype(jnp.float32))

  heads = jax.ShapeDtypeStruct(
    (2, LENGTH, HEADS, HEAD_DIM),
    jnp.bfloat16,
    sharding=layout.batch_sharding(4),
  )
  ids = jax.ShapeDtypeStruct(
    (2, LENGTH), jnp.int32, sharding=layout.batch_sharding(2)
  )
  traced = layout.jit(jax.grad(loss)).trace((heads,) * 3, ids)
  return topology.compile_for(target, traced, mesh)


def main(arguments: list[str]) -> int:
  """Compiles and writes the text."""
  target, packed, file = arguments
  found = compiled(targets.parse(target), packed=bool(int(packed)))
  pathlib.Path(file).write_text(found.as_text() or "")
  return 0


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
