"""Tests for Whisper's features, against float64 numpy and transformers."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers.speech import whisper_features

RNG = np.random.default_rng(0)


def _features(num_bins=80, num_frames=12):
  return whisper_features.WhisperFeatures(
    num_bins=num_bins, num_frames=num_frames
  )


def _expected(audio, made):
  """The definition, one frame and frequency at a time, in float64."""
  size = made.num_frames * 160
  whole = np.zeros(size)
  whole[: min(size, len(audio))] = audio[:size]
  window = np.sin(np.pi * np.arange(400) / 400) ** 2
  filters = made.filters()
  mel = np.zeros((made.num_frames, made.num_bins))
  for t in range(made.num_frames):
    frame = np.zeros(400)
    for n in range(400):
      at = abs(t * 160 + n - 200)
      frame[n] = window[n] * whole[at if at < size else 2 * size - 2 - at]
    for f in range(201):
      phase = -2j * np.pi * f * np.arange(400) / 400
      mel[t] += abs(np.sum(frame * np.exp(phase))) ** 2 * filters[f]
  y = np.log10(np.maximum(mel, 1e-10))
  return (np.maximum(y, y.max() - 8) + 4) / 4


def test_is_the_definition_of_each_utterance():
  made = _features()
  audio = RNG.uniform(-1, 1, (3, 2000)).astype(np.float32)
  lengths = [2000, 900, 1500]
  audio[2] *= 1e-4
  mask = np.arange(2000)[None] < np.asarray(lengths)[:, None]
  dirty = np.where(mask, audio, np.nan)
  found = jax.jit(made)(jnp.asarray(dirty), jnp.asarray(mask))
  for i, length in enumerate(lengths):
    expected = _expected(audio[i, :length].astype(np.float64), made)
    np.testing.assert_allclose(found[i], expected, atol=2e-5)


def test_filters_are_triangles_of_equal_area_on_slaneys_scale():
  filters = _features(num_bins=40).filters()
  assert filters.shape == (201, 40)
  # Below 1 kHz the centres have equal distances.
  centres = np.argmax(filters, axis=0) * 40
  low = np.diff(centres[centres < 900])
  assert low.max() - low.min() <= 40
  areas = filters.sum(0) * 40
  np.testing.assert_allclose(areas[20:], 1, rtol=0.02)


# Of transformers 5.23 for the chirp below: bins 0, 9, 33 and 70 of frames.
_FRAMES = (0, 57, 200, 249)
_STORED = {
  80: [
    [1.16586, 0.9759, 0.34966, -0.19688],
    [-0.54259, -0.54259, -0.52622, -0.54259],
    [-0.54259, -0.54259, -0.54259, -0.54259],
    [-0.44591, -0.2991, -0.11019, -0.54259],
  ],
  128: [
    [1.0901, 1.34605, 0.57855, 0.16761],
    [-0.47585, -0.47585, 0.07143, 1.16431],
    [-0.47585, -0.47585, 0.07159, -0.47585],
    [-0.47585, -0.35702, 0.19748, -0.30273],
  ],
}


@pytest.mark.parametrize("num_bins", [80, 128])
def test_a_chirp_has_transformers_features(num_bins):
  n = np.arange(40_000)
  time = n / 16_000
  audio = 0.5 * np.sin(2 * np.pi * (200 * time + 1500 * time**2))
  audio = (audio + 0.1 * np.cos(0.37 * n)).astype(np.float32)[None]
  made = _features(num_bins=num_bins, num_frames=260)
  found = made(jnp.asarray(audio), jnp.ones(audio.shape, bool))[0]
  found = np.asarray(found)[np.asarray(_FRAMES)][:, [0, 9, 33, 70]]
  np.testing.assert_allclose(found, _STORED[num_bins], atol=2e-4)


def test_errors():
  with pytest.raises(ValueError, match="num_bins must be positive, got 0"):
    _features(num_bins=0)


@pytest.mark.skipif(
  importlib.util.find_spec("transformers") is None
  or importlib.util.find_spec("torch") is None,
  reason="transformers is not here; --config=oracle brings it",
)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("num_bins", [80, 128])
def test_is_transformers_extractor(num_bins):
  import transformers  # pyrefly: ignore[missing-import]

  extractor = transformers.WhisperFeatureExtractor(feature_size=num_bins)
  audio = RNG.uniform(-1, 1, 50_000).astype(np.float32)
  expected = extractor(
    audio, sampling_rate=16_000, return_tensors="np"
  ).input_features
  made = _features(num_bins=num_bins, num_frames=3000)
  found = made(jnp.asarray(audio[None]), jnp.ones((1, 50_000), bool))
  np.testing.assert_allclose(found[0], expected[0].T, atol=2e-4)
