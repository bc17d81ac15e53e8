"""Tests for vision transformers."""

import functools

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import feed_forward, linear, testing
from paxon.layers.attention import cross_attention, grouped_query
from paxon.layers.attention import mask as attention_mask
from paxon.layers.norms import layer_norm
from paxon.layers.stacks import block, stack
from paxon.layers.vision import vit


def _model(**kwargs):
  norm = functools.partial(layer_norm.LayerNorm, epsilon=1e-6)
  layer = block.TransformerBlock(
    norm(),
    grouped_query.GroupedQueryAttention(
      2, 2, 4, mask=attention_mask.MaskRules(causal=False)
    ),
    norm(),
    feed_forward.FeedForward(12, activation=nn.tanh),
  )
  fields = {
    "patch_size": 2,
    "projection": linear.Linear(8, kernel_axes=(None, "embed")),
    "positions": vit.PatchPositions(3, 2),
    "stack": stack.Stack([layer], num_layers=2),
    "final_norm": norm(),
  }
  return vit.VisionTransformer(**{**fields, **kwargs})


def _norm(params, x):
  x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)
  return x * params["scale"] + params["bias"]


def _attention(params, x, memory=None):
  memory = x if memory is None else memory
  query, key, value = (
    np.einsum("btd,dnh->bnth", each, params[name])
    for name, each in (("query", x), ("key", memory), ("value", memory))
  )
  logits = np.einsum("bnth,bnsh->bnts", query, key) / np.sqrt(4)
  probs = np.exp(logits - logits.max(-1, keepdims=True))
  probs /= probs.sum(-1, keepdims=True)
  context = np.einsum("bnts,bnsh->btnh", probs, value)
  return np.einsum("btnh,nhd->btd", context, params["out"])


def _feed_forward(params, x):
  hidden = np.tanh(x @ params["up"] + params["up_bias"])
  return hidden @ params["down"] + params["down_bias"]


def _oracle(params, images, before, after):
  """Cuts patches one at a time; all in float64."""
  params = jax.tree.map(lambda p: np.asarray(p, np.float64), params)
  images = np.asarray(images, np.float64)
  patches = np.stack(
    [
      images[:, 2 * i : 2 * i + 2, 2 * j : 2 * j + 2].reshape(len(images), -1)
      for i, j in np.ndindex(3, 2)
    ],
    axis=1,
  )
  x = patches @ params["projection"]["kernel"] + params["projection"]["bias"]
  x = x + params["positions"]["table"]

  def tokens(name, number):
    found = params.get(f"learned_tokens_{name}", np.zeros((0, 8)))
    assert len(found) == number
    return np.tile(found, (len(images), 1, 1))

  x = np.concatenate([tokens("before", before), x, tokens("after", after)], 1)
  layers = params["stack"]["layers"]["blocks_0"]
  for i in range(2):
    layer = jax.tree.map(lambda p, i=i: p[i], layers)
    normed = _norm(layer["attention_norm"], x)
    x = x + _attention(layer["attention"], normed)
    normed = _norm(layer["feed_forward_norm"], x)
    x = x + _feed_forward(layer["feed_forward"], normed)
  return _norm(params["final_norm"], x)


@pytest.mark.parametrize(("before", "after"), [(0, 0), (1, 2)])
def test_matches_numpy(before, after):
  model = _model(tokens_before=before, tokens_after=after)
  x = testing.normal(2, 6, 4, 3)
  values = testing.random_values(model, x)
  expected = _oracle(values["params"], x, before, after)
  found = testing.apply(model, values, x)
  np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
  for pooling, of_tokens in (
    (vit.pool_first, expected[:, 0]),
    (vit.pool_mean, expected.mean(1)),
    (vit.pool_max, expected.max(1)),
  ):
    np.testing.assert_allclose(pooling(found), of_tokens, rtol=1e-3, atol=1e-4)


def test_gradients_match_finite_differences():
  model = _model(pooling=vit.pool_mean, tokens_before=1)
  x = testing.normal(2, 6, 4, 3)
  values = testing.random_values(model, x)

  def loss(at):
    return jnp.sum(jnp.sin(model.apply(at[0], at[1])))

  testing.assert_gradients_match(loss, (values, x))


def test_patches_are_rows_of_the_image():
  images = testing.normal(2, 4, 6, 3)
  patches = vit.to_patches(images, 2)
  assert patches.shape == (2, 6, 12)
  np.testing.assert_array_equal(patches[1, 4], images[1, 2:4, 2:4].reshape(-1))
  again = vit.to_images(patches, 2, height=4, width=6)
  np.testing.assert_array_equal(again, images)
  with pytest.raises(ValueError, match=r"\(4 x 6\) must be multiples"):
    vit.to_patches(images, 4)


