"""Tests for residual adapters, against float64 numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import feed_forward, testing
from paxon.layers.attention import testing as attention_testing
from paxon.layers.norms import layer_norm
from paxon.layers.stacks import adapter, block

BATCH, LENGTH, EMBED, RANK, TASKS = 3, 4, 5, 2, 4
LAYER = adapter.ResidualAdapter(RANK, TASKS, norm=layer_norm.LayerNorm())
OF_SEQUENCES = testing.array([2, 0, 3], np.int32)
# The last is none of the tasks.
OF_TOKENS = testing.array([[0, 1, 2, 3], [3, 3, 0, 1], [2, 2, 1, 4]], np.int32)


def _wide(tree):
  return jax.tree.map(lambda v: np.asarray(v, np.float64), tree)


def _branch(x, params, tasks):
  """Applies the network of the task of each token alone."""
  y = np.zeros_like(x)
  for b, t in np.ndindex(x.shape[:2]):
    k = tasks[b, t] if np.ndim(tasks) == 2 else tasks[b]
    if k >= TASKS:
      continue
    token = x[b, t]
    if "norm" in params:
      token = (token - token.mean()) / np.sqrt(token.var() + 1e-6)
      token = token * params["norm"]["scale"] + params["norm"]["bias"]
    hidden = token @ params["down"][k] + params["down_bias"][k]
    y[b, t] = np.maximum(hidden, 0) @ params["up"][k] + params["up_bias"][k]
  return y


@pytest.mark.parametrize(
  "tasks", [OF_SEQUENCES, OF_TOKENS], ids=["sequences", "tokens"]
)
def test_branch_and_gradients_match_numpy(tasks):
  x = testing.normal(BATCH, LENGTH, EMBED)
  values = testing.random_values(LAYER, x, tasks)
  expected = _wide(x) + _branch(
    _wide(x), _wide(values["params"]), np.asarray(tasks)
  )
  found = testing.apply(LAYER, values, x, tasks)
  np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)

  def loss(at):
    return jnp.sum(jnp.sin(LAYER.apply({"params": at[0]}, at[1], tasks)))

  testing.assert_gradients_match(loss, (values["params"], x), rtol=1e-5)


def test_only_the_adapters_of_the_tasks_have_gradients():
  x = testing.normal(BATCH, LENGTH, EMBED)
  values = testing.random_values(LAYER, x, OF_SEQUENCES)
  slopes = jax.jit(
    jax.grad(lambda v: jnp.sum(jnp.sin(LAYER.apply(v, x, OF_SEQUENCES))))
  )(values)["params"]
  for name in ("down", "down_bias", "up", "up_bias"):
    slope = np.asarray(slopes[name])
    used = np.abs(slope).reshape(TASKS, -1).max(1) > 0
    np.testing.assert_array_equal(used, [True, False, True, True])


def test_an_adapter_begins_as_the_identity():
  x = testing.normal(BATCH, LENGTH, EMBED)
  values = testing.initial_values(LAYER, x, OF_TOKENS)
  np.testing.assert_array_equal(testing.apply(LAYER, values, x, OF_TOKENS), x)


@pytest.mark.parametrize("placement", adapter.Placement)
def test_feed_forward_layers_have_an_adapter(placement):
  layer = adapter.AdaptedFeedForward(
    feed_forward.FeedForward(6), LAYER.clone(norm=None), placement
  )
  x = testing.normal(BATCH, LENGTH, EMBED)
  values = testing.random_values(layer, x, OF_TOKENS)
  params = values["params"]
  y = testing.apply(layer.feed_forward, {"params": params["feed_forward"]}, x)
  given = y if placement is adapter.Placement.SEQUENTIAL else x
  expected = _wide(y) + _branch(
    _wide(given), _wide(params["adapter"]), np.asarray(OF_TOKENS)
  )
  found = testing.apply(layer, values, x, OF_TOKENS)
  np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_a_block_has_an_adapter_of_one_task():
  def make(layer):
    return block.TransformerBlock(
      layer_norm.LayerNorm(),
      attention_testing.grouped_query_attention(1, num_kv_heads=1, head_dim=4),
      layer_norm.LayerNorm(),
      layer,
    )

  plain = feed_forward.FeedForward(6)
  adapted = adapter.AdaptedFeedForward(plain, adapter.ResidualAdapter(RANK))
  x = testing.normal(BATCH, LENGTH, EMBED)
  values = testing.initial_values(make(adapted), x)
  params = dict(values["params"])
  args = testing.in_context(x, deterministic=False)
  y = testing.apply(make(adapted), values, *args)
  params["feed_forward"] = params["feed_forward"]["feed_forward"]
  expected = testing.apply(make(plain), {"params": params}, x)
  np.testing.assert_allclose(y, expected, rtol=1e-6)


def test_errors():
  x = testing.normal(BATCH, LENGTH, EMBED)
  with pytest.raises(ValueError, match="num_tasks is 4, so the adapter needs"):
    testing.initial_values(LAYER, x)
  with pytest.raises(ValueError, match=r"\(3,\) or \(3, 4\), got \(4,\)"):
    testing.initial_values(LAYER, x, testing.array([0] * 4, np.int32))
  with pytest.raises(ValueError, match="rank must be positive, got 0"):
    adapter.ResidualAdapter(0)
