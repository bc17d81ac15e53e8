"""Tests for MobileNetV2, against float64 numpy and torchvision's sizes."""

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import testing
from paxon.layers.norms import batch_norm
from paxon.layers.vision import mobile_net

_AVERAGES = batch_norm.COLLECTION
# Parameters of torchvision's models by width, without the classifier (1280 or
# 1792 by 1000, and 1000).
PARAMETERS = {1.0: 3_504_872 - 1_281_000}
SMALL = mobile_net.MobileNetV2(
  groups=((1, 8, 1, 1), (2, 12, 2, 2)),
  divisor=4,
  entry_dim=4,
  entry_stride=1,
  output_dim=10,
)


def _convolve(x, kernel, stride, *, depthwise=False):
  """Returns a centered convolution in float64, tap by tap."""
  size = kernel.shape[0]
  before, after = (size - 1) // 2, size // 2
  x = np.pad(x, ((0, 0), (before, after), (before, after), (0, 0)))
  height, width = (n - size + 1 for n in x.shape[1:3])
  y = 0
  for i, j in np.ndindex(size, size):
    seen = x[:, i : i + height, j : j + width]
    y = y + (seen * kernel[i, j, 0] if depthwise else seen @ kernel[i, j])
  return y[:, ::stride, ::stride]


def _part(params, averages, name, x, stride=1, *, activate=True):
  """Returns convolution, batch norm of the averages, and ReLU6."""
  values, moments = params[name], averages[name]["norm"]
  kernel = values["conv"]["kernel"]
  x = _convolve(x, kernel, stride, depthwise=name == "depthwise")
  x = (x - moments["mean"]) / np.sqrt(moments["variance"] + 1e-3)
  x = x * values["norm"]["scale"] + values["norm"]["bias"]
  return np.clip(x, 0, 6) if activate else x


def _oracle(values, x):
  values = jax.tree.map(lambda v: np.asarray(v, np.float64), values)
  params, averages = values["params"], values[_AVERAGES]
  x = _part(params, averages, "entry", np.asarray(x, np.float64))
  blocks = ((1, 8, 1), (2, 12, 2), (2, 12, 1))
  for i, (expansion, output_dim, stride) in enumerate(blocks):
    at = params[f"block_{i}"], averages[f"block_{i}"]
    y = x if expansion == 1 else _part(*at, "expand", x)
    y = _part(*at, "depthwise", y, stride)
    y = _part(*at, "project", y, activate=False)
    assert y.shape[-1] == output_dim
    x = x + y if stride == 1 and x.shape[-1] == output_dim else y
  return _part(params, averages, "last", x).mean((1, 2))


def test_matches_numpy():
  x = testing.normal(2, 8, 6, 3)
  values = testing.random_values(SMALL, x)
  values[_AVERAGES] = jax.tree.map(jnp.abs, values[_AVERAGES])
  found = testing.apply(SMALL, values, x)
  np.testing.assert_allclose(found, _oracle(values, x), rtol=1e-4, atol=1e-5)


def test_gradients_match_finite_differences():
  # Smooth, unlike ReLU6.
  model = SMALL.clone(activation=nn.tanh)
  x = testing.normal(2, 4, 4, 3)
  values = testing.random_values(model, x)
  rest = {_AVERAGES: values[_AVERAGES]}

  def loss(at):
    y, _ = model.apply(
      {"params": at[0], **rest}, at[1], deterministic=False, mutable=_AVERAGES
    )
    return jnp.sum(jnp.sin(y))

  testing.assert_gradients_match(loss, (values["params"], x), rtol=1e-5)


@pytest.mark.parametrize("multiplier", PARAMETERS)
def test_published_parameters(multiplier):
  model = mobile_net.MobileNetV2(multiplier=multiplier)
  tree = testing.specs(model, jnp.ones((1, 32, 32, 3)))
  specs = jax.tree.leaves(tree["params"])
  assert sum(np.prod(spec.shape) for spec in specs) == PARAMETERS[multiplier]


def test_channels_are_rounded():
  # Rounding down to 16 would take away more than a tenth of 18.
  rounded = [
    mobile_net.round_channels(n, 8) for n in (1.0, 12.0, 18.0, 22.4, 33.6)
  ]
  assert rounded == [8, 16, 24, 24, 32]


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"groups": ((1, 8, 1),)}, r"groups must be positive .* got \(1, 8, 1\)"),
    ({"multiplier": 0.0}, "multiplier must be positive"),
    ({"divisor": 0}, "divisor must be positive"),
  ],
)
def test_errors(fields, message):
  with pytest.raises(ValueError, match=message):
    mobile_net.MobileNetV2(**fields)