def _interpolate(table, rows, columns):
  """Doubles or keeps a grid bilinearly, one output at a time."""
  table = np.asarray(table, np.float64)
  out = np.zeros((rows, columns, table.shape[-1]))
  for i, j in np.ndindex(rows, columns):
    at = [
      np.clip((k + 0.5) * n / m - 0.5, 0, n - 1)
      for k, n, m in zip((i, j), table.shape, (rows, columns), strict=False)
    ]
    for near in np.ndindex(2, 2):
      index = [
        min(int(a) + s, n - 1)
        for a, s, n in zip(at, near, table.shape, strict=False)
      ]
      weight = np.prod(
        [
          (a - int(a)) if s else 1 - (a - int(a))
          for a, s in zip(at, near, strict=True)
        ]
      )
      out[i, j] += weight * table[tuple(index)]
  return out


def test_positions_are_interpolated_to_larger_images():
  layer = vit.PatchPositions(3, 2)
  values = {"params": {"table": testing.normal(6, 4)}}
  same = layer.apply(values, 3, 2, 4)
  np.testing.assert_array_equal(same, values["params"]["table"])
  expected = _interpolate(np.reshape(same, (3, 2, 4)), 6, 5)
  found = layer.apply(values, 6, 5, 4)
  np.testing.assert_allclose(
    found, expected.reshape(30, 4), rtol=1e-5, atol=1e-6
  )
  tokens = vit.PatchPositions(3, 2, tokens_before=2)
  table = np.concatenate([testing.normal(2, 4), same])
  found = tokens.apply({"params": {"table": table}}, 6, 5, 4)
  np.testing.assert_array_equal(found[:2], table[:2])
  np.testing.assert_array_equal(found[2:], layer.apply(values, 6, 5, 4))
  model = _model()
  x = testing.normal(1, 6, 4, 3)
  values = testing.random_values(model, x)
  assert testing.apply(model, values, testing.normal(1, 12, 10, 3)).shape == (
    (1, 30, 8)
  )


def test_positions_of_tokens_and_the_norm_of_embeddings():
  """A token with a position is a token whose vector is their sum."""
  norm = layer_norm.LayerNorm()
  x = testing.normal(2, 6, 4, 3)
  model = _model(
    tokens_before=1,
    positions=vit.PatchPositions(3, 2, tokens_before=1),
    embedding_norm=norm,
    stack=stack.Stack([_Identity()], num_layers=1),
    final_norm=None,
  )
  values = testing.random_values(model, x)
  params = jax.tree.map(np.asarray, values["params"])
  table = params["positions"]["table"]
  assert table.shape == (7, 8)
  patches = np.asarray(vit.to_patches(x, 2)) @ params["projection"]["kernel"]
  patches += params["projection"]["bias"][None, None]
  first = np.tile(params["learned_tokens_before"][None], (2, 1, 1))
  expected = np.concatenate([first, patches], axis=1) + table[None]
  expected = _norm(params["embedding_norm"], expected)
  np.testing.assert_allclose(
    testing.apply(model, values, x), expected, rtol=1e-4, atol=1e-5
  )
  with pytest.raises(ValueError, match=r"before them \(0\); there are 1 more"):
    _model(positions=vit.PatchPositions(3, 2, 1)).init(jax.random.key(0), x)


def test_attention_pooling_matches_numpy():
  model = vit.AttentionPooling(
    cross_attention.CrossAttention(2, 2, 4),
    norm=layer_norm.LayerNorm(epsilon=1e-6),
    feed_forward=feed_forward.FeedForward(12, activation=nn.tanh),
  )
  x = testing.normal(2, 5, 8)
  values = testing.random_values(model, x)
  params = jax.tree.map(np.float64, values["params"])
  query = np.tile(params["query"], (2, 1, 1))
  y = _attention(params["attention"], query, np.float64(x))
  normed = _norm(params["norm"], y)
  expected = (y + _feed_forward(params["feed_forward"], normed))[:, 0]
  found = testing.apply(model, values, x)
  np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
  bare = vit.AttentionPooling(cross_attention.CrossAttention(2, 2, 4))
  kept = {name: values["params"][name] for name in ("query", "attention")}
  found = testing.apply(bare, {"params": kept}, x)
  np.testing.assert_allclose(found, y[:, 0], rtol=1e-4, atol=1e-5)
  assert testing.axes(model, x)["params/query"] == (None, "embed")

  def loss(at):
    return jnp.sum(jnp.sin(model.apply(at[0], at[1])))

  testing.assert_gradients_match(loss, (values, x))


class _Identity(nn.Module):
  """Stands for a block."""

  def __call__(self, x, *args, **kwargs):
    return x


def test_axes_output_and_errors():
  model = _model(
    pooling=vit.pool_first,
    tokens_before=1,
    output=linear.Linear(5, activation=jnp.tanh),
  )
  x = testing.normal(2, 6, 4, 3)
  names = testing.axes(model, x)
  assert names["params/projection/kernel"] == (None, "embed")
  assert names["params/positions/table"] == (None, "embed")
  assert names["params/learned_tokens_before"] == (None, "embed")
  values = testing.random_values(model, x)
  y = testing.apply(model, values, x)
  assert y.shape == (2, 5)
  assert np.all(np.abs(y) < 1)
  with pytest.raises(ValueError, match=r"patch_size must be positive"):
    _model(patch_size=0)
  with pytest.raises(ValueError, match=r"tokens_after must not be negative"):
    _model(tokens_after=-1)
