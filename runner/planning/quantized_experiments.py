"""A tiny quantized experiment, for tests of plans."""

import fiddle as fdl

from paxon.layers import remat
from paxon.runner import job as job_lib
from paxon.runner.settings import expected_kernels
from paxon.runner.training import testing


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

  def expected_kernels(
    self,
  ) -> tuple[fdl.Config[expected_kernels.ExpectedKernel], ...]:
    """Returns the kernel of all covered products, if one is expected."""
    if not self.expects:
      return ()
    return (
      fdl.Config(
        expected_kernels.ExpectedKernel,
        part=expected_kernels.QUANTIZED,
        kernel=self.expects,
      ),
    )

  def adjust(self, config: fdl.Config[job_lib.Job]) -> None:
    """Widens attention; nothing is saved for the backward pass."""
    stack = config.task.model.stack
    stack.remat_policy = remat.save_nothing
    attention = stack.blocks[0].attention
    attention.num_heads = attention.num_kv_heads = 4
    attention.head_dim = 16
