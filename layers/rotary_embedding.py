"""Rotary position embedding: rotates pairs of features by the position.

Feature `i` of the first half and feature `i` of the second half form a pair
(the convention of GPT-NeoX and Llama), rotated by the angle

  position * max_wavelength ** (-2 * i / head_dim)

so that the product of a query and a key depends on the distance of their
positions only. Su et al. 2021, https://arxiv.org/abs/2104.09864. There is
nothing to learn. A model that was trained on short rows and continued on long
ones turns its slow pairs more slowly: a scaling maps the frequencies above to
those in use.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from paxon.layers import precision, rotary_scaling
from paxon.sharding import checks


@dataclasses.dataclass(frozen=True, kw_only=True)
class Llama3Scaling(rotary_scaling.Scaling):
  """The scaling of Llama 3.1: slow pairs slower, fast pairs as they were.

  Dubey et al. 2024, https://arxiv.org/abs/2407.21783; the formula is that of
  the reference code. With `turns = original_length / wavelength`,

    frequency / factor                   turns < low_frequency_factor
    frequency                            turns > high_frequency_factor
    (1 - s) * frequency / factor + s * frequency    between them, with
      s = (turns - low) / (high - low)

  Attributes:
    factor: How much slower the slow pairs turn.
    low_frequency_factor: Pairs with fewer turns in the original length are
      slow.
    high_frequency_factor: Pairs with more turns are fast.
    original_length: Length of the rows of the first training.
  """

  factor: float = 8.0
  low_frequency_factor: float = 1.0
  high_frequency_factor: float = 4.0
  original_length: int = 8192

  def __post_init__(self) -> None:
    checks.check_size(self, "original_length")
    if not self.factor >= 1:
      raise ValueError(
        f"Llama3Scaling.factor must be at least 1, got {self.factor}."
      )
    if not 0 < self.low_frequency_factor < self.high_frequency_factor:
      raise ValueError(
        "Llama3Scaling.high_frequency_factor must exceed low_frequency_factor, "
        f"which must be positive; got {self.high_frequency_factor} and "
        f"{self.low_frequency_factor}."
      )

  def __call__(
    self, frequency: Float[Array, " pairs"], max_wavelength: float
  ) -> Float[Array, " pairs"]:
    """Returns the frequencies in use."""
    del max_wavelength
    low, high = self.low_frequency_factor, self.high_frequency_factor
    turns = frequency * (self.original_length / (2 * math.pi))
    # Outside of [0, 1] the pair is slow or fast altogether.
    share = jnp.clip((turns - low) / (high - low), 0, 1)
    return frequency * (share + (1 - share) / self.factor)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rotary:
  """Rotates queries or keys by their positions.

  Attributes:
    max_wavelength: The base of the angles; the slowest pair turns once in
      about `2 * pi * max_wavelength` positions.
    scaling: Maps the frequencies to those in use; `None` leaves them.
    rotary_dim: How many features are rotated, the first ones of each head; the
      others pass unchanged (partial rotary). `None` is all of them.
    interleaved: Whether features `2 i` and `2 i + 1` form a pair (GPT-J)
      instead of `i` and `i + rotary_dim / 2`.
  """

  max_wavelength: float = 10_000.0
  scaling: rotary_scaling.Scaling | None = None
  rotary_dim: int | None = None
  interleaved: bool = False

  def __post_init__(self) -> None:
    checks.check_size(self, "rotary_dim")
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
      ValueError: What is rotated is odd, or wider than a head.
    """
    head_dim, dim = x.shape[-1], self.rotary_dim or x.shape[-1]
    if dim % 2:
      raise ValueError(f"Rotary needs an even head_dim, got {dim}.")
    if dim > head_dim:
      raise ValueError(
        f"Rotary.rotary_dim ({dim}) must be at most the head_dim ({head_dim})."
      )
    if dim == head_dim:
      return self._rotated(x, positions)
    turned, same = jax.lax.split(x, (dim, head_dim - dim), axis=3)
    return jax.lax.concatenate((self._rotated(turned, positions), same), 3)

  def _rotated(self, x: jax.Array, positions: jax.Array) -> jax.Array:
    dim = x.shape[-1]
    # float32 because bfloat16 cannot hold positions beyond 256 exactly.
    dtype = precision.at_least_float32(x.dtype)
    exponent = jnp.arange(0, dim, 2, dtype=dtype) / dim
    frequency = jnp.asarray(self.max_wavelength, dtype) ** -exponent
    if self.scaling is not None:
      frequency = self.scaling(frequency, self.max_wavelength)
    angle = positions.astype(dtype)[:, :, None] * frequency[None, None, :]
    sin, cos = (f(angle)[:, :, None, :] for f in (jnp.sin, jnp.cos))
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
