"""Dropout of attention weights.

  GroupedQueryAttention(
    ..., kernel=kernels.PlainKernel(einsum=weight_dropout.DropoutEinsum(0.1))
  )

Fused kernels have none of it. Weights are dropped after the softmax and not
normalized again (Vaswani et al. 2017). They are kept where the model is applied
without the random key `dropout`, as evaluation and decoding do.
"""

from typing import ClassVar

from flax import linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from paxon.layers import precision
from paxon.sharding import checks


class DropoutEinsum(nn.Module):
  """The contractions of `kernels.plain`, with dropout of the weights.

  Attributes:
    rate: Probability with which a weight is zero; the others are divided by
      `1 - rate`.
  """

  rate: float

  takes_matmul_name: ClassVar[bool] = True

  def __post_init__(self) -> None:
    super().__post_init__()
    checks.check_interval(self, "[0, 1)", "rate")

  @nn.compact
  def __call__(
    self,
    equation: str,
    lhs: jax.Array,
    rhs: jax.Array,
    *,
    matmul: str,
    preferred_element_type: DTypeLike | None = None,
  ) -> jax.Array:
    """Returns the matmul `logits`, or `context` of weights and values."""
    if matmul == "logits":
      return precision.wide_einsum(
        equation, lhs, rhs, preferred_element_type=preferred_element_type
      )
    deterministic = not self.has_rng("dropout")
    lhs = nn.Dropout(self.rate, deterministic=deterministic)(lhs)
    return jnp.einsum(
      equation, lhs, rhs, preferred_element_type=preferred_element_type
    )
