"""Tests for residual networks."""

import functools

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import testing
from paxon.layers.norms import batch_norm
from paxon.layers.vision import convolutions, resnet
from paxon.sharding import variables

# The parameters of torchvision's models without the classifier (512 or 2048
# by 1000, and 1000): 11,689,512, 21,797,672, 25,557,032, 44,549,160 and
# 60,192,808 with it.
PARAMETERS = {
  18: 11_689_512 - 513_000,
  34: 21_797_672 - 513_000,
  50: 25_557_032 - 2_049_000,
  101: 44_549_160 - 2_049_000,
  152: 60_192_808 - 2_049_000,
}
_AVERAGES = batch_norm.COLLECTION


def _small(**kwargs):
  fields = {
    "channels": (4, 8),
    "blocks": (1, 2),
    "strides": (1, 2),
    "kernels": (3, 3),
    "entry_kernel": 3,
    "entry_stride": 1,
  }
  return resnet.ResNet(**{**fields, **kwargs})


def _convolve(x, kernel, stride):
  """Returns a centered convolution in float64, tap by tap."""
  size = kernel.shape[0]
  before = (size - 1) // 2
  after = size // 2
  x = np.pad(x, ((0, 0), (before, after), (before, after), (0, 0)))
  height, width = (n - size + 1 for n in x.shape[1:3])
  y = 0
  for i, j in np.ndindex(size, size):
    y = y + x[:, i : i + height, j : j + width] @ kernel[i, j]
  return y[:, ::stride, ::stride]


def _part(values, averages, name, x, stride, activate=True):
  """Returns convolution, batch norm of the averages, and ReLU."""
  params, moments = values[name], averages[name]["norm"]
  x = _convolve(x, params["conv"]["kernel"], stride)
  x = (x - moments["mean"]) / np.sqrt(moments["variance"] + 1e-3)
  x = x * (1 + params["norm"]["scale"]) + params["norm"]["bias"]
  return np.maximum(x, 0) if activate else x


def _oracle(values, x, bottleneck):
  values = jax.tree.map(lambda v: np.asarray(v, np.float64), values)
  params, averages = values["params"], values[_AVERAGES]
  x = _part(params, averages, "entry", np.asarray(x, np.float64), 1)
  # Maximum of 3 x 3 with stride 2, as XLA's SAME pads an even size: at the end.
  ends = ((0, 0), (0, 1), (0, 1), (0, 0))
  padded = np.pad(x, ends, constant_values=-np.inf)
  height, width = x.shape[1:3]
  x = np.max(
    [
      padded[:, i : i + height - 1 : 2, j : j + width - 1 : 2]
      for i, j in np.ndindex(3, 3)
    ],
    axis=0,
  )
  for name, first in (
    ("stage_0_block_0", 1),
    ("stage_1_block_0", 2),
    ("stage_1_block_1", 1),
  ):
    block, moments = params[name], averages[name]
    strides = (1, first, 1) if bottleneck else (first, 1)
    names = ("conv_in", "conv_mid", "conv_out")[: len(strides)]
    branch = x
    for part, stride in zip(names, strides, strict=True):
      is_last = part == names[-1]
      branch = _part(block, moments, part, branch, stride, not is_last)
    if branch.shape != x.shape:
      x = _part(block, moments, "shortcut", x, first, activate=False)
    x = np.maximum(x + branch, 0)
  return x.mean((1, 2))


@pytest.mark.parametrize("bottleneck", [False, True])
def test_matches_numpy(bottleneck):
  block = resnet.BottleneckBlock if bottleneck else resnet.BasicBlock
  model = _small(block=block)
  x = testing.normal(2, 8, 6, 3)
  values = testing.random_values(model, x)
  values[_AVERAGES] = jax.tree.map(jnp.abs, values[_AVERAGES])
  np.testing.assert_allclose(
    testing.apply(model, values, x),
    _oracle(values, x, bottleneck),
    rtol=1e-4,
    atol=1e-5,
  )


@pytest.mark.nightly(keep=2)
@pytest.mark.parametrize("depth", PARAMETERS)
def test_sizes_have_the_published_parameters(depth):
  model = resnet.ResNet(**resnet.SIZES[depth])
  tree = testing.specs(model, jnp.ones((1, 32, 32, 3)))
  specs = jax.tree.leaves(tree["params"])
  assert sum(np.prod(spec.shape) for spec in specs) == PARAMETERS[depth]


