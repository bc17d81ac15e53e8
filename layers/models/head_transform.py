"""What BERT does to states before its head: dense with activation, then norm.

The pooler of BERT is the dense part alone, of the first token:
`linear.Linear(embed_dim, activation=jnp.tanh, kernel_axes=(axes.EMBED, None))`.
"""

from flax import linen as nn
from jaxtyping import Array, Float


class HeadTransform(nn.Module):
  """`norm(dense(x))`.

  Attributes:
    dense: Maps [B,T,D] to [B,T,D]; usually a `linear.Linear` with an
      activation.
    norm: Maps [B,T,D] to [B,T,D].
  """

  dense: nn.Module
  norm: nn.Module

  def __call__(
    self, x: Float[Array, "batch length embed"]
  ) -> Float[Array, "batch length embed"]:
    """Returns what a head is applied to."""
    return self.norm(self.dense(x))
