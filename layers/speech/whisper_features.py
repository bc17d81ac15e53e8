"""Log-mel features of Whisper.

Audio at 16 kHz, cut or padded with zeros to a window of 30 seconds, becomes
3,000 frames of 80 or 128 bins. With frames of 400 samples around every 160th
one (the audio mirrored at both ends), a Hann window w, and triangular filters W
of Slaney's mel scale with equal areas,

  y[t,k] = log10(max(sum_f |FFT(w * frame[t])[f]|**2 * W[f,k], 1e-10))
  feature = (max(y, max(y over the window) - 8) + 4) / 4

as in OpenAI's code and transformers' `WhisperFeatureExtractor`.

Letters: B batch, S samples, T frames, F frequencies, K bins.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float
import numpy as np

from paxon.layers import maximum
from paxon.sharding import checks

SAMPLE_RATE = 16_000
_FRAME, _HOP = 400, 160
# Slaney's scale: linear below 1 kHz (mel 15), then 27 steps for a factor 6.4.
_LINEAR_HZ, _KNEE_HZ, _KNEE_MEL = 200 / 3, 1000.0, 15.0
_STEP = np.log(6.4) / 27


@dataclasses.dataclass(frozen=True, kw_only=True)
class WhisperFeatures:
  """Computes the features, in float32.

  Attributes:
    num_bins: Number of filters, the `num_mel_bins` of a model.
    num_frames: Frames of a window; twice the encoder's positions.
  """

  num_bins: int = 80
  num_frames: int = 3000

  def __post_init__(self) -> None:
    checks.check_positive(self, "num_bins", "num_frames")

  def filters(self) -> np.ndarray:
    """Returns the weights float64 [F,K] of the filters."""
    hz = np.linspace(0, SAMPLE_RATE / 2, _FRAME // 2 + 1)[:, None]
    edges = _to_hz(np.linspace(0, _to_mel(SAMPLE_RATE / 2), self.num_bins + 2))
    rising = (hz - edges[:-2]) / (edges[1:-1] - edges[:-2])
    falling = (edges[2:] - hz) / (edges[2:] - edges[1:-1])
    areas = 2 / (edges[2:] - edges[:-2])
    return np.maximum(0, np.minimum(rising, falling)) * areas

  def __call__(
    self,
    audio: Float[Array, "batch samples"],
    mask: Bool[Array, "batch samples"],
  ) -> Float[Array, "batch frames bins"]:
    """Returns the features of one window each.

    Args:
      audio: Samples from -1 to 1 at `SAMPLE_RATE`; what is longer than the
        window is cut.
      mask: True for real samples; others count as silence.
    """
    size = self.num_frames * _HOP
    audio = jnp.where(mask, audio, 0).astype(jnp.float32)[:, :size]
    audio = jnp.pad(audio, ((0, 0), (0, size - audio.shape[1])))
    half = _FRAME // 2
    audio = jnp.pad(audio, ((0, 0), (half, half)), mode="reflect")
    at = np.arange(self.num_frames)[:, None] * _HOP + np.arange(_FRAME)
    phase = 2 * np.pi * np.arange(_FRAME) / _FRAME
    window = jnp.asarray(0.5 - 0.5 * np.cos(phase), jnp.float32)
    spectrum = jnp.fft.rfft(audio[:, at] * window[None, None])
    power = jnp.square(spectrum.real) + jnp.square(spectrum.imag)
    filters = jnp.asarray(self.filters(), jnp.float32)
    # In full precision, also on accelerators.
    mel = jnp.einsum(
      "BTF,FK->BTK", power, filters, precision=jax.lax.Precision.HIGHEST
    )
    y = jnp.log10(jnp.maximum(mel, 1e-10))
    y = jnp.maximum(y, maximum.take_max(y, axes=(1, 2), keepdims=True) - 8)
    return (y + 4) / 4


def _to_mel(hz: float) -> float:
  if hz < _KNEE_HZ:
    return hz / _LINEAR_HZ
  return _KNEE_MEL + np.log(hz / _KNEE_HZ) / _STEP


def _to_hz(mel: np.ndarray) -> np.ndarray:
  above = _KNEE_HZ * np.exp(_STEP * (mel - _KNEE_MEL))
  return np.where(mel < _KNEE_MEL, mel * _LINEAR_HZ, above)
