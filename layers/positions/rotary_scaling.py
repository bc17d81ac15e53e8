"""Scaling of rotary frequencies, for contexts longer than in pretraining.

A scaling maps the frequencies of `Rotary`, `max_wavelength ** (-2 * i / dim)`,
to those in use: lower ones, so that a pair turns as far in a long context as it
did in a short one. Most scalings keep the highest frequencies.
"""

import abc
import dataclasses
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from paxon.sharding import checks


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scaling(abc.ABC):
  """Maps frequencies; may also change the amplitude of the rotated features."""

  @property
  def amplitude(self) -> float:
    """Factor on rotated queries and on rotated keys."""
    return 1.0

  @abc.abstractmethod
  def __call__(
    self, frequency: Float[Array, " pairs"], max_wavelength: float
  ) -> Float[Array, " pairs"]:
    """Returns the frequencies in use, in radians per position.

    They are given highest first; `max_wavelength` is their base.
    """


@dataclasses.dataclass(frozen=True, kw_only=True)
class _FactorScaling(Scaling):
  """A scaling by the ratio of the new to the original context length."""

  factor: float

  def __post_init__(self) -> None:
    checks.check_interval(self, "[1, inf)", "factor")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearScaling(_FactorScaling):
  """Position interpolation: divides all frequencies by `factor`.

  Chen et al. 2023, https://arxiv.org/abs/2306.15595.

  Attributes:
    factor: Ratio of the new to the original context length.
  """

  def __call__(
    self, frequency: Float[Array, " pairs"], max_wavelength: float
  ) -> Float[Array, " pairs"]:
    """Returns the frequencies in use."""
    del max_wavelength
    return frequency / self.factor


@dataclasses.dataclass(frozen=True, kw_only=True)
class NtkScaling(_FactorScaling):
  """NTK-aware scaling: the base `max_wavelength * factor ** (d / (d - 2))`.

  It keeps the highest frequency and divides the lowest by `factor`.

  Attributes:
    factor: Ratio of the new to the original context length.
  """

  def __call__(
    self, frequency: Float[Array, " pairs"], max_wavelength: float
  ) -> Float[Array, " pairs"]:
    """Returns the frequencies in use."""
    del max_wavelength
    pairs = frequency.shape[0]
    share = jnp.arange(pairs, dtype=frequency.dtype) / max(pairs - 1, 1)
    return frequency * jnp.asarray(self.factor, frequency.dtype) ** -share


