"""Log-mel features of audio, and SpecAugment.

A frame of `frame_length` samples begins every `hop` samples. With the frame x,
pre-emphasis c, Hann window w and weights W of triangular filters

  y[n]   = w[n] * (x[n] - c * x[n-1]),      x[-1] = x[0]
  mel[k] = log(max(sum_f W[f,k] * |FFT(y)[f]|**2, floor))

The filters have equal distances on the mel scale, 1127 * ln(1 + Hz / 700), and
are triangles on it, as in HTK, Kaldi and TensorFlow.

SpecAugment (Park et al. 2019, https://arxiv.org/abs/1904.08779) zeroes blocks
of bins and of frames in training.

Letters: B batch, S samples, T frames, K bins, F frequencies.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float
import numpy as np

from paxon.layers.norms import moments
from paxon.sharding import checks


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogMel:
  """Computes log-mel features, in float32.

  Attributes:
    sample_rate: Samples per second.
    num_bins: Number of filters.
    frame_seconds: Length of a frame, rounded to samples.
    hop_seconds: Distance of two frames, rounded to samples.
    low_hz: Lower end of the first filter.
    high_hz: Upper end of the last filter; None is half of the sample rate.
    pre_emphasis: Share of the sample before that is subtracted.
    floor: Smallest value before the logarithm.
    normalize: Whether each bin has mean 0 and variance 1 over the real frames
      of an utterance.
  """

  sample_rate: int
  num_bins: int = 80
  frame_seconds: float = 0.025
  hop_seconds: float = 0.01
  low_hz: float = 20.0
  high_hz: float | None = None
  pre_emphasis: float = 0.97
  floor: float = 1e-10
  normalize: bool = True

  def __post_init__(self) -> None:
    checks.check_positive(
      self, "sample_rate", "num_bins", "frame_length", "hop", "floor"
    )
    checks.check_interval(self, "[0, 1]", "pre_emphasis")
    if not 0 <= self.low_hz < self._high <= self.sample_rate / 2:
      raise ValueError(
        f"LogMel.low_hz ({self.low_hz}) and high_hz ({self._high}) must be"
        f" increasing, from 0 to {self.sample_rate / 2} Hz, half of"
        " sample_rate."
      )
    empty = np.flatnonzero(np.max(self.filters(), axis=0) == 0)
    if empty.size:
      raise ValueError(
        f"LogMel.num_bins ({self.num_bins}) is too large: filter {empty[0]}"
        f" has none of the {self._fft_size // 2 + 1} frequencies of a frame of"
        f" {self.frame_length} samples."
      )

  @property
  def frame_length(self) -> int:
    """Samples of a frame."""
    return round(self.frame_seconds * self.sample_rate)

  @property
  def hop(self) -> int:
    """Samples from one frame to the next."""
    return round(self.hop_seconds * self.sample_rate)

  @property
  def _high(self) -> float:
    return self.sample_rate / 2 if self.high_hz is None else self.high_hz

  @property
  def _fft_size(self) -> int:
    return 1 << (self.frame_length - 1).bit_length()

  def num_frames(self, num_samples: int) -> int:
    """Returns the number of whole frames."""
    return max(0, (num_samples - self.frame_length) // self.hop + 1)

  def filters(self) -> np.ndarray:
    """Returns the weights float64 [F,K] of the filters."""
    low, high = _to_mel(np.asarray([self.low_hz, self._high]))
    edges = np.linspace(low, high, self.num_bins + 2)
    count = self._fft_size // 2 + 1
    at = _to_mel(np.linspace(0, self.sample_rate / 2, count))[:, None]
    rising = (at - edges[:-2]) / (edges[1:-1] - edges[:-2])
    falling = (edges[2:] - at) / (edges[2:] - edges[1:-1])
    return np.maximum(0, np.minimum(rising, falling))

  def __call__(
    self,
    audio: Float[Array, "batch samples"],
    mask: Bool[Array, "batch samples"],
  ) -> tuple[Float[Array, "batch frames bins"], Bool[Array, "batch frames"]]:
    """Returns the features, zero where they are masked, and their mask.

    Args:
      audio: Samples; may be NaN where they are masked.
      mask: True for real samples, which come first.

    Raises:
      ValueError: The audio is shorter than a frame.
    """
    count = self.num_frames(audio.shape[1])
    if not count:
      raise ValueError(
        f"Audio of {audio.shape[1]} samples is shorter than a frame of"
        f" {self.frame_length}; pad it."
      )
    audio = jnp.where(mask, audio, 0).astype(jnp.float32)
    at = np.arange(count)[:, None] * self.hop + np.arange(self.frame_length)
    frames = audio[:, at]
    before = jnp.concatenate([frames[..., :1], frames[..., :-1]], axis=-1)
    frames -= self.pre_emphasis * before
    # Periodic, as for spectra.
    phase = 2 * np.pi * np.arange(self.frame_length) / self.frame_length
    frames *= jnp.asarray(0.5 - 0.5 * np.cos(phase), jnp.float32)[None, None]
    spectrum = jnp.fft.rfft(frames, n=self._fft_size)
    power = jnp.square(spectrum.real) + jnp.square(spectrum.imag)
    filters = jnp.asarray(self.filters(), jnp.float32)
    # In full precision, also on accelerators.
    mel = jnp.einsum(
      "BTF,FK->BTK", power, filters, precision=jax.lax.Precision.HIGHEST
    )
    features = jnp.log(jnp.maximum(mel, self.floor))
    # A frame is real if all of its samples are.
    is_real = mask[:, at[:, -1]]
    kept = is_real[:, :, None]
    if self.normalize:
      found = moments.moments(features, kept, axes=(1,))
      features = (features - found.mean) * jax.lax.rsqrt(found.variance + 1e-5)
    return jnp.where(kept, features, 0), is_real


def _to_mel(hz: np.ndarray) -> np.ndarray:
  return 1127 * np.log1p(hz / 700)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpecAugment:
  """Zeroes blocks of bins and of frames, in each utterance others.

  The size of a block is uniform in [0, maximum), its begin is uniform where it
  fits, among all bins or the real frames. Blocks may overlap.

  Attributes:
    bin_masks: Number of blocks of bins.
    max_bins: Maximum size of a block of bins.
    frame_masks: Number of blocks of frames.
    max_frame_share: Maximum size of a block, as a share of the real frames.
    max_frames: Maximum size of a block, too; `None` is only the share.
  """

  bin_masks: int = 2
  max_bins: int = 27
  frame_masks: int = 10
  max_frame_share: float = 0.05
  max_frames: int | None = None

  def __post_init__(self) -> None:
    checks.check_non_negative(self, "bin_masks", "max_bins", "frame_masks")
    checks.check_non_negative(self, "max_frames")
    checks.check_interval(self, "[0, 1]", "max_frame_share")

  def __call__(
    self,
    x: Float[Array, "batch frames bins"],
    mask: Bool[Array, "batch frames"],
    key: jax.Array,
  ) -> Float[Array, "batch frames bins"]:
    """Returns `x` with zeros; a pure function of its arguments.

    Args:
      x: Features, such as normalized ones, whose mean is zero.
      mask: True for real frames, which come first.
      key: Random key.

    Raises:
      ValueError: There are fewer bins than `max_bins`.
    """
    batch, frames, bins = x.shape
    if self.max_bins > bins:
      raise ValueError(
        f"SpecAugment.max_bins ({self.max_bins}) must be at most the number of"
        f" bins, {bins}."
      )
    of_bins, of_frames = jax.random.split(key)
    draw = functools.partial(_draw_blocks, batch=batch)
    total = jnp.full((batch,), bins, jnp.int32)
    most = jnp.full((batch,), self.max_bins, jnp.int32)
    hidden = draw(of_bins, self.bin_masks, total, most, size=bins)
    total = jnp.sum(mask, axis=1, dtype=jnp.int32)
    # A share of 1 / 20 is not exact, and must not lose a frame of 20.
    share = total.astype(jnp.float32) * self.max_frame_share + 1e-4
    most = jnp.floor(share).astype(jnp.int32)
    if self.max_frames is not None:
      most = jnp.minimum(most, self.max_frames)
    cut = draw(of_frames, self.frame_masks, total, most, size=frames)
    return jnp.where(hidden[:, None] | cut[:, :, None], 0, x)


def _draw_blocks(
  key: jax.Array,
  count: int,
  total: jax.Array,
  most: jax.Array,
  *,
  size: int,
  batch: int,
) -> jax.Array:
  """Returns which of `size` entries are in one of `count` blocks, [B,size].

  `total` are the entries that may be, `most` the maximum size, both int [B].
  """
  of_size, of_begin = jax.random.split(key)
  sizes = _scale(jax.random.uniform(of_size, (batch, count)), most)
  begins = _scale(
    jax.random.uniform(of_begin, (batch, count)), total[:, None] - sizes + 1
  )
  at = jnp.arange(size, dtype=jnp.int32)[None, None]
  inside = (at >= begins[..., None]) & (at < (begins + sizes)[..., None])
  return jnp.any(inside, axis=1)


def _scale(uniform: jax.Array, most: jax.Array) -> jax.Array:
  """Returns ints that are uniform in [0, most); zero if there are none."""
  most = most[:, None] if most.ndim == 1 else most
  drawn = jnp.floor(uniform * most.astype(uniform.dtype)).astype(jnp.int32)
  return jnp.clip(drawn, 0, jnp.maximum(most - 1, 0))
