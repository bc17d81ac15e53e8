"""Tests for convolutions, against float64 numpy from the definition."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import testing
from paxon.layers.norms import batch_norm
from paxon.layers.vision import convolutions

Padding = convolutions.Padding
MASK = testing.array([[1] * 7, [1] * 4 + [0] * 3], bool)
SIZES = {1: (7,), 2: (7, 6), 3: (7, 5, 4)}


def _around(padding, span, size, stride):
  """Returns the zeros before and after, and the number of outputs."""
  if padding is Padding.VALID:
    before, after = 0, 0
  elif padding is Padding.CAUSAL:
    before, after = span - 1, 0
  elif padding is Padding.CENTERED:
    before, after = (span - 1) // 2, span - 1 - (span - 1) // 2
  else:
    out = -(-size // stride)
    total = max((out - 1) * stride + span - size, 0)
    before, after = total // 2, total - total // 2
  return before, (before + size + after - span) // stride + 1


def _oracle(x, kernel, bias, layer, groups):
  """Sums one output position and channel at a time."""
  x, kernel = np.asarray(x, np.float64), np.asarray(kernel, np.float64)
  rank = kernel.ndim - 2

  def per_axis(value):
    return (value,) * rank if isinstance(value, int) else tuple(value)

  strides, dilations = per_axis(layer.strides), per_axis(layer.dilations)
  before, outs = [], []
  for axis in range(rank):
    span = dilations[axis] * (kernel.shape[axis] - 1) + 1
    padding = layer.padding
    if padding is Padding.CAUSAL and axis:
      padding = Padding.CENTERED
    zeros, out = _around(padding, span, x.shape[axis + 1], strides[axis])
    before.append(zeros)
    outs.append(out)
  per_group_in, per_group_out = kernel.shape[-2], kernel.shape[-1] // groups
  y = np.zeros((x.shape[0], *outs, kernel.shape[-1]))
  for place in itertools.product(*map(range, outs)):
    for tap in np.ndindex(kernel.shape[:-2]):
      at = [
        p * s + i * r - b
        for p, s, i, r, b in zip(
          place, strides, tap, dilations, before, strict=True
        )
      ]
      if any(not 0 <= i < n for i, n in zip(at, x.shape[1:-1], strict=True)):
        continue
      for g in range(groups):
        inside = slice(g * per_group_in, (g + 1) * per_group_in)
        to = slice(g * per_group_out, (g + 1) * per_group_out)
        y[(slice(None), *place, to)] += (
          x[(slice(None), *at, inside)] @ kernel[tap][:, to]
        )
  return y + (0 if bias is None else np.asarray(bias))


def _check(layer, x, groups):
  values = testing.random_values(layer, x)
  params = values["params"]
  expected = _oracle(x, params["kernel"], params.get("bias"), layer, groups)
  found = testing.apply(layer, values, x)
  assert found.shape == expected.shape
  np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("padding", Padding)
@pytest.mark.parametrize("rank", SIZES)
def test_matches_numpy(padding, rank):
  x = testing.normal(2, *SIZES[rank], 4)
  kernel, strides = (3, 2, 3)[:rank], (2, 1, 3)[:rank]
  layer = convolutions.Conv(6, kernel, strides, padding=padding, groups=2)
  _check(layer, x, 2)


@pytest.mark.parametrize("padding", Padding)
def test_dilation_and_even_kernels(padding):
  x = testing.normal(2, 7, 6, 3)
  layer = convolutions.Conv(
    5, (2, 3), dilations=(3, 2), padding=padding, use_bias=False
  )
  _check(layer, x, 1)


@pytest.mark.parametrize("padding", Padding)
def test_depthwise_matches_numpy(padding):
  x = testing.normal(2, 7, 4)
  layer = convolutions.DepthwiseConv((4,), 3, padding=padding)
  _check(layer, x, 4)


@pytest.mark.parametrize(
  "layer",
  [
    convolutions.Conv(4, (3, 3), 2, groups=2),
    convolutions.DepthwiseConv((3, 3), padding=Padding.CAUSAL),
    convolutions.Conv(4, (3, 3), weight_norm=convolutions.WeightNorm()),
    convolutions.Conv(4, (3, 3), weight_norm=convolutions.SpectralNorm()),
  ],
)
def test_gradients_match_finite_differences(layer):
  x = testing.normal(2, 7, 5, 4)
  values = testing.random_values(layer, x)
  # The vector of the spectral norm has no gradient; one direction of it does
  # not change what it has converged to.
  params, rest = values["params"], values
  if convolutions.SpectralNorm() == layer.weight_norm:
    layer = layer.clone(weight_norm=convolutions.SpectralNorm(40))

  def loss(at):
    return jnp.sum(jnp.sin(layer.apply({**rest, "params": at[0]}, at[1], MASK)))

  testing.assert_gradients_match(loss, (params, x), rtol=1e-5)


def test_causal_output_ignores_later_input():
  layer = convolutions.Conv(4, (3, 3), dilations=2, padding=Padding.CAUSAL)
  x = testing.normal(2, 7, 5, 4)
  values = testing.random_values(layer, x)
  before = np.asarray(testing.apply(layer, values, x))
  after = np.asarray(testing.apply(layer, values, x.at[:, 4].add(1.0)))
  np.testing.assert_array_equal(after[:, :4], before[:, :4])
  assert np.any(after[:, 4:] != before[:, 4:])


@pytest.mark.parametrize("padding", [Padding.CENTERED, Padding.CAUSAL])
@pytest.mark.parametrize("stride", [1, 2])
def test_padding_changes_nothing(padding, stride):
  layer = convolutions.ConvNormAct(
    convolutions.Conv(4, (3, 3), (stride, 1), padding=padding),
    batch_norm.BatchNorm(decay=0.9),
  )
  x = testing.normal(2, 7, 5, 4)
  values = testing.random_values(layer, x)
  bad = jnp.where(MASK[:, :, None, None], x, jnp.nan)
  whole = testing.apply(layer, values, bad, MASK)
  short = testing.apply(layer, values, x[1:, :4])
  np.testing.assert_allclose(
    whole[1:, : short.shape[1]], short, rtol=1e-6, atol=1e-6
  )
  assert not np.any(whole[1:, short.shape[1] :])
  # In training the moments are those of the real positions only.
  trained, update = testing.apply(
    layer, values, bad, MASK, deterministic=False, mutable=batch_norm.COLLECTION
  )
  other = jnp.where(MASK[:, :, None, None], x, 7.0)
  again, same = testing.apply(
    layer,
    values,
    other,
    MASK,
    deterministic=False,
    mutable=batch_norm.COLLECTION,
  )
  np.testing.assert_array_equal(trained, again)
  jax.tree.map(np.testing.assert_array_equal, update, same)


def test_mask_of_valid_windows():
  layer = convolutions.Conv(4, (3,), 2, padding=Padding.VALID)
  mask = testing.array([[1, 1, 0, 0, 0, 0, 0]], bool)
  assert layer.output_mask(mask).tolist() == [[True, False, False]]


def test_weight_norm_matches_numpy():
  layer = convolutions.WeightNorm()
  kernel = testing.normal(3, 2, 4, 5)
  values = testing.random_values(layer, kernel)
  wide = np.asarray(kernel, np.float64)
  norm = np.sqrt((wide**2).sum((0, 1, 2), keepdims=True))
  expected = wide / norm * (1 + np.asarray(values["params"]["scale"]))
  np.testing.assert_allclose(
    testing.apply(layer, values, kernel), expected, rtol=1e-5
  )


def test_spectral_norm_converges_to_the_singular_value():
  layer = convolutions.SpectralNorm(2)
  kernel = testing.normal(3, 2, 4, 5)
  values = testing.initial_values(layer, kernel)
  step = jax.jit(
    lambda v: layer.apply(
      v, kernel, deterministic=False, mutable=batch_norm.COLLECTION
    )
  )
  # One step from the definition.
  matrix = np.asarray(kernel, np.float64).reshape(-1, 5)
  right = np.asarray(values[batch_norm.COLLECTION]["vector"], np.float64)
  for _ in range(2):
    left = matrix @ right / np.linalg.norm(matrix @ right)
    right = left @ matrix / np.linalg.norm(left @ matrix)
  found, values = step(values)
  np.testing.assert_allclose(found, kernel / (left @ matrix @ right), rtol=1e-5)
  for _ in range(60):
    found, values = step(values)
  largest = np.linalg.svd(np.asarray(found, np.float64).reshape(-1, 5))[1][0]
  np.testing.assert_allclose(largest, 1, rtol=1e-5)
  # Evaluation keeps the vector.
  _, after = testing.apply(layer, values, kernel, mutable=batch_norm.COLLECTION)
  np.testing.assert_array_equal(
    after[batch_norm.COLLECTION]["vector"],
    values[batch_norm.COLLECTION]["vector"],
  )


def test_axes_and_dtypes():
  x = testing.normal(2, 7, 6, 4, dtype=jnp.bfloat16)
  layer = convolutions.Conv(
    8, (3, 3), weight_norm=convolutions.SpectralNorm(), dtype=jnp.bfloat16
  )
  assert testing.axes(layer, x) == {
    "params/kernel": (None, None, "embed", "mlp"),
    "params/bias": ("mlp",),
    "batch_stats/weight_norm/vector": ("mlp",),
  }
  depthwise = convolutions.DepthwiseConv((3, 3), dtype=jnp.bfloat16)
  assert testing.axes(depthwise, x) == {
    "params/kernel": (None, None, None, "embed"),
    "params/bias": ("embed",),
  }
  values = testing.random_values(layer, x)
  assert values["params"]["kernel"].dtype == jnp.float32
  assert testing.apply(layer, values, x).dtype == jnp.bfloat16


@pytest.mark.parametrize(
  ("make", "message"),
  [
    (lambda: convolutions.Conv(0, (3,)), r"Conv.output_dim must be positive"),
    (lambda: convolutions.Conv(4, ()), r"kernel_size must have 1 to 3 entries"),
    (lambda: convolutions.Conv(4, (3, 0)), r"kernel_size must have 2 positive"),
    (lambda: convolutions.Conv(4, (3, 3), (1,)), r"strides must have 2"),
    (lambda: convolutions.Conv(4, (3,), dilations=0), r"dilations must have"),
    (lambda: convolutions.Conv(4, (3,), groups=3), r"multiple of groups \(3\)"),
    (
      lambda: convolutions.DepthwiseConv((3,), 0),
      r"DepthwiseConv.multiplier must be positive, got 0",
    ),
    (
      lambda: convolutions.SpectralNorm(0),
      r"SpectralNorm.num_iterations must be positive",
    ),
  ],
)
def test_errors(make, message):
  with pytest.raises(ValueError, match=message):
    make()


def test_errors_of_the_input():
  key = jax.random.key(0)
  with pytest.raises(ValueError, match=r"needs an input of rank 4, batch, 2"):
    convolutions.Conv(4, (3, 3)).init(key, jnp.ones((2, 5, 4)))
  with pytest.raises(ValueError, match=r"groups \(2\) must divide the input's"):
    convolutions.Conv(4, (3,), groups=2).init(key, jnp.ones((2, 5, 3)))
