"""LongRoPE: a factor of its own for each pair of features.

Ding et al. 2024, https://arxiv.org/abs/2402.13753. Files have two lists of
factors: short ones for rows up to the length of the first training, and long
ones for longer rows. transformers chooses by the largest position of a whole
batch, so that there a document depends on its neighbours, and keys that were
stored before the switch do not fit those after it. Here a model has the short
ones, and a position that would need the long ones gives NaN.
"""

import dataclasses
import math

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from paxon.layers import rotary_embedding, rotary_scaling
from paxon.sharding import checks


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairScaling(rotary_scaling.Scaling):
  """Divides the frequency of each pair by a number.

  Attributes:
    factors: One for each pair, fastest first.
    wave_factor: Factor on rotated queries and on rotated keys.
  """

  factors: tuple[float, ...]
  wave_factor: float = 1.0

  def __post_init__(self) -> None:
    if not self.factors or not all(factor > 0 for factor in self.factors):
      raise ValueError(
        f"PairScaling.factors must be positive, got {self.factors}."
      )

  @property
  def amplitude(self) -> float:
    """Factor on rotated queries and on rotated keys."""
    return self.wave_factor

  def __call__(
    self, frequency: Float[Array, " pairs"], max_wavelength: float
  ) -> Float[Array, " pairs"]:
    """Returns the frequencies in use.

    Raises:
      ValueError: There is not one factor for each pair.
    """
    del max_wavelength
    if len(self.factors) != frequency.shape[0]:
      raise ValueError(
        f"PairScaling.factors has {len(self.factors)} entries and must have one"
        f" for each of {frequency.shape[0]} pairs."
      )
    return frequency / jnp.asarray(self.factors, frequency.dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BoundedRotary:
  """Rotary positions up to a length; beyond it, NaN.

  Attributes:
    rotary: Rotates queries or keys.
    length: Positions are less than this.
  """

  rotary: rotary_embedding.Rotary
  length: int

  def __post_init__(self) -> None:
    checks.check_size(self, "length")

  def __call__(
    self,
    x: Float[Array, "batch length heads head_dim"],
    positions: Int[Array, "batch length"],
  ) -> Float[Array, "batch length heads head_dim"]:
    """Returns `x` rotated, or NaN where a position is not served."""
    is_served = (positions < self.length)[:, :, None, None]
    rotated = self.rotary(x, positions)
    return jnp.where(is_served, rotated, jnp.asarray(jnp.nan, rotated.dtype))


def wave_factor(*, factor: float, original_length: int) -> float:
  """Returns the usual factor on queries and keys.

  Args:
    factor: How many times longer rows are than those of the first training.
    original_length: The length of those.
  """
  if factor <= 1:
    return 1.0
  return math.sqrt(1 + math.log(factor) / math.log(original_length))
