"""Tests for shared parts: one set of parameters, wherever they stand."""

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import feed_forward, remat, testing, token_context
from paxon.layers.attention import testing as attention_testing
from paxon.layers.stacks import shared, stack
from paxon.sharding import initialization, layout, mesh, variables

BATCH, LENGTH, EMBED = 2, 4, 4


class Layer(nn.Module):
  """A residual attention and feed-forward layer without norms."""

  attention: nn.Module
  feed_forward: nn.Module

  def __call__(self, x, context=token_context.ONE_DOCUMENT):
    """Returns the transformed `x`."""
    x += self.attention(x, context)
    return x + self.feed_forward(x)


def _attention(**kwargs):
  return attention_testing.grouped_query_attention(
    2, num_kv_heads=1, head_dim=2, **kwargs
  )


def _layer(label=None, **kwargs):
  part = _attention(**kwargs)
  if label is not None:
    part = shared.shared(label, part)
  return Layer(part, feed_forward.GatedFeedForward(3))


def _args():
  return (
    0.3 * testing.normal(BATCH, LENGTH, EMBED),
    testing.make_positions(BATCH, LENGTH),
    testing.ones(BATCH, LENGTH),
  )


LAYOUTS = {
  "scan": {},
  "unrolled": {"scan": False},
  "scan, remat": {"remat_policy": remat.save_nothing},
  "unrolled, remat": {"scan": False, "remat_policy": remat.save_nothing},
}


def _stack(num_layers, period, **kwargs):
  blocks = tuple(_layer(f"projection_{i}") for i in range(period))
  return stack.Stack(blocks, num_layers=num_layers, **kwargs)


def _loss(layer, values, *args):
  return jnp.sum(jnp.sin(layer.apply(values, *testing.in_context(*args))))


def _value_and_gradient(layer, values):
  return jax.jit(jax.value_and_grad(lambda v: _loss(layer, v, *_args())))(
    values
  )


def _assert_same(actual, expected, rtol=1e-5):
  assert jax.tree.structure(actual) == jax.tree.structure(expected)
  for a, e in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
    np.testing.assert_allclose(a, e, rtol=rtol, atol=1e-5)


@pytest.mark.nightly
def test_interleaved_sharing_in_all_layouts():
  """Attention shared by every third layer (google/praxis issue 52)."""
  period, num_layers = 3, 6
  values = testing.random_values(
    _stack(num_layers, period), *testing.in_context(*_args())
  )
  assert set(values["shared"]) == {f"projection_{i}" for i in range(period)}

  x, *rest = _args()

  # Compiled once for all layers.
  @jax.jit
  def apply(stored, attention, group, x):
    own = jax.tree.map(lambda v: v[group], stored)
    return _layer().apply(
      {"params": own | {"attention": attention}}, *testing.in_context(x, *rest)
    )

  def by_definition(values):
    y = x
    for i in range(num_layers):
      group, slot = divmod(i, period)
      stored = values["params"]["layers"][f"blocks_{slot}"]
      attention = values["shared"][f"projection_{slot}"]
      y = apply(stored, attention, np.int32(group), y)
    return jnp.sum(jnp.sin(y))

  expected = jax.value_and_grad(by_definition)(values)
  for settings in LAYOUTS.values():
    layer = _stack(num_layers, period, **settings)
    _assert_same(_value_and_gradient(layer, values), expected, rtol=1e-4)
  layer = _stack(num_layers, period)
  specs = testing.specs(layer, *testing.in_context(*_args()))
  separate = variables.separate_layers(values, specs)
  assert set(separate["params"]) == {f"layers_{i}" for i in range(num_layers)}
  y = jax.jit(lambda v: _loss(layer, v, *_args()))(separate)
  np.testing.assert_allclose(y, expected[0], rtol=1e-5)


