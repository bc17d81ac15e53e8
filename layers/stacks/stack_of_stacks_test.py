"""Tests for stacks of stacks, and for what a layer knows of its number."""

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import feed_forward, remat, summaries, testing
from paxon.layers.norms import rms_norm
from paxon.layers.stacks import stack
from paxon.sharding import variables

OUTER, INNER, EMBED = 3, 2, 4


class Layer(nn.Module):
  """A residual feed-forward layer that tells the size of its input."""

  feed_forward: nn.Module
  norm: nn.Module

  def __call__(self, x):
    """Returns the transformed `x`."""
    summaries.summarize(self, "size", jnp.max(jnp.abs(x)))
    return x + self.feed_forward(self.norm(x))


class Numbered(nn.Module):
  """Writes an entry of a table, that of its number, into a column."""

  def __call__(self, x, *, layer_index):
    """Returns `x` with one more column filled."""
    table = jnp.arange(10.0, 10.0 + OUTER * INNER)
    column = jnp.arange(x.shape[-1]) == layer_index
    return x + jnp.where(column, table[layer_index], 0)[None, None, :]


def _stacks(outer=None, inner=None):
  layer = Layer(feed_forward.GatedFeedForward(8), rms_norm.RmsNorm())
  small = stack.Stack((layer,), num_layers=INNER, **(inner or {}))
  return stack.Stack((small,), num_layers=OUTER, **(outer or {}))


def _x():
  return testing.normal(2, 3, EMBED)


def _loop(values, x):
  """The definition: a loop over loops of single layers."""
  layer = Layer(feed_forward.GatedFeedForward(8), rms_norm.RmsNorm())
  stored = values["params"]["layers"]["blocks_0"]["layers"]["blocks_0"]
  for at in np.ndindex(OUTER, INNER):
    own = jax.tree.map(lambda v, at=at: v[at], stored)
    x = layer.apply({"params": own}, x)
  return x


@pytest.mark.parametrize(
  ("outer", "inner"),
  [
    ({}, {}),
    ({"remat_policy": remat.save_nothing}, {"scan": False}),
    ({"scan": False}, {"remat_policy": remat.save_projections}),
  ],
)
def test_a_stack_is_a_block(outer, inner):
  layers = _stacks(outer, inner)
  values = testing.random_values(layers, _x())
  np.testing.assert_allclose(
    testing.apply(layers, values, _x()),
    jax.jit(_loop)(values, _x()),
    rtol=1e-5,
    atol=1e-5,
  )


def test_layers_of_both_stacks_may_be_separate():
  layers = _stacks()
  values = testing.random_values(layers, _x())
  specs = testing.specs(layers, _x())
  separate = variables.separate_layers(values, specs)
  assert set(separate["params"]) == {"layers_0", "layers_1", "layers_2"}
  assert set(separate["params"]["layers_2"]) == {"layers_0", "layers_1"}
  np.testing.assert_allclose(
    testing.apply(layers, separate, _x()),
    testing.apply(layers, values, _x()),
    rtol=1e-5,
    atol=1e-5,
  )


def test_variables_have_an_axis_for_each_stack():
  specs = testing.specs(_stacks(), _x())
  up = specs["params"]["layers"]["blocks_0"]["layers"]["blocks_0"]
  up = up["feed_forward"]["up"]
  assert up.shape == (OUTER, INNER, EMBED, 8)
  assert up.axes == ("layers", "layers", "embed", "mlp")
  assert up.stacked == (("layers", 1), ("layers", 1))
  assert up.layer_shape == (EMBED, 8)


def test_first_values_differ_in_all_layers_and_not_by_layout():
  scanned = testing.initial_values(_stacks(), _x())
  unrolled = testing.initial_values(_stacks({"scan": False}), _x())
  jax.tree.map(np.testing.assert_array_equal, scanned, unrolled)
  stored = scanned["params"]["layers"]["blocks_0"]["layers"]["blocks_0"]
  up = np.asarray(stored["feed_forward"]["up"])
  assert len(np.unique(up.reshape(OUTER * INNER, -1)[:, 0])) == OUTER * INNER


