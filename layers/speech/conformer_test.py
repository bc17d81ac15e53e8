"""Tests for the Conformer, against float64 numpy from the definition."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import feed_forward, testing
from paxon.layers.attention import grouped_query
from paxon.layers.attention import mask as attention_mask
from paxon.layers.norms import batch_norm, layer_norm
from paxon.layers.speech import conformer
from paxon.layers.stacks import stack
from paxon.layers.vision import convolutions
from paxon.sharding import layout, mesh

Order = conformer.BlockOrder
EMBED, MLP, WIDTH = 8, 12, 4
X = testing.normal(2, 7, EMBED)
MASK = testing.array([[1] * 7, [1] * 4 + [0] * 3], bool)
STATS = batch_norm.COLLECTION


def _convolution(padding=convolutions.Padding.SAME, **kwargs):
  return conformer.LightConvolution(
    convolution=convolutions.DepthwiseConv(
      (WIDTH,), padding=padding, kernel_axes=(None, "mlp")
    ),
    **{"norm": batch_norm.BatchNorm(), **kwargs},
  )


def _block(order=Order.ATTENTION_CONVOLUTION, *, is_shared=False, **kwargs):
  norm = functools.partial(layer_norm.LayerNorm, use_bias=True)
  layer = functools.partial(
    feed_forward.FeedForward, MLP, activation=jax.nn.silu
  )
  fields = {"first": layer(), "first_norm": norm(), "final_norm": norm()}
  if not is_shared:
    fields |= {"last": layer(), "last_norm": norm()}
  if "attention" in order.value:
    rules = attention_mask.MaskRules(causal=False)
    fields["attention"] = grouped_query.GroupedQueryAttention(
      2, 2, 4, mask=rules
    )
    fields["attention_norm"] = norm()
  if "convolution" in order.value:
    fields["convolution"] = _convolution()
    fields["convolution_norm"] = norm()
  return conformer.ConformerBlock(order=order, **{**fields, **kwargs})


def _wide(tree):
  return jax.tree.map(lambda x: np.asarray(x, np.float64), tree)


def _sigmoid(x):
  return 1 / (1 + np.exp(-x))


def _mix(p, stats, x, before, mask):
  """One sequence at a time, one frame at a time; evaluation."""
  y = np.zeros_like(x)
  conv = p["convolution"]
  for b, row in enumerate(x):
    kept = np.flatnonzero(mask[b])
    up = row @ p["up"] + p["up_bias"]
    hidden = up * _sigmoid(row @ p["gate"] + p["gate_bias"])
    for t in kept:
      total = conv["bias"].copy()
      for i in range(WIDTH):
        source = t + i - before
        if source in kept:
          total += conv["kernel"][i, 0] * hidden[source]
      norm = p["norm"]
      total = (total - stats["mean"]) / np.sqrt(stats["variance"] + 1e-3)
      total = total * norm["scale"] + norm["bias"]
      y[b, t] = total * _sigmoid(total) @ p["down"] + p["down_bias"]
  return y


@pytest.mark.parametrize(
  ("padding", "before"),
  [
    (convolutions.Padding.SAME, (WIDTH - 1) // 2),
    (convolutions.Padding.CAUSAL, WIDTH - 1),
  ],
)
@pytest.mark.parametrize("mlp_dim", [None, 6])
def test_the_convolution_is_that_of_the_definition(padding, before, mlp_dim):
  layer = _convolution(padding, mlp_dim=mlp_dim)
  values = testing.random_values(layer, X, MASK)
  wide = _wide(values)
  stats = {k: np.abs(v) for k, v in wide[STATS]["norm"].items()}
  values = {**values, STATS: {"norm": jax.tree.map(np.float32, stats)}}
  expected = _mix(
    wide["params"], stats, np.asarray(X, np.float64), before, np.asarray(MASK)
  )
  # Padding may be anything.
  x = jnp.where(MASK[..., None], X, jnp.nan)
  np.testing.assert_allclose(
    testing.apply(layer, values, x, MASK),
    expected,
    rtol=1e-4,
    atol=1e-5,
  )
  whole = testing.apply(layer, values, X)
  np.testing.assert_allclose(whole[0], expected[0], rtol=1e-4, atol=1e-5)


def _norm(p, x):
  x = x - x.mean(axis=-1, keepdims=True)
  x = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + 1e-6)
  return x * p["scale"] + p["bias"]


def _feed_forward(p, x):
  hidden = x @ p["up"] + p["up_bias"]
  return hidden * _sigmoid(hidden) @ p["down"] + p["down_bias"]


@pytest.mark.nightly(keep=4)
@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("order", list(Order))
def test_the_block_adds_its_branches_in_order(order, is_shared):
  """Its attention and convolution are called as layers, with their inputs."""
  layer = _block(order, is_shared=is_shared)
  segments = MASK.astype(jnp.int32)
  positions = testing.make_positions(2, 7)
  values = testing.random_values(
    layer, *testing.in_context(X, positions, segments)
  )
  values = {
    **values,
    **(
      {STATS: jax.tree.map(jnp.abs, values[STATS])} if STATS in values else {}
    ),
  }
  p = _wide(values["params"])
  assert ("last" in p) is not is_shared
  x = np.asarray(X, np.float64)
  x = x + 0.5 * _feed_forward(p["first"], _norm(p["first_norm"], x))
  for name in order.value.split("_"):
    normed = jnp.asarray(_norm(p[f"{name}_norm"], x), jnp.float32)
    own = {"params": values["params"][name]}
    if name == "convolution":
      own[STATS] = values[STATS][name]
      branch = testing.apply(layer.convolution, own, normed, MASK)
    else:
      branch = testing.apply(
        layer.attention, own, *testing.in_context(normed, positions, segments)
      )
    x = x + np.asarray(branch, np.float64)
  last = "first" if is_shared else "last"
  x = x + 0.5 * _feed_forward(p[last], _norm(p[f"{last}_norm"], x))
  expected = _norm(p["final_norm"], x)
  found = testing.apply(
    layer, values, *testing.in_context(X, positions, segments)
  )
  kept = np.asarray(MASK)
  np.testing.assert_allclose(found[kept], expected[kept], rtol=2e-4, atol=2e-5)


def _step(layer, values, x, segments):
  """Returns the sum of squares of real frames, its gradient and the state."""

  def total(params):
    y, state = layer.apply(
      {**values, "params": params},
      *testing.in_context(x, None, segments, deterministic=False),
      mutable=[STATS],
    )
    return jnp.sum(jnp.where(segments[..., None] != 0, y, 0) ** 2), state

  return jax.value_and_grad(total, has_aux=True)(values["params"])


def test_padding_changes_nothing_in_training():
  """Neither loss, gradients nor averages, in a stack."""
  layers = stack.Stack([_block()], num_layers=2)
  segments = MASK.astype(jnp.int32)
  values = testing.random_values(layers, *testing.in_context(X, None, segments))
  step = jax.jit(functools.partial(_step, layers))
  (loss, state), gradient = step(values, X, segments)
  wide = jnp.pad(X, ((0, 0), (0, 3), (0, 0)), constant_values=5.0)
  wide = jnp.where(jnp.pad(MASK, ((0, 0), (0, 3)))[..., None], wide, 7.0)
  (other, others), found = step(
    values, wide, jnp.pad(segments, ((0, 0), (0, 3)))
  )
  np.testing.assert_allclose(other, loss, rtol=1e-5)
  for a, b in ((state, others), (gradient, found)):
    jax.tree.map(
      lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-3, atol=2e-4), a, b
    )


def test_sharded_equals_unsharded():
  """Batch norm over all devices, features over two."""
  layers = stack.Stack([_block()], num_layers=2)
  x = testing.normal(4, 7, EMBED)
  segments = jnp.concatenate([MASK, MASK]).astype(jnp.int32)
  values = testing.random_values(layers, *testing.in_context(x, None, segments))
  step = functools.partial(_step, layers)
  expected = jax.jit(step)(values, x, segments)
  spec = mesh.MeshSpec.parse("data=2,fsdp=2,tensor=2")
  where = layout.Layout(mesh.make_mesh(spec))
  split = where.batch_sharding(3), where.batch_sharding(2)
  shardings = where.shardings(
    testing.specs(layers, *testing.in_context(x, None, segments))
  )
  found = where.jit(step, in_shardings=(shardings, *split))(
    testing.place(values, shardings), *testing.place((x, segments), split)
  )
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-3, atol=2e-4),
    found,
    expected,
  )


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"last": None}, r"last and last_norm must both be set"),
    ({"attention": None}, r"attention must be set with order ATTENTION_CONVO"),
    ({"order": Order.ATTENTION}, r"convolution must not be set with order ATT"),
  ],
)
def test_rejects_fields_that_do_not_fit(fields, message):
  layer = _block()
  known = {f.name for f in dataclasses.fields(layer) if f.init}
  old = {name: getattr(layer, name) for name in known - {"parent", "name"}}
  with pytest.raises(ValueError, match=message):
    conformer.ConformerBlock(**{**old, **fields})


def test_there_is_no_cache():
  layer = _block()
  values = testing.random_values(layer, X)
  with pytest.raises(ValueError, match=r"no cache, got cache_length=9"):
    layer.apply(values, *testing.in_context(X, cache_length=9))
