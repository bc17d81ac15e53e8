"""Tests for the parts of wav2vec 2.0, against float64 numpy.

The whole encoder is compared with transformers in `layers/models/hugging_face`.
"""

import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import linear, testing
from paxon.layers.speech import wav2vec2
from paxon.layers.vision import convolutions

RNG = np.random.default_rng(0)
FRAMES, EMBED, GROUPS = 9, 4, 2


def test_weight_norm_is_that_of_each_position():
  kernel = testing.normal(3, 2, 4)
  module = wav2vec2.PositionWeightNorm()
  scale = RNG.uniform(0.5, 2, (3, 1, 1)).astype(np.float32)
  found = testing.apply(
    module, {"params": {"scale": jnp.asarray(scale)}}, kernel
  )
  wide = np.asarray(kernel, np.float64)
  for k in range(3):
    expected = wide[k] * scale[k, 0, 0] / np.sqrt((wide[k] ** 2).sum())
    np.testing.assert_allclose(found[k], expected, rtol=1e-6)


@pytest.mark.parametrize("width", [4, 5])
def test_positions_are_a_convolution_around_each_frame(width):
  module = wav2vec2.ConvPositions(
    convolutions.Conv(
      EMBED,
      (width,),
      groups=GROUPS,
      padding=convolutions.Padding.VALID,
      kernel_axes=(None, "embed"),
    ),
    activation=jnp.tanh,
  )
  x = testing.normal(1, FRAMES, EMBED)
  values = testing.random_values(module, x)
  found = testing.apply(module, values, x)
  conv = values["params"]["conv"]
  kernel, bias = (np.asarray(conv[k], np.float64) for k in ("kernel", "bias"))
  rows, size = np.asarray(x[0], np.float64), EMBED // GROUPS
  for t in range(FRAMES):
    for d in range(EMBED):
      total = bias[d]
      first = d // size * size
      for k in range(width):
        source = t + k - width // 2
        if 0 <= source < FRAMES:
          part = rows[source, first : first + size]
          total += part @ kernel[k, :, d]
      np.testing.assert_allclose(found[0, t, d], np.tanh(total), atol=1e-5)


def test_each_convolution_needs_an_entry_for_its_norm():
  part = linear.Linear(EMBED, kernel_axes=("embed", None))
  with pytest.raises(ValueError, match="each of the 1 convolutions, got 2"):
    wav2vec2.Wav2Vec2Encoder(
      convolutions=[convolutions.Conv(EMBED, (3,))],
      norms=[None, None],
      feature_norm=part,
      projection=part,
      position_embedding=part,
      stack=part,
    )
