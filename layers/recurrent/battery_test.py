"""What holds for every recurrent layer, by one battery.

Gradients are those of finite differences, padding reaches nothing, and calls
with a state give the same as one call; also in a stack.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import testing as layer_testing
from paxon.layers.norms import rms_norm
from paxon.layers.recurrent import (
  cells,
  diagonal,
  gated_delta_net,
  mamba2,
  testing,
)
from paxon.layers.stacks import block, stack

# Padding before, between and after documents; ids occur again.
PACKED = testing.segments("1111122220333", "0011111111100", "1222111333332")

_FROZEN = diagonal.DiagonalStateSpace(state_dim=6, step=0.3, chunk_length=4)
_TRAINED = _FROZEN.clone(rates=diagonal.legendre, train_rates=True)
_DELTA = gated_delta_net.GatedDeltaNet(
  num_heads=3, key_dim=4, value_dim=5, chunk_length=4
)
LAYERS = {
  "lstm": cells.Lstm(6),
  "lstm_praxis": cells.Lstm(6, cell_cap=0.4, forget_bias=1.0, activation=None),
  "lstm_norm": cells.Lstm(6, norm_epsilon=1e-2, output_dim=4),
  "lstm_cifg": cells.Lstm(6, couple_gates=True, output_dim=4, forget_bias=0.5),
  "gru": cells.Gru(6),
  "frozen": _FROZEN,
  "trained": _TRAINED,
  "gated": diagonal.GatedStateSpace(inner_dim=5, gate_dim=7, mixer=_TRAINED),
  "mamba2": mamba2.Mamba2(
    num_heads=4, head_dim=3, state_dim=5, num_groups=2, chunk_length=4
  ),
  "delta": _DELTA,
  "delta_grouped": _DELTA.clone(num_heads=4, num_key_heads=2),
}
# Steps of several tokens, and a prefill of one.
_MORE_SPLITS = {"gated": [[6, 9]], "mamba2": [[6, 9], list(range(1, 13))]}
_ALL = pytest.mark.parametrize("name", LAYERS)


def _inputs(layer):
  x = layer_testing.normal(*PACKED.shape, 6)
  return x, layer_testing.random_values(layer, x)


@pytest.mark.nightly(keep=3)
@_ALL
def test_gradients_match_finite_differences(name):
  x, values = _inputs(LAYERS[name])
  layer = LAYERS[name].clone(param_dtype=jnp.float64)

  def loss(at):
    args = layer_testing.in_context(at["x"], None, PACKED)
    y = layer.apply({"params": at["params"]}, *args)
    return jnp.sum(y * jnp.cos(jnp.arange(y.size).reshape(y.shape)))

  layer_testing.assert_gradients_match(
    loss, {"params": values["params"], "x": x}
  )


@pytest.mark.nightly(keep=4)
@_ALL
def test_padding_may_be_nan_and_gives_zeros(name):
  layer = LAYERS[name]
  x, values = _inputs(layer)
  is_real = np.asarray(PACKED)[..., None] != 0
  dirty = jnp.where(is_real, x, jnp.nan)

  def both(values, x):
    def call(x):
      return layer.apply(values, *layer_testing.in_context(x, None, PACKED))

    y, back = jax.vjp(call, x)
    return y, back(jnp.ones_like(y))[0]

  jitted = jax.jit(both)
  y, gradient = jitted(values, dirty)
  np.testing.assert_array_equal(y, jitted(values, x)[0])
  assert not np.any(np.where(is_real, 0, y))
  assert not np.any(np.where(is_real, 0, gradient))


def _check_steps(layer, *splits):
  x, values = _inputs(layer)
  args = layer_testing.in_context(x, None, PACKED)
  whole = layer_testing.apply(layer, values, *args)
  for each in splits:
    steps = testing.decode(layer, values, x, PACKED, each)
    np.testing.assert_allclose(steps, whole, rtol=1e-5, atol=5e-6)
  return x, values, whole


@pytest.mark.nightly(keep=2)
@_ALL
def test_steps_equal_the_whole_sequence(name):
  _check_steps(LAYERS[name], [4, 5, 6, 7, 8], *_MORE_SPLITS.get(name, ()))


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("name", ["gated", "mamba2"])
def test_a_stack_decodes_as_it_trains(name):
  layer = block.MixerBlock(norm=rms_norm.RmsNorm(), mixer=LAYERS[name])
  layers = stack.Stack([layer], num_layers=3)
  x, values, whole = _check_steps(layers, [5, 6, 7])
  unrolled = layers.clone(scan=False)
  args = layer_testing.in_context(x, None, PACKED)
  found = layer_testing.apply(unrolled, values, *args)
  np.testing.assert_allclose(found, whole, rtol=1e-5, atol=1e-5)
