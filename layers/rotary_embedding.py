"""Rotary position embedding: rotates pairs of features by the position.

Feature `i` of the first half and feature `i` of the second half form a pair
(the convention of GPT-NeoX and Llama), rotated by the angle

  position * max_wavelength ** (-2 * i / head_dim)

so that the product of a query and a key depends on the distance of their
positions only. Su et al. 2021, https://arxiv.org/abs/2104.09864. There is
nothing to learn. Interleaved pairs and scaled angles are not here.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from paxon.layers import precision


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rotary:
  """Rotates queries or keys by their positions.

  Attributes:
    max_wavelength: The base of the angles; the slowest pair turns once in
      about `2 * pi * max_wavelength` positions.
  """

  max_wavelength: float = 10_000.0

  def __post_init__(self) -> None:
    if self.max_wavelength <= 1:
      raise ValueError(
        f"Rotary.max_wavelength must exceed 1, got {self.max_wavelength}."
      )

  def __call__(
    self,
    x: Float[Array, "batch length heads head_dim"],
    positions: Int[Array, "batch length"],
  ) -> Float[Array, "batch length heads head_dim"]:
    """Returns `x` rotated, in its own dtype.

    Raises:
      ValueError: `head_dim` is odd.
    """
    head_dim = x.shape[-1]
    if head_dim % 2:
      raise ValueError(f"Rotary needs an even head_dim, got {head_dim}.")
    # float32 because bfloat16 cannot hold positions beyond 256 exactly.
    dtype = precision.at_least_float32(x.dtype)
    exponent = jnp.arange(0, head_dim, 2, dtype=dtype) / head_dim
    frequency = jnp.asarray(self.max_wavelength, dtype) ** -exponent
    angle = jnp.einsum("BT,H->BTH", positions.astype(dtype), frequency)
    sin, cos = (f(angle)[:, :, None, :] for f in (jnp.sin, jnp.cos))
    first, second = jnp.split(x.astype(dtype), 2, axis=-1)
    rotated = (first * cos - second * sin, second * cos + first * sin)
    return jax.lax.concatenate(rotated, 3).astype(x.dtype)
