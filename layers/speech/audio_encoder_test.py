"""Tests for the encoder of audio, against its parts one after the other."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paxon.layers import linear, testing
from paxon.layers.norms import batch_norm, layer_norm
from paxon.layers.speech import audio_encoder, conformer, spectrogram
from paxon.layers.stacks import stack
from paxon.layers.vision import convolutions

EMBED, RATE = 4, 1000
AUDIO = testing.normal(2, 500)
MASK = jnp.arange(500)[None] < jnp.asarray([[500], [330]])


def _features():
  return spectrogram.LogMel(sample_rate=RATE, num_bins=6)


def _conv():
  conv = convolutions.Conv(
    EMBED,
    (3,),
    2,
    padding=convolutions.Padding.CENTERED,
    kernel_axes=(None, "embed"),
  )
  return convolutions.ConvNormAct(conv, norm=batch_norm.BatchNorm())


def _projection():
  return linear.Linear(EMBED, kernel_axes=("embed", None))


def _stack():
  block = conformer.ConformerBlock(
    first_norm=layer_norm.LayerNorm(),
    first=linear.Linear(EMBED, kernel_axes=("embed", None)),
    convolution_norm=layer_norm.LayerNorm(),
    convolution=conformer.LightConvolution(
      convolution=convolutions.DepthwiseConv((3,), kernel_axes=(None, "mlp"))
    ),
    order=conformer.BlockOrder.CONVOLUTION,
  )
  return stack.Stack((block,), num_layers=2)


@functools.cache
def _encoder():
  return audio_encoder.AudioEncoder(
    features=_features(),
    subsampling=[_conv(), _conv()],
    projection=_projection(),
    stack=_stack(),
    final_norm=layer_norm.LayerNorm(),
    augmentation=spectrogram.SpecAugment(max_bins=4),
  )


@functools.cache
def _values():
  return testing.random_values(_encoder(), AUDIO, MASK)


def _part(name):
  return {
    collection: tree[name]
    for collection, tree in _values().items()
    if name in tree
  }


def test_is_its_parts():
  found, mask = testing.apply(_encoder(), _values(), AUDIO, MASK)
  x, expected = jax.jit(_features())(AUDIO, MASK)
  for i in range(2):
    x = testing.apply(_conv(), _part(f"subsampling_{i}"), x, expected)
    expected = expected[:, ::2]
  x = testing.apply(_projection(), _part("projection"), x)
  positions = testing.make_positions(2, x.shape[1])
  segments = expected.astype(jnp.int32)
  args = testing.in_context(x, positions, segments)
  x = testing.apply(_stack(), _part("stack"), *args)
  x = testing.apply(layer_norm.LayerNorm(), _part("final_norm"), x)
  np.testing.assert_array_equal(mask, expected)
  # 48 and 31 whole frames of 25 ms, then every second one, twice.
  assert mask.sum(1).tolist() == [12, 8]
  np.testing.assert_allclose(found, x, rtol=2e-5, atol=2e-6)


def test_padding_changes_nothing():
  expected, mask = testing.apply(_encoder(), _values(), AUDIO, MASK)
  dirty = jnp.where(MASK, AUDIO, jnp.nan)
  found, _ = testing.apply(_encoder(), _values(), dirty, MASK)
  np.testing.assert_array_equal(
    np.asarray(found)[np.asarray(mask)], np.asarray(expected)[np.asarray(mask)]
  )
  short, _ = testing.apply(
    _encoder(), _values(), AUDIO[1:, :330], MASK[1:, :330]
  )
  np.testing.assert_allclose(
    short[0], expected[1, : short.shape[1]], rtol=2e-5, atol=2e-6
  )


def test_only_training_augments():
  def run(key) -> Any:
    return _encoder().apply(
      _values(),
      AUDIO,
      MASK,
      deterministic=False,
      rngs={audio_encoder.STREAM: key},
      mutable=[batch_norm.COLLECTION],
    )

  compiled = jax.jit(run)
  one, same, other = (compiled(jax.random.key(i))[0][0] for i in (0, 0, 1))
  np.testing.assert_array_equal(one, same)
  assert not np.array_equal(one, other)