def test_names_shapes_and_first_values_do_not_depend_on_the_layout():
  layers = [_stack(5, 2, **settings) for settings in LAYOUTS.values()]
  specs = [
    testing.specs(layer, *testing.in_context(*_args())) for layer in layers
  ]
  assert all(s == specs[0] for s in specs)
  own = {s.name: s for s in jax.tree.leaves(specs[0]["shared"])}
  assert set(own) == {
    f"shared/projection_{i}/{name}"
    for i in range(2)
    for name in ("query", "key", "value", "out")
  }
  query = own["shared/projection_1/query"]
  assert query.axes == ("embed", "heads", "head_dim")
  assert query.stacked == ()
  assert query.regularized
  assert query.trainable
  names = testing.axes(layers[0], *testing.in_context(*_args()))
  assert not [n for n in names if n.startswith("params/") and "/query" in n]
  queries = {k: {"query": v["query"]} for k, v in specs[0]["shared"].items()}
  first = jax.jit(lambda: initialization.initial_values(queries, 0))()
  first, second = (np.asarray(x) for x in jax.tree.leaves(first))
  assert np.any(first)
  assert np.any(first != second)


def test_gradients_match_finite_differences():
  layer = _stack(3, 2, remat_policy=remat.save_nothing)
  values = testing.random_values(layer, *testing.in_context(*_args()))
  x, *rest = _args()
  testing.assert_gradients_match(
    lambda at: _loss(layer, at[0], at[1], *rest), (values, x)
  )


class Everywhere(nn.Module):
  """One part in a plain layer and in stacks of two lengths."""

  layers: tuple[nn.Module, ...]

  def __call__(self, *args):
    """Returns what the layers make of the first argument."""
    x, *rest = args
    for layer in self.layers:
      x = layer(x, *rest)
    return x


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)], ids=str)
def test_one_set_whoever_calls_first(order):
  """By the sum of the gradients of places with parameters of their own."""

  def model(label):
    places = (
      stack.Stack((_layer(label),), num_layers=3),
      _layer(label),
      stack.Stack((_layer(label), _layer(label)), num_layers=2),
    )
    return Everywhere(tuple(places[i] for i in order))

  values = testing.random_values(model("one"), *testing.in_context(*_args()))
  assert set(values["shared"]) == {"one"}
  assert values["shared"]["one"]["query"].shape == (EMBED, 2, 2)
  untied = testing.specs(model(None), *testing.in_context(*_args()))

  def spread(path, spec):
    """The shared value in each place that has one of its own."""
    keys = [p.key for p in path]
    if "attention" not in keys:
      found = values
      for key in keys:
        found = found[key]
      return found
    one = values["shared"]["one"][keys[-1]]
    return jnp.broadcast_to(one, spec.shape)

  own = jax.tree_util.tree_map_with_path(spread, untied)
  expected = _value_and_gradient(model(None), own)
  actual = _value_and_gradient(model("one"), values)
  np.testing.assert_allclose(actual[0], expected[0], rtol=1e-5)
  for name, gradient in actual[1]["shared"]["one"].items():
    total = np.zeros(gradient.shape)
    for path, leaf in jax.tree_util.tree_leaves_with_path(expected[1]):
      if [p.key for p in path][-2:] == ["attention", name]:
        total += np.asarray(leaf).reshape(-1, *gradient.shape).sum(0)
    np.testing.assert_allclose(gradient, total, rtol=1e-4, atol=1e-5)


class Stages(nn.Module):
  """Applies copies of a layer to rows of its input, by `nn.vmap`."""

  layer: nn.Module

  @nn.compact
  def __call__(self, x):
    """Returns what each copy makes of its row."""
    part = shared.with_stores(self.layer, owner=self)
    run = nn.vmap(
      lambda part, x: part(x),
      variable_axes={shared.COLLECTION: None, True: 0},
      split_rngs={True: True},
      metadata_params={nn.PARTITION_NAME: "stages"},
    )
    return run(part.clone(parent=self, name="stages"), x)


def test_shared_under_vmap_of_a_scan():
  def layer():
    part = shared.shared("mlp", feed_forward.GatedFeedForward(3))
    blocks = (part, feed_forward.GatedFeedForward(3))
    return stack.Stack(blocks, num_layers=4, remat_policy=remat.save_nothing)

  x = testing.normal(3, BATCH, LENGTH, EMBED)
  values = testing.random_values(Stages(layer()), x)
  assert values["shared"]["mlp"]["up"].shape == (EMBED, 3)
  stages = values["params"]["stages"]["layers"]
  assert set(stages) == {"blocks_1"}
  assert stages["blocks_1"]["up"].shape == (3, 2, EMBED, 3)
  y = testing.apply(Stages(layer()), values, x)
  for i in range(3):
    own = {
      "params": jax.tree.map(lambda v: v[i], values["params"]["stages"]),  # noqa: B023
      "shared": values["shared"],
    }
    np.testing.assert_allclose(
      y[i], testing.apply(layer(), own, x[i]), rtol=1e-5, atol=1e-6
    )


