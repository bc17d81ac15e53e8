"""Scalings of rotary frequencies, for rows longer than those of training.

A scaling maps the frequencies of `Rotary`, `max_wavelength ** (-2 * i / dim)`,
to those in use. All of them leave the fastest pair as it is or slow all pairs
down, so that the slowest turns as far on a long row as it did on a short one.
"""

import abc
import dataclasses
import math

import jax.numpy as jnp
from jaxtyping import Array, Float

from paxon.sharding import checks


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scaling(abc.ABC):
  """Maps frequencies; may also change the size of what is rotated."""

  @property
  def amplitude(self) -> float:
    """Factor on rotated queries and on rotated keys."""
    return 1.0

  @abc.abstractmethod
  def __call__(
    self, frequency: Float[Array, " pairs"], max_wavelength: float
  ) -> Float[Array, " pairs"]:
    """Returns the frequencies in use.

    Args:
      frequency: In radians per position, fastest first.
      max_wavelength: The base that gave them.
    """


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearScaling(Scaling):
  """All pairs slower: position `factor * p` is where `p` was.

  Chen et al. 2023, https://arxiv.org/abs/2306.15595.

  Attributes:
    factor: How many times longer rows are.
  """

  factor: float

  def __post_init__(self) -> None:
    _check_factor(self, self.factor)

  def __call__(
    self, frequency: Float[Array, " pairs"], max_wavelength: float
  ) -> Float[Array, " pairs"]:
    """Returns the frequencies in use."""
    del max_wavelength
    return frequency / self.factor


@dataclasses.dataclass(frozen=True, kw_only=True)
class NtkScaling(Scaling):
  """A longer base: the fastest pair as it was, the slowest by `factor`.

  The base is `max_wavelength * factor ** (dim / (dim - 2))` ("NTK-aware").

  Attributes:
    factor: How many times longer rows are.
  """

  factor: float

  def __post_init__(self) -> None:
    _check_factor(self, self.factor)

  def __call__(
    self, frequency: Float[Array, " pairs"], max_wavelength: float
  ) -> Float[Array, " pairs"]:
    """Returns the frequencies in use."""
    del max_wavelength
    pairs = frequency.shape[0]
    share = jnp.arange(pairs, dtype=frequency.dtype) / max(pairs - 1, 1)
    return frequency * jnp.asarray(self.factor, frequency.dtype) ** -share


@dataclasses.dataclass(frozen=True, kw_only=True)
class YarnScaling(Scaling):
  """YaRN: slow pairs slower, fast ones as they were, a ramp between them.

  Peng et al. 2023, https://arxiv.org/abs/2309.00071. Pairs are told apart by
  how often they turn in the rows of the first training; the ramp is linear in
  the number of the pair. Logits grow a little, as `amplitude` says.

  Attributes:
    factor: How many times longer rows are.
    original_length: Length of the rows of the first training.
    fast_turns: Pairs with more turns are as they were.
    slow_turns: Pairs with fewer turns are slower by `factor`.
  """

  factor: float
  original_length: int
  fast_turns: float = 32.0
  slow_turns: float = 1.0

  def __post_init__(self) -> None:
    _check_factor(self, self.factor)
    checks.check_size(self, "original_length")
    if not 0 < self.slow_turns < self.fast_turns:
      raise ValueError(
        "YarnScaling.fast_turns must exceed slow_turns, which must be "
        f"positive; got {self.fast_turns} and {self.slow_turns}."
      )

  @property
  def amplitude(self) -> float:
    """Factor on rotated queries and on rotated keys."""
    return 0.1 * math.log(self.factor) + 1.0

  def __call__(
    self, frequency: Float[Array, " pairs"], max_wavelength: float
  ) -> Float[Array, " pairs"]:
    """Returns the frequencies in use."""
    pairs = frequency.shape[0]

    def pair_with(turns: float) -> float:
      """The number of the pair with so many turns, between two of them."""
      wavelength = self.original_length / turns
      return (
        pairs * math.log(wavelength / (2 * math.pi)) / math.log(max_wavelength)
      )

    first = max(math.floor(pair_with(self.fast_turns)), 0)
    last = min(math.ceil(pair_with(self.slow_turns)), 2 * pairs - 1)
    # At least a thousandth wide, as the reference has it.
    width = max(last - first, 1e-3)
    number = jnp.arange(pairs, dtype=frequency.dtype)
    slow = jnp.clip((number - first) / width, 0, 1)
    return frequency * (slow / self.factor + (1 - slow))


def _check_factor(scaling: Scaling, factor: float) -> None:
  if not factor >= 1:
    raise ValueError(
      f"{type(scaling).__name__}.factor must be at least 1, got {factor}."
    )
