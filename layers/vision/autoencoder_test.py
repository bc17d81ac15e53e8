"""Tests for encoders and decoders of images and videos, against numpy."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import testing
from paxon.layers.vision import autoencoder

FIELDS = {"filters": 4, "num_blocks": 1, "num_groups": 2}
# Heights and widths are halved once, and time, too.
ENCODER = autoencoder.Encoder(
  multipliers=(1, 2), time_strides=(2,), output_dim=3, **FIELDS
)
DECODER = autoencoder.Decoder(
  multipliers=(1, 2), time_strides=(2,), output_dim=2, **FIELDS
)


def _edge_conv(x, params, strides):
  """Sums each output position over the taps, whose places are clipped."""
  kernel = params["kernel"]
  size, rank = kernel.shape[0], x.ndim - 2
  before = [(size - 1) // 2] * rank
  if rank == 3:
    before[0] = size - 1
  sizes = x.shape[1:-1]
  outs = [(n - 1) // s + 1 for n, s in zip(sizes, strides, strict=True)]
  y = np.zeros((len(x), *outs, kernel.shape[-1])) + params.get("bias", 0.0)
  for place in itertools.product(*map(range, outs)):
    for tap in np.ndindex(kernel.shape[:-2]):
      at = [
        min(max(p * s + i - b, 0), n - 1)
        for p, s, i, b, n in zip(
          place, strides, tap, before, sizes, strict=True
        )
      ]
      y[(slice(None), *place)] += x[(slice(None), *at)] @ kernel[tap]
  return y


@pytest.mark.parametrize(
  ("shape", "size", "strides"),
  [((2, 5, 4, 3), 3, (1, 1)), ((1, 5, 4, 4, 3), 4, (2, 2, 2))],
  ids=["image", "video"],
)
def test_convolutions_repeat_the_border(shape, size, strides):
  layer = autoencoder.EdgeConv(2, size, strides)
  x = testing.normal(*shape)
  values = testing.random_values(layer, x)
  params = jax.tree.map(
    lambda v: np.asarray(v, np.float64), values["params"]["conv"]
  )
  expected = _edge_conv(np.asarray(x, np.float64), params, strides)
  found = testing.apply(layer, values, x)
  np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_conditional_norm_matches_numpy():
  layer = autoencoder.ConditionalNorm(num_groups=2)
  x, condition = testing.normal(2, 3, 4, 5, 4), testing.normal(2, 3, 4, 5, 3)
  values = testing.random_values(layer, x, condition)
  p = jax.tree.map(lambda v: np.asarray(v, np.float64), values["params"])
  wide, c = np.asarray(x, np.float64), np.asarray(condition, np.float64)
  groups = wide.reshape(2, 3, 4, 5, 2, 2)
  mean = groups.mean((2, 3, 5), keepdims=True)
  variance = groups.var((2, 3, 5), keepdims=True)
  normed = ((groups - mean) / np.sqrt(variance + 1e-6)).reshape(x.shape)
  scale, bias = (
    c @ p[name]["kernel"] + p[name]["bias"] for name in ("scale", "bias")
  )
  found = testing.apply(layer, values, x, condition)
  expected = normed * (1 + scale) + bias
  np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_depth_to_space_fills_blocks():
  x = np.arange(2 * 2 * 3 * 12, dtype=np.float32).reshape(2, 2, 3, 12)
  y = np.asarray(autoencoder.depth_to_space(testing.array(x), (2, 2)))
  assert y.shape == (2, 4, 6, 3)
  for b, i, j in np.ndindex(2, 4, 6):
    block = x[b, i // 2, j // 2].reshape(2, 2, 3)
    np.testing.assert_array_equal(y[b, i, j], block[i % 2, j % 2])


def _round_trip(x):
  encoded = testing.initial_values(ENCODER, x)
  latents = testing.apply(ENCODER, encoded, x)
  decoded = testing.initial_values(DECODER, latents)
  return latents, testing.apply(DECODER, decoded, latents), encoded, decoded


@pytest.mark.nightly
def test_sizes_and_causality():
  video = testing.normal(1, 5, 4, 4, 2)
  latents, y, encoded, decoded = _round_trip(video)
  assert latents.shape == (1, 3, 2, 2, 3)
  assert y.shape == video.shape
  # Later frames change neither earlier latents nor earlier frames.
  other = video.at[:, 3:].set(7.0)
  changed = testing.apply(ENCODER, encoded, other)
  np.testing.assert_array_equal(changed[:, :2], latents[:, :2])
  assert np.abs(np.asarray(changed - latents)[:, 2]).max() > 0.01
  again = testing.apply(DECODER, decoded, changed)
  np.testing.assert_array_equal(again[:, :3], y[:, :3])
  # The first frame alone is an image of one frame.
  first = testing.apply(ENCODER, encoded, video[:, :1])
  np.testing.assert_allclose(first, latents[:, :1], rtol=1e-5, atol=1e-6)


def test_gradients_match_finite_differences():
  x = testing.normal(1, 3, 4, 4, 1)
  values = testing.random_values(ENCODER, x)

  def loss(at):
    return jnp.sum(jnp.sin(ENCODER.apply({"params": at[0]}, at[1])))

  testing.assert_gradients_match(loss, (values["params"], x), rtol=1e-5)


@pytest.mark.parametrize(
  ("run", "message"),
  [
    (lambda: ENCODER.clone(time_strides=()), "time_strides must be 1 or 2"),
    (lambda: ENCODER.clone(multipliers=(0, 1)), "multipliers must be positive"),
    (
      lambda: testing.initial_values(ENCODER, testing.normal(1, 4, 4, 4, 1)),
      r"1 \+ k \* 2 frames; got the shape \(1, 4, 4, 4, 1\)",
    ),
    (
      lambda: testing.initial_values(ENCODER, testing.normal(1, 3, 4, 1)),
      r"multiples of 2 as height and width",
    ),
  ],
)
def test_errors(run, message):
  with pytest.raises(ValueError, match=message):
    run()