def test_gradients_match_finite_differences():
  model = _small(blocks=(1, 1), activation=nn.tanh, entry_max_pool=False)
  x = testing.normal(2, 4, 4, 3)
  values = testing.random_values(model, x)
  rest = {_AVERAGES: values[_AVERAGES]}

  def loss(at):
    y, _ = model.apply(
      {"params": at[0], **rest}, at[1], deterministic=False, mutable=_AVERAGES
    )
    return jnp.sum(jnp.sin(y))

  testing.assert_gradients_match(loss, (values["params"], x), rtol=1e-5)


def test_initial_scales_are_one():
  model = _small(block=resnet.BasicBlock)
  x = testing.normal(4, 8, 8, 3)
  values = testing.initial_values(model, x)
  stored = [
    value
    for path, value in jax.tree.leaves_with_path(values["params"])
    if path[-1].key == "scale"
  ]
  assert len(stored) == 8
  np.testing.assert_array_equal(np.concatenate(stored) + 1, 1)
  assert np.all(np.std(testing.apply(model, values, x), axis=0) > 0)


def test_blocks_with_a_zero_last_norm_are_identities():
  zero = batch_norm.BatchNorm(scale_init=nn.initializers.zeros)
  block = resnet.BasicBlock(4, last_norm=zero)
  x = jnp.abs(testing.normal(2, 4, 4, 4))
  values = testing.initial_values(block, x)
  np.testing.assert_array_equal(testing.apply(block, values, x), x)


def test_drop_rate_drops_whole_examples():
  block = resnet.BasicBlock(4, drop_rate=0.5, norm=batch_norm.BatchNorm())
  x = jnp.abs(testing.normal(64, 2, 2, 4))
  values = testing.random_values(block, x)
  y, _ = testing.apply(
    block,
    values,
    x,
    deterministic=False,
    rngs={"dropout": jax.random.key(0)},
    mutable=_AVERAGES,
  )
  kept = np.any(np.asarray(y != x), axis=(1, 2, 3))
  assert 16 < kept.sum() < 48


def test_stages_and_axes():
  model = _small(pooled=False, entry_max_pool=False)
  x = testing.normal(2, 8, 6, 3)
  values = testing.random_values(model, x)
  stages = testing.apply(model, values, x, method="features")
  assert [s.shape for s in stages] == [(2, 8, 6, 4), (2, 4, 3, 8)]
  np.testing.assert_array_equal(testing.apply(model, values, x), stages[-1])
  names = testing.axes(model, x)
  assert names["params/entry/conv/kernel"] == (None, None, None, "mlp")
  assert names["params/stage_1_block_0/conv_mid/conv/kernel"] == (
    (None, None, "embed", "mlp")
  )


def test_the_first_convolution_knows_a_block_with_settings():
  x = testing.normal(1, 8, 6, 3)
  shapes = [
    jax.tree.map(
      jnp.shape,
      variables.unbox(
        jax.eval_shape(_small(block=block).init, jax.random.key(0), x)
      ),
    )
    for block in (
      resnet.BottleneckBlock,
      functools.partial(resnet.BottleneckBlock, stride=1),
    )
  ]
  assert shapes[0] == shapes[1]


@pytest.mark.parametrize(
  ("make", "message"),
  [
    (lambda: _small(blocks=(1,)), r"ResNet.blocks must have a positive number"),
    (lambda: resnet.BottleneckBlock(6), r"multiple of 4, got 6"),
    (lambda: resnet.BasicBlock(0), r"output_dim must be positive"),
    (lambda: resnet.BasicBlock(4, drop_rate=1.0), r"drop_rate must be in"),
  ],
)
def test_errors(make, message):
  with pytest.raises(ValueError, match=message):
    make()


def test_fields_reach_the_convolutions():
  model = _small(
    dtype=jnp.bfloat16, padding=convolutions.Padding.SAME, entry_max_pool=False
  )
  x = testing.normal(1, 4, 4, 3)
  values = testing.random_values(model, x)
  assert testing.apply(model, values, x).dtype == jnp.bfloat16
