"""Tests for stacks: every way to run one gives the same numbers."""

import functools

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import feed_forward, linear, remat, testing
from paxon.layers.attention import testing as attention_testing
from paxon.layers.norms import rms_norm
from paxon.layers.positions import rotary_embedding
from paxon.layers.stacks import block, stack
from paxon.sharding import target, variables

BATCH, LENGTH, EMBED = 2, 5, 6


def _block(window=None, dropout=None):
  return block.TransformerBlock(
    attention_norm=rms_norm.RmsNorm(),
    attention=attention_testing.grouped_query_attention(
      2,
      num_kv_heads=1,
      head_dim=4,
      rotary=rotary_embedding.Rotary(),
      window=window,
    ),
    feed_forward_norm=rms_norm.RmsNorm(),
    feed_forward=feed_forward.GatedFeedForward(8),
    dropout=dropout,
  )


def _stack(num_layers, blocks=None, **kwargs):
  blocks = blocks or (_block(window=2), _block())
  return stack.Stack(blocks, num_layers=num_layers, **kwargs)


def _args():
  return (
    testing.normal(BATCH, LENGTH, EMBED),
    testing.make_positions(BATCH, LENGTH),
    testing.ones(BATCH, LENGTH).at[1, -1].set(0),
  )


def _layer_values(values, index, period, num_layers):
  """The variables of one layer, from the documented storage."""
  group, slot = divmod(index, period)
  if group < num_layers // period:
    stored = values["params"]["layers"][f"blocks_{slot}"]
    return {"params": jax.tree.map(lambda x: x[group], stored)}
  return {"params": values["params"][f"layers_{index}"]}


def _loop(values, blocks, num_layers, x, *args):
  """The definition: a Python loop over single blocks."""
  for i in range(num_layers):
    own = _layer_values(values, i, len(blocks), num_layers)
    x = blocks[i % len(blocks)].apply(own, *testing.in_context(x, *args))
  return x


@functools.cache
def _looped(num_layers):
  """Values of a stack, and what the definition makes of them."""
  blocks = (_block(window=2), _block())
  values = testing.random_values(
    _stack(num_layers, blocks), *testing.in_context(*_args())
  )
  looped = jax.jit(lambda v, *a: _loop(v, blocks, num_layers, *a))
  return values, looped(values, *_args())


@pytest.mark.nightly(keep=3)
@pytest.mark.parametrize("num_layers", [1, 4, 5])
@pytest.mark.parametrize("scan", [True, False], ids=["scan", "unrolled"])
def test_equals_a_python_loop(num_layers, scan):
  layer = _stack(num_layers, scan=scan)
  values, expected = _looped(num_layers)
  actual = testing.apply(layer, values, *testing.in_context(*_args()))
  np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-6)


def _separate(layer, values):
  return variables.separate_layers(
    values, testing.specs(layer, *testing.in_context(*_args()))
  )


@pytest.mark.parametrize("num_layers", [4, 5])
def test_separate_layers_are_the_same_model_unrolled(num_layers):
  layer = _stack(num_layers)
  values, expected = _looped(num_layers)
  values = _separate(layer, values)
  names = {f"layers_{i}" for i in range(num_layers)}
  assert set(values["params"]) == names
  actual = testing.apply(layer, values, *testing.in_context(*_args()))
  np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-6)
  text = (
    jax.jit(lambda v, *a: layer.apply(v, *testing.in_context(*a)))
    .lower(values, *_args())
    .as_text()
  )
  assert "stablehlo.while" not in text


def _local_and_global():
  """Five layers that see two tokens, and one that sees all."""

  def attention(window):
    return attention_testing.grouped_query_attention(
      2, num_kv_heads=1, head_dim=4, window=window
    )

  return (attention(2),) * 5 + (attention(None),)


