"""The quickstart: a byte-level language model of Python's standard library.

It needs no download: it reads the source code of the interpreter's standard
library.
"""

import functools
from typing import Any

import fiddle as fdl

from paxon.layers import feed_forward
from paxon.layers.attention import grouped_query
from paxon.layers.losses import softmax_loss
from paxon.layers.models import pre_norm_decoder
from paxon.layers.norms import rms_norm
from paxon.layers.positions import rotary_embedding
from paxon.tasks.lm import python_stdlib_text


class PythonStdlibLm(python_stdlib_text.PythonStdlibText):
  """0.8 M parameters on 11 MB of Python source code, for any machine.

  bazel run //runner:main -- --exp=tasks.lm.params.quickstart.PythonStdlibLm

  Measured 2026-11-27 on two CPU cores with Python 3.11.2: three minutes,
  including installation; 1.61 bits per byte on held-out files, where `xz -9e`
  reaches 1.56 and a byte trigram model 2.44.

  Attributes:
    mlp_dim: Width of the feed-forward layers.
    num_heads: Number of query heads.
    num_kv_heads: Number of key and value heads; divides `num_heads`.
    head_dim: Width of a head.
  """

  num_layers = 4

  mlp_dim: int = 384
  num_heads: int = 4
  num_kv_heads: int = 1
  head_dim: int = 32

  def feed_forward(self) -> fdl.Config[Any]:
    """Returns the feed-forward submodule of a layer."""
    return fdl.Config(feed_forward.GatedFeedForward, mlp_dim=self.mlp_dim)

  def model(self) -> fdl.Config[Any]:
    """Returns the model."""
    attention = fdl.Config(
      grouped_query.GroupedQueryAttention,
      num_heads=self.num_heads,
      num_kv_heads=self.num_kv_heads,
      head_dim=self.head_dim,
      rotary=fdl.Config(rotary_embedding.Rotary),
    )
    return pre_norm_decoder.compose(
      fdl.Config,
      embedding=self.embedding(),
      norm=functools.partial(fdl.Config, rms_norm.RmsNorm),
      attention=attention,
      feed_forward=self.feed_forward(),
      num_layers=self.num_layers,
      scan=self.scan_layers,
      token_loss=fdl.Config(softmax_loss.SoftmaxLoss),
    )

  def shrink(self) -> "PythonStdlibLm":
    """Returns a toy-sized version."""
    return super().shrink().replace(mlp_dim=32, num_heads=2, head_dim=8)
