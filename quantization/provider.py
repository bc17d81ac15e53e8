"""What providers of contractions have in common: a module for each product.

A provider goes into a layer's field `einsum` in place of `jnp.einsum`. Each
product of the layer has a module of its own below it, by the product's name, so
that each has variables, and random keys, of its own.
"""

from typing import ClassVar

from flax import linen as nn
import jax
from jax.typing import DTypeLike


class Provider(nn.Module):
  """A contraction that wants to know which product it computes."""

  takes_product: ClassVar[bool] = True

  @nn.compact
  def __call__(
    self,
    equation: str,
    lhs: jax.Array,
    rhs: jax.Array,
    *,
    product: str,
    preferred_element_type: DTypeLike | None = None,
  ) -> jax.Array:
    """Returns the product of two operands.

    Args:
      equation: As of `jnp.einsum`.
      lhs: Activations.
      rhs: The kernel, or other activations.
      product: Its name, unlike those of the layer's other products; that of
        the kernel among the layer's parameters, where it is one.
      preferred_element_type: Dtype of the result; `None` is that of `lhs`.
    """
    part = self.part(product)
    return part(equation, lhs, rhs, preferred_element_type)

  def part(self, product: str) -> nn.Module:
    """Returns `(equation, lhs, rhs, preferred_element_type) -> out`.

    Args:
      product: The name that the module has to have.
    """
    raise NotImplementedError