def test_five_local_layers_to_a_global_one_are_one_loop():
  blocks = _local_and_global()
  layer = stack.Stack(blocks, num_layers=14, remat_policy=remat.save_nothing)
  values = testing.random_values(layer, *testing.in_context(*_args()))
  assert set(values["params"]["layers"]) == {f"blocks_{i}" for i in range(6)}
  looped = jax.jit(lambda v, *a: _loop(v, blocks, 14, *a))
  np.testing.assert_allclose(
    testing.apply(layer, values, *testing.in_context(*_args())),
    looped(values, *_args()),
    rtol=1e-5,
    atol=1e-6,
  )
  jaxpr = jax.make_jaxpr(layer.apply)(values, *testing.in_context(*_args()))
  loops = [e for e in jaxpr.eqns if e.primitive.name == "scan"]
  assert [loop.params["length"] for loop in loops] == [2]


LAYOUTS = {
  "unrolled": {"scan": False},
  "scan, save nothing": {"remat_policy": remat.save_nothing},
  "unrolled, save projections": {
    "scan": False,
    "remat_policy": remat.save_projections,
  },
  "scan, save by name": {
    "remat_policy": remat.save_only(
      remat.ATTENTION_CONTEXT, remat.FEED_FORWARD_HIDDEN
    )
  },
}


def _gradients(layer, values):
  def loss(values, x):
    return jnp.sum(
      jnp.sin(layer.apply(values, *testing.in_context(x, *_args()[1:])))
    )

  return jax.jit(jax.grad(loss, argnums=(0, 1)))(values, _args()[0])


@pytest.fixture(name="scanned", scope="module")
def _scanned():
  values = testing.random_values(_stack(5), *testing.in_context(*_args()))
  return values, _gradients(_stack(5), values)


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_do_not_depend_on_the_layout(layout, scanned):
  values, expected = scanned
  actual = _gradients(_stack(5, **LAYOUTS[layout]), values)
  assert jax.tree.structure(actual) == jax.tree.structure(expected)
  for a, e in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
    np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-5)


def test_a_loop_on_one_cpu_saves_no_elementwise_results(monkeypatch):
  def num_saved(scan):
    layer = _stack(4, scan=scan)
    values = testing.random_values(layer, *testing.in_context(*_args()))
    _, backward = jax.vjp(
      lambda v: layer.apply(v, *testing.in_context(*_args())), values
    )
    return sum(x.size for x in jax.tree.leaves(backward))

  on_cpu, unrolled = num_saved(scan=True), num_saved(scan=False)
  assert on_cpu < 0.8 * unrolled
  monkeypatch.setattr(target, "is_cpu", lambda: False)
  assert on_cpu < 0.8 * num_saved(scan=True)


def test_a_loop_on_one_cpu_saves_bfloat16_as_float32():
  layer = _stack(4)
  x, *others = _args()
  values, x = jax.tree.map(
    lambda leaf: leaf.astype(jnp.bfloat16),
    (testing.random_values(layer, *testing.in_context(x, *others)), x),
  )
  y, backward = jax.vjp(
    lambda v: layer.apply(v, *testing.in_context(x, *others)), values
  )
  saved = jax.tree.leaves(backward)
  assert y.dtype == jnp.bfloat16
  assert sum(leaf.dtype == jnp.float32 for leaf in saved) > 8
  # The rest are the parameters themselves.
  assert sum(x.size for x in saved if x.dtype == jnp.bfloat16) == sum(
    x.size for x in jax.tree.leaves(values)
  )


def test_gradients_match_finite_differences():
  layer = _stack(3, remat_policy=remat.save_nothing)

  def loss(at):
    return jnp.sum(
      jnp.sin(layer.apply(at[0], *testing.in_context(at[1], *_args()[1:])))
    )

  values = testing.random_values(layer, *testing.in_context(*_args()))
  testing.assert_gradients_match(loss, (values, _args()[0]))


def test_variables_and_first_values_do_not_depend_on_the_layout():
  """One tree, one set of names, bit-equal values."""
  expected = testing.specs(_stack(5), *testing.in_context(*_args()))
  for settings in LAYOUTS.values():
    assert (
      testing.specs(_stack(5, **settings), *testing.in_context(*_args()))
      == expected
    )


