"""Tiny experiments that expect kernels, rightly and wrongly, for tests.

`python -m paxon.runner.planning.kernel_experiments TARGET PACKED FILE`
writes what the compiler for a target makes of cuDNN attention and its gradient.
"""

from collections.abc import Mapping
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


_PASSES = (expected_kernels.FORWARD, expected_kernels.BACKWARD)
_Kernels = tuple[fdl.Config[expected_kernels.ExpectedKernel], ...]


def _expect(parts: Mapping[str, str]) -> _Kernels:
  return tuple(
    fdl.Config(expected_kernels.ExpectedKernel, part=part, kernel=kernel)
    for part, kernel in parts.items()
  )


class _Expecting(testing.TinyLm):
  """Expects kernels by part of the step."""

  _parts: ClassVar[Mapping[str, str]] = {}

  def expected_kernels(self) -> _Kernels:
    """Returns the kernels of the class."""
    return _expect(self._parts)


class ExpectsCudnn(_Expecting):
  """Expects cuDNN's attention and has it."""

  dtype = "bfloat16"
  head_dim: int = 8
  kernel: Literal["cudnn", "plain", "fused"] = "cudnn"
  packed: bool = False
  saves_residuals: bool = False

  _parts = dict.fromkeys(_PASSES, expected_kernels.CUDNN)
  _kernels: ClassVar = {"plain": kernels.plain, "fused": kernels.fused}

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


class HasKernel(_Expecting):
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

  _parts = dict.fromkeys(_PASSES, expected_kernels.SPLASH)


class ExpectsRing(HasKernel):
  """Expects ring attention and has it."""

  kernel = "ring"

  _parts = dict.fromkeys(_PASSES, expected_kernels.RING)


class HasMixture(_Expecting):
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

  _parts: ClassVar = {expected_kernels.GROUPED: expected_kernels.MEGABLOX}

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


class Expects(testing.TinyLm):
  """Expects one kernel, by default one that every platform has."""

  part: str = expected_kernels.MATMULS
  kernel: str = expected_kernels.XLA

  def expected_kernels(self) -> _Kernels:
    """Returns the kernels of the knobs."""
    return _expect({self.part: self.kernel})


class QuantizedLm(testing.TinyLm):
  """A scanned stack of two layers that saves nothing, over `fsdp`.

  All kernels of the stack are quantized; attention's products, the head and the
  embedding are not.
  """

  dtype = "bfloat16"
  mesh = "fsdp=-1"
  embed_dim = 64
  max_new_tokens = 0
  quantization = "fp8"

  expects: str = ""

  def expected_kernels(self) -> _Kernels:
    """Returns the kernel of all covered products, if one is expected."""
    return _expect(
      {expected_kernels.QUANTIZED: self.expects} if self.expects else {}
    )

  def adjust(self, config: fdl.Config[job_lib.Job]) -> None:
    """Widens attention; nothing is saved for the backward pass."""
    stack = config.task.model.stack
    stack.remat_policy = remat.save_nothing
    attention = stack.blocks[0].attention
    attention.num_heads = attention.num_kv_heads = 4
    attention.head_dim = 16


def compile_gradient(
  target: targets.Target, *, packed: bool
) -> jax.stages.Compiled:
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
  found = compile_gradient(targets.parse(target), packed=bool(int(packed)))
  pathlib.Path(file).write_text(found.as_text() or "")
  return 0


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
