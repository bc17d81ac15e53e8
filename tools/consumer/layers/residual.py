"""A layer of our own."""

from flax import linen as nn
import jax


class Residual(nn.Module):
  """Adds to the input what a layer makes of it.

  Attributes:
    layer: Any layer that keeps the shape.
  """

  layer: nn.Module

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """Returns `x + layer(x)`."""
    return x + self.layer(x)