@dataclasses.dataclass(frozen=True, kw_only=True)
class YarnScaling(_FactorScaling):
  """YaRN: keeps high frequencies, divides low ones, with a ramp between.

  Peng et al. 2023, https://arxiv.org/abs/2309.00071. High and low depend on the
  number of turns in the original context; the ramp is linear in the index of
  the pair. `amplitude` increases attention logits a little.

  Attributes:
    factor: Ratio of the new to the original context length.
    original_length: Sequence length of pretraining.
    fast_turns: Pairs with more turns keep their frequency.
    slow_turns: Frequencies of pairs with fewer turns are divided by `factor`.
    truncate: Whether the ends of the ramp are whole indices, as in the
      reference code; gpt-oss does not round them.
    wave_factor: Value of `amplitude`; `None` is the paper's.
  """

  original_length: int
  fast_turns: float = 32.0
  slow_turns: float = 1.0
  truncate: bool = True
  wave_factor: float | None = None

  def __post_init__(self) -> None:
    super().__post_init__()
    checks.check_size(self, "original_length")
    checks.check_positive(self, "wave_factor")
    if not 0 < self.slow_turns <= self.fast_turns:
      raise ValueError(
        "YarnScaling.fast_turns must be at least slow_turns, which must be "
        f"positive; got {self.fast_turns} and {self.slow_turns}."
      )

  @property
  def amplitude(self) -> float:
    """Factor on rotated queries and on rotated keys."""
    if self.wave_factor is not None:
      return self.wave_factor
    return 0.1 * math.log(self.factor) + 1.0

  def __call__(
    self, frequency: Float[Array, " pairs"], max_wavelength: float
  ) -> Float[Array, " pairs"]:
    """Returns the frequencies in use."""
    pairs = frequency.shape[0]

    def find_pair(turns: float) -> float:
      """Returns the fractional index of the pair with this many turns."""
      wavelength = self.original_length / turns
      return (
        pairs * math.log(wavelength / (2 * math.pi)) / math.log(max_wavelength)
      )

    ends = find_pair(self.fast_turns), find_pair(self.slow_turns)
    if self.truncate:
      ends = math.floor(ends[0]), math.ceil(ends[1])
    first, last = max(ends[0], 0), min(ends[1], 2 * pairs - 1)
    # At least a thousandth wide, as in the reference implementation.
    width = max(last - first, 1e-3)
    index = jnp.arange(pairs, dtype=frequency.dtype)
    slow = jnp.clip((index - first) / width, 0, 1)
    return frequency * (slow / self.factor + (1 - slow))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Llama3Scaling(_FactorScaling):
  """Scaling of Llama 3.1: divides low frequencies, keeps high ones.

  Dubey et al. 2024, https://arxiv.org/abs/2407.21783; the formula is that of
  the reference code. With `turns = original_length / wavelength`,

    frequency / factor                   turns < low_frequency_factor
    frequency                            turns > high_frequency_factor
    (1 - s) * frequency / factor + s * frequency    between them, with
      s = (turns - low) / (high - low)

  Attributes:
    factor: Divisor of low frequencies.
    low_frequency_factor: Pairs with fewer turns in the original context have a
      low frequency.
    high_frequency_factor: Pairs with more turns have a high frequency.
    original_length: Sequence length of pretraining.
  """

  factor: float = 8.0
  low_frequency_factor: float = 1.0
  high_frequency_factor: float = 4.0
  original_length: int = 8192

  def __post_init__(self) -> None:
    super().__post_init__()
    checks.check_size(self, "original_length")
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
    share = jnp.clip((turns - low) / (high - low), 0, 1)
    return frequency * (share + (1 - share) / self.factor)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairScaling(Scaling):
  """LongRoPE: divides the frequency of each pair by its own factor.

  Ding et al. 2024, https://arxiv.org/abs/2402.13753.

  Attributes:
    factors: One for each pair, highest frequency first.
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
class LengthScaling(Scaling):
  """A scaling by the length of each document.

  Keys that are cached while a document is short have other frequencies than
  those of a longer one. So a prompt must be read in one step.

  Attributes:
    original_length: Sequence length of pretraining.
  """

  original_length: int

  def __post_init__(self) -> None:
    checks.check_size(self, "original_length")

  @abc.abstractmethod
  def select(
    self,
    frequency: Float[Array, " pairs"],
    max_wavelength: float,
    positions: Int[Array, "batch length"],
  ) -> Float[Array, "batch length pairs"]:
    """Returns the frequencies of each token, by the length of its document.

    One token alone is a decoding step, whose document ends with it.
    """


@dataclasses.dataclass(frozen=True, kw_only=True)
class DynamicScaling(LengthScaling):
  """Dynamic NTK scaling: a larger base in documents beyond `original_length`.

  In a document of `length > original_length` tokens it is `NtkScaling` by
  `factor * length / original_length - (factor - 1)`, for all of its tokens; the
  frequencies of shorter ones are kept. In a decoding step, `length` is that so
  far, and cached keys keep their angles, as in `generate` of transformers; so
  decoding beyond `original_length` is not a forward pass over the sequence.

  Attributes:
    factor: Slope of the scale over the length.
  """

  factor: float

  def __post_init__(self) -> None:
    super().__post_init__()
    checks.check_interval(self, "[1, inf)", "factor")

  def __call__(
    self, frequency: Float[Array, " pairs"], max_wavelength: float
  ) -> Float[Array, " pairs"]:
    """Returns the frequencies of short documents; `select` is for all."""
    del max_wavelength
    return frequency

  def select(
    self,
    frequency: Float[Array, " pairs"],
    max_wavelength: float,
    positions: Int[Array, "batch length"],
  ) -> Float[Array, "batch length pairs"]:
    """Returns the frequencies of each token, by the length of its document."""
    del max_wavelength
    pairs = frequency.shape[0]
    share = jnp.arange(pairs, dtype=frequency.dtype) / max(pairs - 1, 1)
    length = jnp.maximum(
      _find_last_positions(positions) + 1, self.original_length
    )
    # One for documents up to the original length.
    beyond = (length - self.original_length).astype(frequency.dtype)
    scale = 1 + self.factor * beyond / self.original_length
    stretch = scale[:, :, None] ** -share[None, None, :]
    return frequency[None, None, :] * stretch


@dataclasses.dataclass(frozen=True, kw_only=True)
class LongScaling(LengthScaling):
  """LongRoPE with other factors for short documents, as in Phi-3.

  All tokens of a document longer than `original_length` use the factors for
  long ones. So keys that are cached while a document is short are of no use
  once it is long: the decoding step that crosses the length gives NaN, and so
  do those after it. A prompt that is longer already has no such step.

  Attributes:
    short: Scaling of documents up to `original_length`.
    long: Scaling of longer ones, with the same `wave_factor`.
  """

  short: PairScaling
  long: PairScaling

  def __post_init__(self) -> None:
    super().__post_init__()
    if self.short.wave_factor != self.long.wave_factor:
      raise ValueError(
        f"LongScaling.short has wave_factor {self.short.wave_factor} and long"
        f" {self.long.wave_factor}; they must be equal."
      )

  @property
  def amplitude(self) -> float:
    """Factor on rotated queries and on rotated keys."""
    return self.short.wave_factor

  def __call__(
    self, frequency: Float[Array, " pairs"], max_wavelength: float
  ) -> Float[Array, " pairs"]:
    """Returns the frequencies of short documents; `select` is for all."""
    return self.short(frequency, max_wavelength)

  def select(
    self,
    frequency: Float[Array, " pairs"],
    max_wavelength: float,
    positions: Int[Array, "batch length"],
  ) -> Float[Array, "batch length pairs"]:
    """Returns the frequencies of each token, by the length of its document."""
    short = self.short(frequency, max_wavelength)[None, None, :]
    long = self.long(frequency, max_wavelength)[None, None, :]
    last = _find_last_positions(positions)
    is_long = (last >= self.original_length)[:, :, None]
    result = jnp.where(is_long, long, short)
    if positions.shape[1] > 1:
      return result
    is_crossing = (positions == self.original_length)[:, :, None]
    return jnp.where(is_crossing, jnp.asarray(jnp.nan, result.dtype), result)


def _find_last_positions(
  positions: Int[Array, "batch length"],
) -> Int[Array, "batch length"]:
  """Returns the last position of each token's document.

  Positions of a document are consecutive.
  """
  length = positions.shape[1]
  is_last = jnp.concatenate(
    [
      positions[:, 1:] != positions[:, :-1] + 1,
      jnp.ones_like(positions[:, :1], bool),
    ],
    axis=1,
  )
  index = jax.lax.broadcasted_iota(jnp.int32, positions.shape, 1)
  ends = jax.lax.cummin(
    jnp.where(is_last, index, length - 1), axis=1, reverse=True
  )
  return jnp.take_along_axis(positions, ends, axis=1)