def _plain_stack(num_layers, period=1, **kwargs):
  """A stack of one small layer, for what does not depend on the block."""
  blocks = (linear.Linear(EMBED, use_bias=False, activation=jnp.tanh),) * period
  return stack.Stack(blocks, num_layers=num_layers, **kwargs)


def test_first_values_are_bit_equal_scanned_and_unrolled():
  scanned, unrolled = (
    testing.initial_values(_plain_stack(3, scan=scan), _args()[0])
    for scan in (True, False)
  )
  jax.tree.map(np.testing.assert_array_equal, scanned, unrolled)


def test_first_values_depend_on_the_index_of_the_layer_only():
  by_period = {
    period: testing.initial_values(_plain_stack(5, period), _args()[0])
    for period in (1, 2, 3)
  }
  layers = [
    [_layer_values(v, i, period, 5)["params"] for i in range(5)]
    for period, v in by_period.items()
  ]
  for others in layers[1:]:
    jax.tree.map(np.testing.assert_array_equal, layers[0], others)
  assert np.any(layers[0][0]["kernel"] != layers[0][1]["kernel"])


def test_linen_init_makes_the_same_values_scanned_and_unrolled():
  def values(scan):
    run = jax.jit(_plain_stack(4, scan=scan).init)
    return variables.unbox(run(jax.random.key(0), _args()[0]))

  jax.tree.map(np.testing.assert_array_equal, values(True), values(False))


def test_only_a_scanned_stack_compiles_to_a_loop():
  values = testing.random_values(_plain_stack(4), _args()[0])

  def text(scan):
    layer = _plain_stack(4, scan=scan)
    gradient = jax.grad(lambda v: jnp.sum(layer.apply(v, _args()[0])))
    return jax.jit(gradient).lower(values).compile().as_text()

  texts = {scan: text(scan) for scan in (True, False)}
  assert " while(" in texts[True]
  assert " while(" not in texts[False]


def test_axes_and_names():
  axes = testing.axes(_stack(5), *testing.in_context(*_args()))
  assert axes["params/layers/blocks_0/attention/query"] == (
    "layers",
    "embed",
    "heads",
    "head_dim",
  )
  assert axes["params/layers_4/feed_forward/up"] == ("embed", "mlp")
  tops = {"/".join(name.split("/")[1:3]) for name in axes}
  assert {t for t in tops if t.startswith("layers/")} == {
    "layers/blocks_0",
    "layers/blocks_1",
  }
  assert {t.split("/")[0] for t in tops} == {"layers", "layers_4"}


def test_specs_know_the_period():
  specs = jax.tree.leaves(
    testing.specs(_stack(5), *testing.in_context(*_args()))
  )
  stacked = {s.stacked for s in specs if "/blocks_" in s.name}
  assert stacked == {(("layers", 2),)}
  assert {s.shape[0] for s in specs if "/blocks_" in s.name} == {2}


def test_one_block_standing_twice_is_two_layers():
  layer = _plain_stack(2, period=2)
  assert layer.blocks[0] is layer.blocks[1]
  values = testing.initial_values(layer, _args()[0])["params"]["layers"]
  assert set(values) == {"blocks_0", "blocks_1"}
  first, second = (values[f"blocks_{i}"]["kernel"] for i in range(2))
  assert np.any(np.asarray(first) != np.asarray(second))


class Counting(nn.Module):
  """Counts its calls and keeps a running sum in collections of its own."""

  @nn.compact
  def __call__(self, x):
    """Returns `x` plus a random number."""
    count = self.variable("statistics", "count", jnp.zeros, (), jnp.int32)
    count.value += 1
    noise = jax.random.normal(self.make_rng("my_noise"), x.shape)
    self.sow("my_records", "noise", noise)
    return x + noise