def test_every_layer_tells_its_own_summaries():
  layers = _stacks()
  values = testing.random_values(layers, _x())
  _, state = testing.apply(layers, values, _x(), mutable=[summaries.COLLECTION])
  told = jax.tree.leaves(state)
  assert [t.shape for t in told] == [(OUTER, INNER)]
  np.testing.assert_allclose(told[0][0, 0], np.max(np.abs(_x())), rtol=1e-6)
  assert len(np.unique(told[0])) == OUTER * INNER


@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.parametrize("inner_layers", [1, 2])
def test_layers_of_stacks_of_stacks_count_through(scan, inner_layers):
  small = stack.Stack(
    (Numbered(),), num_layers=inner_layers, pass_layer_index=True, scan=scan
  )
  layers = stack.Stack((small,), num_layers=OUTER, pass_layer_index=True)
  y = testing.apply(layers, {}, jnp.zeros((1, 1, OUTER * INNER)))
  total = OUTER * inner_layers
  expected = [10.0 + i if i < total else 0.0 for i in range(OUTER * INNER)]
  np.testing.assert_array_equal(y[0, 0], expected)


@pytest.mark.parametrize("num_layers", [4, 5])
def test_layers_of_a_pattern_and_of_a_remainder_count_through(num_layers):
  layers = stack.Stack(
    (Numbered(), Numbered()), num_layers=num_layers, pass_layer_index=True
  )
  y = testing.apply(layers, {}, jnp.zeros((1, 1, num_layers)))
  np.testing.assert_array_equal(y[0, 0], 10.0 + np.arange(num_layers))


def test_without_the_field_nothing_is_passed():
  """The loop has no number to carry, so programs stay what they were."""
  layers = _stacks()
  values = testing.random_values(layers, _x())
  jaxpr = jax.make_jaxpr(layers.apply)(values, _x())
  loop = next(e for e in jaxpr.eqns if e.primitive.name == "scan")
  kinds = {v.aval.dtype for v in loop.invars}
  assert kinds == {jnp.dtype("float32")}


def test_layers_count_through_while_decoding():
  """Where the cache is carried through the loop."""

  class Remembering(nn.Module):
    """Numbered, with a cache that counts its calls."""

    @nn.compact
    def __call__(self, x, *, layer_index):
      calls = self.variable("cache", "calls", lambda: jnp.zeros((), jnp.int32))
      calls.value += 1
      return Numbered()(x, layer_index=layer_index)

  layers = stack.Stack(
    (Remembering(), Remembering()), num_layers=5, pass_layer_index=True
  )
  x = jnp.zeros((1, 1, 5))
  _, cache = testing.apply(layers, {}, x, mutable=["cache"])
  y, cache = testing.apply(layers, cache, x, mutable=["cache"])
  np.testing.assert_array_equal(y[0, 0], 10.0 + np.arange(5))
  assert {int(c) for leaf in jax.tree.leaves(cache) for c in leaf.ravel()} == {
    2
  }


@pytest.mark.parametrize("scan", [True, False], ids=["scan", "unrolled"])
def test_stacks_are_applied_one_after_another(scan):
  """Layers of 8, then of 12: each by itself is the definition."""
  x, kinds = _x(), [(8, 1), (12, 2)]
  layers = [
    Layer(feed_forward.GatedFeedForward(f), rms_norm.RmsNorm())
    for f, _ in kinds
  ]
  model = stack.Stacks(
    tuple(
      stack.Stack((layer,), num_layers=number, scan=scan)
      for layer, (_, number) in zip(layers, kinds, strict=True)
    )
  )
  y, values = jax.jit(model.init_with_output)(jax.random.key(0), x)
  values = nn.unbox(values)
  for i, (layer, (width, number)) in enumerate(zip(layers, kinds, strict=True)):
    stored = values["params"][f"stacks_{i}"]["layers"]["blocks_0"]
    assert stored["feed_forward"]["up"].shape == (number, EMBED, width)
    for at in range(number):
      own = jax.tree.map(lambda v, at=at: v[at], stored)
      x = testing.apply(layer, {"params": own}, x)
  np.testing.assert_allclose(y, x, rtol=1e-5, atol=1e-6)


def test_stacks_that_cannot_be_joined_are_errors():
  with pytest.raises(ValueError, match=r"Stacks\.stacks must not be empty"):
    stack.Stacks(())
  numbered = stack.Stack((Numbered(),), num_layers=2, pass_layer_index=True)
  with pytest.raises(ValueError, match=r"stacks\[0\]\.pass_layer_index is set"):
    stack.Stacks((numbered,))
