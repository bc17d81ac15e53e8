"""Attention sinks: a learned per-head logit that absorbs attention.

Submodules of an attention layer, `(number of heads) -> [N]`. The softmax of
head `n` gets one more term `exp(sinks[n])` in its denominator, so that its
weights sum to less than one.
"""

import math

from flax import linen as nn
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from paxon.sharding import axes, logical


class LearnedSinks(nn.Module):
  """A learned logit per head, as in gpt-oss.

  OpenAI 2025, https://arxiv.org/abs/2508.10925.

  Attributes:
    sinks_init: Initializer of the logits [N].
    param_dtype: Dtype in which they are stored.
  """

  sinks_init: nn.initializers.Initializer = nn.initializers.zeros
  param_dtype: DTypeLike = jnp.float32

  @nn.compact
  def __call__(self, num_heads: int) -> Float[Array, " heads"]:
    """Returns the logit of each head."""
    init = logical.partitioned(self.sinks_init, (axes.HEADS,))
    return self.param("sinks", init, (num_heads,), self.param_dtype)


class ConstantSinks(nn.Module):
  """The same logit for all heads, nothing to learn.

  With 0 the denominator is one more than the sum: "softmax plus one". Pax calls
  it `attention_extra_logit`.

  Attributes:
    logit: The logit; far below the logits of keys it has no effect.
  """

  logit: float = 0.0

  def __post_init__(self) -> None:
    super().__post_init__()
    if not math.isfinite(self.logit):
      raise ValueError(
        f"ConstantSinks.logit must be finite, got {self.logit}; for no sinks "
        "leave Logits.sinks None."
      )

  def __call__(self, num_heads: int) -> Float[Array, " heads"]:
    """Returns the logit of each head, in float32."""
    return jnp.full((num_heads,), self.logit, jnp.float32)