@pytest.mark.nightly(keep=2)
@pytest.mark.parametrize(
  "policy", [None, remat.save_nothing], ids=["save all", "remat"]
)
@pytest.mark.parametrize("scan", [True, False], ids=["scan", "unrolled"])
def test_user_named_collections_and_random_streams(scan, policy):
  """Kept through init and apply (google/praxis issue 22)."""
  layer = stack.Stack(
    [Counting()], num_layers=3, scan=scan, remat_policy=policy
  )
  x = testing.normal(2, 3)
  rngs = {"my_noise": jax.random.key(1), "params": jax.random.key(0)}
  state = jax.jit(layer.init)(rngs, x)
  counts = {"statistics": variables.unbox(state)["statistics"]}
  y, state = testing.apply(
    layer,
    counts,
    x,
    rngs={"my_noise": jax.random.key(2)},
    mutable=["statistics", "my_records"],
  )
  own = state["statistics"]["layers"]["blocks_0"]
  assert own["count"].tolist() == [2, 2, 2]
  (noise,) = state["my_records"]["layers"]["blocks_0"]["noise"]
  assert noise.shape == (3, 2, 3)
  np.testing.assert_allclose(y, x + noise.sum(0), rtol=1e-5, atol=1e-6)
  # Each layer has a key of its own.
  assert len(np.unique(np.asarray(noise))) == noise.size


def test_dropout_is_the_same_scanned_and_unrolled():
  def run(scan):
    layer = _stack(4, (_block(dropout=nn.Dropout(0.5)),), scan=scan)
    values = testing.random_values(layer, *testing.in_context(*_args()))
    rngs = {"dropout": jax.random.key(3)}
    return testing.apply(
      layer,
      values,
      *testing.in_context(*_args(), deterministic=False),
      rngs=rngs,
    )

  np.testing.assert_allclose(run(True), run(False), rtol=1e-6, atol=1e-6)


@pytest.fixture(name="forward", scope="module")
def _forward():
  """Values of a scanned stack, and what it gives in one pass."""
  x, positions, _ = _args()
  args = (x, positions, testing.ones(BATCH, LENGTH))
  values = testing.random_values(_stack(3), *testing.in_context(*args))
  return (
    args,
    values,
    testing.apply(_stack(3), values, *testing.in_context(*args)),
  )


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("layout", ["scan", "separate", *LAYOUTS])
def test_decoding_gives_what_the_forward_pass_gives(layout, forward):
  layer = _stack(3, **LAYOUTS.get(layout, {}))
  args, values, expected = forward
  if layout == "separate":
    values = _separate(layer, values)
  y, state = testing.apply(
    layer,
    values,
    *testing.in_context(
      *(np.asarray(a)[:, :3] for a in args), cache_length=LENGTH
    ),
    mutable=["cache"],
  )
  step = jax.jit(
    lambda v, *a: layer.apply(v, *testing.in_context(*a), mutable=["cache"])
  )
  outputs = [y]
  for t in range(3, LENGTH):
    y, state = step(
      {**values, **state}, *(np.asarray(a)[:, t : t + 1] for a in args)
    )
    outputs.append(y)
  np.testing.assert_allclose(
    np.concatenate(outputs, axis=1), expected, rtol=1e-5, atol=1e-6
  )
  if layout == "separate":
    assert set(state["cache"]) == {"layers_0", "layers_1", "layers_2"}
    return
  key = state["cache"]["layers"]["blocks_0"]["attention"]["cache"]["key"]
  # One head for all is never split.
  assert key.names == ("layers", "batch", None, "kv_length", "head_dim")
  assert key.value.shape == (1, BATCH, 1, LENGTH, 4)


def test_is_hashable_when_built_from_a_list():
  assert hash(_stack(2, [_block()])) == hash(_stack(2, (_block(),)))


def test_rejects_empty_stacks():
  with pytest.raises(ValueError, match=r"Stack.blocks must not be empty"):
    stack.Stack((), num_layers=2)
  with pytest.raises(ValueError, match=r"Stack.num_layers must be positive"):
    _stack(0)
