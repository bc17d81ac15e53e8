"""The quickstart with Mamba-2 layers, for the same machines."""

from typing import Any

import fiddle as fdl

from paxon.layers.losses import softmax_loss
from paxon.layers.models import decoder_lm
from paxon.layers.norms import rms_norm
from paxon.layers.recurrent import gated_norm, mamba2
from paxon.layers.stacks import block, stack
from paxon.tasks.lm import python_stdlib_text


class PythonStdlibMamba2(python_stdlib_text.PythonStdlibText):
  r"""The quickstart without attention, with about as many parameters.

  bazel run //runner:main -- \
    --exp=tasks.lm.params.quickstart_mamba2.PythonStdlibMamba2

  Attributes:
    num_heads: Number of heads; together twice as wide as a token.
    head_dim: Width of a head.
    state_dim: Width of keys and queries.
    chunk_length: Tokens of a chunk of the recurrence; changes speed only.
  """

  num_layers = 7
  # A loop takes 1.5 times as long on CPUs: it runs each recurrence again for
  # the backward pass.
  scan_layers = False

  num_heads: int = 8
  head_dim: int = 32
  state_dim: int = 32
  chunk_length: int = 64

  def model(self) -> fdl.Config[Any]:
    """Returns the model."""
    mixer = fdl.Config(
      mamba2.Mamba2,
      num_heads=self.num_heads,
      head_dim=self.head_dim,
      state_dim=self.state_dim,
      chunk_length=self.chunk_length,
      norm=fdl.Config(gated_norm.GatedRmsNorm),
    )
    layer = fdl.Config(
      block.MixerBlock, norm=fdl.Config(rms_norm.RmsNorm), mixer=mixer
    )
    return fdl.Config(
      decoder_lm.DecoderLm,
      embedding=self.embedding(),
      stack=fdl.Config(
        stack.Stack,
        blocks=[layer],
        num_layers=self.num_layers,
        scan=self.scan_layers,
      ),
      final_norm=fdl.Config(rms_norm.RmsNorm),
      token_loss=fdl.Config(softmax_loss.SoftmaxLoss),
    )

  def shrink(self) -> "PythonStdlibMamba2":
    """Returns a toy-sized version."""
    return (
      super()
      .shrink()
      .replace(num_heads=2, head_dim=8, state_dim=8, chunk_length=16)
    )
