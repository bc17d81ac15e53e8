"""Rotary position embedding: rotates pairs of features by the position.

Feature `i` of the first half and feature `i` of the second half form a pair
(the convention of GPT-NeoX and Llama), rotated by the angle

  position * max_wavelength ** (-2 * i / head_dim)

so that the dot product of a query and a key depends only on the distance of
their positions. Su et al. 2021, https://arxiv.org/abs/2104.09864. It has no
parameters. `rotary_scaling` changes the frequencies for longer contexts.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int
import numpy as np

from paxon.layers import precision
from paxon.layers.positions import rotary_scaling
from paxon.sharding import checks


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rotary:
  """Rotates queries or keys by their positions.

  Attributes:
    max_wavelength: Base of the angles; the slowest pair turns once in about
      `2 * pi * max_wavelength` positions.
    scaling: Maps the frequencies to those in use; `None` keeps them.
    rotary_dim: Number of rotated features, the first ones of each head (partial
      rotary). `None` rotates all.
    interleaved: Whether features `2 i` and `2 i + 1` form a pair (GPT-J)
      instead of `i` and `i + rotary_dim / 2`.
  """

  max_wavelength: float = 10_000.0
  scaling: rotary_scaling.Scaling | None = None
  rotary_dim: int | None = None
  interleaved: bool = False

  def __post_init__(self) -> None:
    checks.check_size(self, "rotary_dim")
    if self.rotary_dim is not None and self.rotary_dim % 2:
      raise ValueError(
        f"Rotary.rotary_dim must be even, got {self.rotary_dim}."
      )
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

    With a `rotary_scaling.LengthScaling`, the positions of a document must be
    consecutive, and those of padding 0.

    Raises:
      ValueError: `head_dim` is odd without `rotary_dim`, or less than it.
    """
    head_dim, dim = x.shape[-1], self.rotary_dim or x.shape[-1]
    self.check_width(head_dim, "head_dim")
    if dim == head_dim:
      return self._rotate(x, positions)
    first, rest = jax.lax.split(x, (dim, head_dim - dim), axis=3)
    return jax.lax.concatenate((self._rotate(first, positions), rest), 3)

  @property
  def depends_on_length(self) -> bool:
    """Whether frequencies depend on the length of a document."""
    return isinstance(self.scaling, rotary_scaling.LengthScaling)

  def check_width(self, width: int, field: str) -> None:
    """Raises ValueError if heads of the width in `field` cannot be rotated."""
    if self.rotary_dim is None and width % 2:
      raise ValueError(f"{field} must be even for Rotary, got {width}.")
    if self.rotary_dim is not None and self.rotary_dim > width:
      raise ValueError(
        f"Rotary.rotary_dim ({self.rotary_dim}) must be at most {field}"
        f" ({width})."
      )

  def _rotate(self, x: jax.Array, positions: jax.Array) -> jax.Array:
    dim = x.shape[-1]
    # float32 because bfloat16 cannot hold positions beyond 256 exactly.
    dtype = precision.at_least_float32(x.dtype)
    exponent = np.arange(0, dim, 2) / dim
    # A constant, which XLA merges with that of other layers.
    frequency = jnp.asarray(np.power(self.max_wavelength, -exponent), dtype)
    if isinstance(self.scaling, rotary_scaling.LengthScaling):
      frequency = self.scaling.select(frequency, self.max_wavelength, positions)
    elif self.scaling is not None:
      frequency = self.scaling(frequency, self.max_wavelength)[None, None, :]
    else:
      frequency = frequency[None, None, :]
    angle = positions.astype(dtype)[:, :, None] * frequency
    # Concatenated and reshaped, they are computed once; XLA:CPU would otherwise
    # compute them in their readers, for each head of each layer again.
    waves = jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=-1)
    sin, cos = jnp.split(waves[:, :, None, :], 2, axis=-1)
    if self.scaling is not None:
      sin, cos = (self.scaling.amplitude * wave for wave in (sin, cos))
    wide = x.astype(dtype)
    if self.interleaved:
      first, second = wide[..., ::2], wide[..., 1::2]
    else:
      first, second = jnp.split(wide, 2, axis=-1)
    rotated = (first * cos - second * sin, second * cos + first * sin)
    if self.interleaved:
      return jnp.stack(rotated, axis=-1).reshape(x.shape).astype(x.dtype)
    return jax.lax.concatenate(rotated, 3).astype(x.dtype)
