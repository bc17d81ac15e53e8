"""Llama models (Touvron et al. 2023, https://arxiv.org/abs/2302.13971).

Pre-norm layers with RMS norm, rotary positions, SwiGLU and no biases.
"""

from typing import Any

import fiddle as fdl

from paxon.layers import feed_forward, remat, unembedding
from paxon.layers.attention import grouped_query
from paxon.layers.norms import rms_norm
from paxon.layers.positions import rotary_embedding
from paxon.tasks.lm import decoder


class LlamaLm(decoder.Decoder):
  """Base class of `params.llama` and of the Llama models in `params.gpu`.

  Attributes:
    num_kv_heads: Number of key/value heads; must divide `num_heads`.
    rotary_wavelength: Maximum wavelength of rotary positions.
  """

  dtype = "bfloat16"
  remat_policy = remat.save_nothing

  num_kv_heads: int
  rotary_wavelength: float = 10_000.0

  def norm(self) -> fdl.Config[Any]:
    """Returns an RMS norm."""
    return fdl.Config(rms_norm.RmsNorm, epsilon=1e-5)

  def attention(self) -> fdl.Config[Any]:
    """Returns attention with rotary positions."""
    return fdl.Config(
      grouped_query.GroupedQueryAttention,
      num_heads=self.num_heads,
      num_kv_heads=self.num_kv_heads,
      head_dim=self.head_dim,
      rotary=fdl.Config(
        rotary_embedding.Rotary, max_wavelength=self.rotary_wavelength
      ),
      kernel=self.attention_kernel,
    )

  def feed_forward(self) -> fdl.Config[Any]:
    """Returns a gated feed-forward layer."""
    return fdl.Config(feed_forward.GatedFeedForward, mlp_dim=self.mlp_dim)

  def head(self) -> fdl.Config[Any] | None:
    """Returns a separate head."""
    return fdl.Config(unembedding.Unembedding, vocab_size=self.vocab_size)

  def shrink(self) -> Any:
    """Returns a toy-sized version with grouped heads if the model has them."""
    groups = self.num_heads // self.num_kv_heads
    toy = super().shrink()
    return toy.replace(num_kv_heads=max(1, toy.num_heads // groups))
