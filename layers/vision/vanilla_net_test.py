"""Tests for vanilla networks, against float64 numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import testing
from paxon.layers.vision import vanilla_net

SMALL = vanilla_net.VanillaNet(
  channels=(8, 16),
  blocks=(1, 2),
  strides=(1, 2),
  kernels=(3, 3),
  entry_kernel=3,
  entry_stride=1,
  entry_max_pool=False,
)


def _convolve(params, x, stride=1):
  """Returns the activation of a centered convolution, tap by tap."""
  kernel = params["kernel"]
  size = kernel.shape[0]
  before, after = (size - 1) // 2, size // 2
  x = np.pad(x, ((0, 0), (before, after), (before, after), (0, 0)))
  height, width = (n - size + 1 for n in x.shape[1:3])
  y = params["bias"]
  for i, j in np.ndindex(size, size):
    y = y + x[:, i : i + height, j : j + width] @ kernel[i, j]
  y = y[:, ::stride, ::stride]
  return np.sqrt(2 / 1.16) * np.where(y > 0, y, 0.4 * y)


def test_matches_numpy():
  x = testing.normal(2, 8, 6, 3)
  values = testing.random_values(SMALL, x)
  params = jax.tree.map(lambda v: np.asarray(v, np.float64), values["params"])
  expected = _convolve(params["entry"], np.asarray(x, np.float64))
  for name, stride in (
    ("stage_0_block_0", 1),
    ("stage_1_block_0", 2),
    ("stage_1_block_1", 1),
  ):
    expected = _convolve(params[f"{name}_in"], expected)
    expected = _convolve(params[f"{name}_mid"], expected, stride)
    expected = _convolve(params[f"{name}_out"], expected)
  np.testing.assert_allclose(
    testing.apply(SMALL, values, x),
    expected.mean((1, 2)),
    rtol=1e-4,
    atol=1e-5,
  )


def test_gradients_match_finite_differences():
  model = SMALL.clone(activation=jnp.tanh)
  x = testing.normal(2, 4, 4, 3)
  values = testing.random_values(model, x)

  def loss(at):
    return jnp.sum(jnp.sin(model.apply({"params": at[0]}, at[1])))

  testing.assert_gradients_match(loss, (values["params"], x), rtol=1e-5)


def test_the_mean_square_is_kept():
  x = testing.normal(200_000)
  y = vanilla_net.TailoredLeakyRelu(0.3)(x)
  np.testing.assert_allclose(jnp.mean(y * y), 1, rtol=0.01)


@pytest.mark.nightly
def test_signals_reach_the_end_of_deep_networks():
  fields = {"channels": (256,), "blocks": (12,), "pooled": False}
  model = SMALL.clone(**fields, strides=(1,), kernels=(1,))
  x = testing.normal(2, 2, 2, 3)
  y = testing.apply(model, testing.initial_values(model, x), x)
  # Of a position: kernels to more channels keep the sum of squares.
  energy = jnp.mean(jnp.sum(y * y, axis=-1)) / jnp.mean(jnp.sum(x * x, axis=-1))
  assert 0.1 < float(energy) < 10


def test_sizes_have_as_many_layers():
  for depth, fields in vanilla_net.SIZES.items():
    blocks = fields["blocks"]
    # The entry, and a classifier.
    assert 3 * sum(blocks) + 2 == depth


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"blocks": (1,)}, "VanillaNet.blocks must have a positive number"),
    ({"channels": (6, 8)}, "multiples of 4"),
  ],
)
def test_errors(fields, message):
  with pytest.raises(ValueError, match=message):
    SMALL.clone(**fields)
