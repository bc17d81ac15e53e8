"""Plain attention as a part of a layer, with products that can be replaced.

`kernels.plain` is a function, and has nothing to keep. Quantized products may
keep scales, so they need a module around it: this one, with a contraction in
its field `einsum`, takes its place in the field `kernel` of a layer.
"""

from typing import Any, ClassVar

from flax import linen as nn
import jax

from paxon.layers.attention import kernel_support, kernels
from paxon.layers.attention import mask as attention_mask
from paxon.quantization import products


class PlainKernel(nn.Module):
  """`kernels.plain` by other contractions.

  Attributes:
    einsum: Computes the products `logits`, of queries and keys, and `context`,
      of weights and values; swapped by quantization.
  """

  einsum: products.Einsum

  support: ClassVar[kernel_support.Support] = kernel_support.PLAIN

  def __call__(
    self,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: attention_mask.AttentionMask,
    **more: Any,
  ) -> jax.Array:
    """Returns what `kernels.plain` does, of the same arguments."""
    return kernels.plain(query, key, value, mask, einsum=self.einsum, **more)