def test_each_place_keeps_its_own_cache_and_window():
  """Decoding gives what the forward pass gives."""
  blocks = (_layer("one", window=2), _layer("one"))
  layer = stack.Stack(blocks, num_layers=3)
  x, positions, segments = _args()
  values = testing.random_values(
    layer, *testing.in_context(x, positions, segments)
  )
  assert set(values["shared"]) == {"one"}
  expected = testing.apply(
    layer, values, *testing.in_context(x, positions, segments)
  )
  cut = lambda a, b: [np.asarray(y)[:, a:b] for y in _args()]  # noqa: E731
  y, state = testing.apply(
    layer,
    values,
    *testing.in_context(*cut(0, 2), cache_length=LENGTH),
    mutable=["cache"],
  )
  outputs = [y]
  step = jax.jit(
    lambda v, *a: layer.apply(v, *testing.in_context(*a), mutable=["cache"])
  )
  for t in range(2, LENGTH):
    y, state = step({**values, **state}, *cut(t, t + 1))
    outputs.append(y)
  np.testing.assert_allclose(
    np.concatenate(outputs, axis=1), expected, rtol=1e-5, atol=1e-6
  )
  assert set(state) == {"cache"}
  caches = state["cache"]["layers"]
  keys = [
    np.asarray(caches[f"blocks_{i}"]["attention"]["part"]["cache"]["key"].value)
    for i in range(2)
  ]
  assert keys[0].shape == (1, BATCH, 1, LENGTH, 2)
  assert np.any(keys[0] != keys[1])


def test_sharded_equals_unsharded():
  layer = _stack(3, 2)
  values = testing.random_values(layer, *testing.in_context(*_args()))
  spec = mesh.MeshSpec.parse("fsdp=2,data=4")
  where = layout.Layout(mesh.make_mesh(spec))
  shardings = where.shardings(
    testing.specs(layer, *testing.in_context(*_args()))
  )
  args = [jnp.concatenate([a] * 4) for a in _args()]

  def run(values, *args):
    return jax.value_and_grad(lambda v: _loss(layer, v, *args))(values)

  placed = jax.device_put(values, shardings)
  actual = where.jit(run, out_shardings=(where.replicated, shardings))(
    placed, *(jax.device_put(a, where.batch_sharding(a.ndim)) for a in args)
  )
  _assert_same(actual, jax.jit(run)(values, *args), rtol=1e-4)


def test_variables_without_the_shared_ones_are_an_error():
  layer = _stack(2, 1)
  values = testing.random_values(layer, *testing.in_context(*_args()))
  message = r"do not have shared/projection_0, .* shared\('projection_0'\)"
  with pytest.raises(ValueError, match=message):
    layer.apply({"params": values["params"]}, *testing.in_context(*_args()))


@pytest.mark.parametrize(
  ("other", "message"),
  [
    (feed_forward.GatedFeedForward(5), r"shape \(4, 5\).* \(4, 3\)"),
    (feed_forward.FeedForward(3), r"up_bias"),
  ],
  ids=["shape", "name"],
)
def test_places_that_do_not_fit_together_are_an_error(other, message):
  parts = feed_forward.GatedFeedForward(3), other
  layer = Everywhere(tuple(shared.shared("mlp", p) for p in parts))
  with pytest.raises(ValueError, match=r"does not match.*" + message):
    testing.specs(layer, _args()[0])


def test_a_label_that_is_a_part_of_the_model_is_an_error():
  layer = Everywhere((_layer("layers_1"), _layer("layers_0")))
  with pytest.raises(Exception, match=r"layers_[01]"):
    testing.specs(layer, *testing.in_context(*_args()))


def test_rejects_a_shared_part_in_a_shared_part():
  message = r"shared\('outer'\) must not contain a shared .*, got 'inner'"
  with pytest.raises(ValueError, match=message):
    shared.shared("outer", _layer("inner"))


@pytest.mark.parametrize("label", ["", "a/b"])
def test_rejects_labels_that_are_no_names(label):
  with pytest.raises(ValueError, match=r"Shared\.label must be a name"):
    shared.shared(label, feed_forward.GatedFeedForward(3))
