"""Tests for log-mel features, against float64 numpy, and for SpecAugment."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import testing
from paxon.layers.speech import spectrogram

RATE, SAMPLES = 8000, 1000


def _mel(hz):
  return 2595 * np.log10(1 + hz / 700)


def _oracle(audio, layer):
  """Log-mel features [T,K] from the definition, one frame and bin at a time."""
  audio = np.asarray(audio, np.float64)
  length, hop = 200, 80
  size = 256
  edges = np.linspace(_mel(layer.low_hz), _mel(RATE / 2), layer.num_bins + 2)
  window = np.sin(np.pi * np.arange(length) / length) ** 2
  rows = []
  for begin in range(0, len(audio) - length + 1, hop):
    frame = audio[begin : begin + length]
    emphasized = frame - layer.pre_emphasis * np.concatenate(
      [frame[:1], frame[:-1]]
    )
    row = np.zeros(layer.num_bins)
    for f in range(size // 2 + 1):
      waves = np.exp(-2j * np.pi * f * np.arange(length) / size)
      power = np.abs(np.sum(emphasized * window * waves)) ** 2
      mel = _mel(f * RATE / size)
      for k, (low, middle, high) in enumerate(
        zip(edges, edges[1:], edges[2:], strict=False)
      ):
        rising, falling = (
          (mel - low) / (middle - low),
          (high - mel) / (high - middle),
        )
        row[k] += max(0, min(rising, falling)) * power
    rows.append(np.log(np.maximum(row, layer.floor)))
  return np.stack(rows)


def _audio():
  return np.array(testing.normal(2, SAMPLES)) * np.linspace(0.1, 1, SAMPLES)


def test_features_are_those_of_the_definition():
  layer = spectrogram.LogMel(sample_rate=RATE, num_bins=20, normalize=False)
  audio = _audio().astype(np.float32)
  count = np.asarray([SAMPLES, 700])
  mask = np.arange(SAMPLES) < count[:, None]
  expected = [_oracle(audio[i, : count[i]], layer) for i in range(2)]
  # Padding may be anything.
  audio[1, 700:] = np.nan
  found, kept = jax.jit(layer)(jnp.asarray(audio), jnp.asarray(mask))
  assert kept.shape[1] == layer.num_frames(SAMPLES) == len(expected[0])
  assert jnp.sum(kept, axis=1).tolist() == [len(x) for x in expected]
  for i in range(2):
    rows = len(expected[i])
    np.testing.assert_allclose(found[i, :rows], expected[i], atol=2e-4)
    assert not np.any(found[i, rows:])


def test_normalized_bins_have_mean_zero_and_variance_one():
  layer = spectrogram.LogMel(sample_rate=RATE, num_bins=20)
  mask = jnp.asarray(np.arange(SAMPLES) < np.asarray([[SAMPLES], [700]]))
  found, kept = jax.jit(layer)(jnp.asarray(_audio(), jnp.float32), mask)
  for i in range(2):
    real = np.asarray(found[i], np.float64)[np.asarray(kept[i])]
    np.testing.assert_allclose(real.mean(axis=0), 0, atol=1e-5)
    np.testing.assert_allclose(real.std(axis=0), 1, atol=1e-3)


@pytest.mark.skipif(
  importlib.util.find_spec("transformers") is None,
  reason="transformers is not here; --config=oracle brings it",
)
def test_features_are_those_of_transformers():
  from transformers import audio_utils  # pyrefly: ignore[missing-import]

  layer = spectrogram.LogMel(sample_rate=RATE, num_bins=20, normalize=False)
  filters = audio_utils.mel_filter_bank(
    129,
    20,
    20.0,
    4000.0,
    RATE,
    mel_scale="htk",
    triangularize_in_mel_space=True,
  )
  np.testing.assert_allclose(layer.filters(), filters, atol=1e-9)
  audio = _audio()[0]
  expected = audio_utils.spectrogram(
    audio,
    audio_utils.window_function(200, "hann", periodic=True),
    frame_length=200,
    hop_length=80,
    fft_length=256,
    power=2.0,
    center=False,
    preemphasis=0.97,
    mel_filters=filters,
    log_mel="log",
    mel_floor=1e-10,
  )
  found, _ = layer(
    jnp.asarray(audio[None], jnp.float32), jnp.ones((1, 1000), bool)
  )
  np.testing.assert_allclose(found[0], expected.T, atol=2e-4)


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"num_bins": 0}, r"LogMel.num_bins must be positive, got 0"),
    (
      {"low_hz": 4000.0},
      r"low_hz \(4000.0\) and high_hz \(4000.0\) must be inc",
    ),
    ({"high_hz": 5000.0}, r"high_hz \(5000.0\) must be .* 4000.0 Hz"),
    ({"num_bins": 200}, r"num_bins \(200\) is too large: filter \d+ has none"),
    ({"pre_emphasis": 2.0}, r"LogMel.pre_emphasis must be in \[0, 1\], got 2"),
  ],
)
def test_rejects_wrong_settings(fields, message):
  with pytest.raises(ValueError, match=message):
    spectrogram.LogMel(sample_rate=RATE, **fields)


def test_rejects_audio_shorter_than_a_frame():
  with pytest.raises(ValueError, match=r"199 samples is shorter than .* 200"):
    spectrogram.LogMel(sample_rate=RATE, num_bins=8)(
      jnp.zeros((1, 199)), jnp.ones((1, 199), bool)
    )


def test_masks_are_drawn_as_defined():
  """Sizes and begins over many utterances; padding gets no blocks."""
  batch, frames, bins = 4000, 40, 12
  augment = spectrogram.SpecAugment(
    bin_masks=1, max_bins=4, frame_masks=1, max_frame_share=0.25
  )
  count = np.where(np.arange(batch) % 2, 40, 20)
  mask = jnp.asarray(np.arange(frames) < count[:, None])
  x = jnp.ones((batch, frames, bins))
  found = jax.jit(augment)(x, mask, jax.random.key(0))
  zero = np.asarray(found) == 0
  assert not zero.all(axis=2)[~np.asarray(mask)].any()
  for total, most, cut in (
    (bins, 4, zero.all(axis=1)),
    (40, 10, zero.all(axis=2)[1::2]),
    (20, 5, zero.all(axis=2)[::2]),
  ):
    sizes = cut.sum(axis=1)
    share = np.bincount(sizes, minlength=most) / len(cut)
    np.testing.assert_allclose(share, np.full(most, 1 / most), atol=0.03)
    for size in range(1, most):
      begins = np.argmax(cut[sizes == size], axis=1)
      assert begins.min() == 0
      assert begins.max() == total - size
      assert begins.mean() == pytest.approx((total - size) / 2, abs=2.5)
  # One block: zeros are next to each other.
  edges = np.abs(
    np.diff(np.pad(zero.all(axis=1), ((0, 0), (1, 1))).astype(int))
  )
  assert edges.sum(axis=1).max() <= 2


def test_blocks_of_frames_have_a_maximum_size():
  """Maximum sizes of 10 and 5 frames by the share, and of 7 at most."""
  batch, frames = 4000, 40
  augment = spectrogram.SpecAugment(
    bin_masks=0, frame_masks=1, max_frame_share=0.25, max_frames=7
  )
  count = np.where(np.arange(batch) % 2, 40, 20)
  mask = jnp.asarray(np.arange(frames) < count[:, None])
  x = jnp.ones((batch, frames, 30))
  found = jax.jit(augment)(x, mask, jax.random.key(0))
  sizes = np.sum(np.asarray(found)[..., 0] == 0, axis=1)
  for most, each in ((7, sizes[1::2]), (5, sizes[::2])):
    share = np.bincount(each, minlength=most) / len(each)
    np.testing.assert_allclose(share, np.full(most, 1 / most), atol=0.03)
  with pytest.raises(ValueError, match="max_frames must not be negative"):
    spectrogram.SpecAugment(max_frames=-1)


def test_masks_are_those_of_the_key():
  x, mask = jnp.ones((2, 30, 40)), jnp.ones((2, 30), bool)
  augment = spectrogram.SpecAugment()
  compiled = jax.jit(augment)
  first = compiled(x, mask, jax.random.key(0))
  np.testing.assert_array_equal(first, compiled(x, mask, jax.random.key(0)))
  assert np.any(first != compiled(x, mask, jax.random.key(1)))
  nothing = spectrogram.SpecAugment(bin_masks=0, frame_masks=0)
  np.testing.assert_array_equal(nothing(x, mask, jax.random.key(0)), x)
  with pytest.raises(
    ValueError, match=r"max_bins \(27\) must be at most .* 20"
  ):
    augment(x[:, :, :20], mask, jax.random.key(0))
