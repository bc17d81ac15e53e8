"""Tests for the transformer block."""

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import feed_forward, testing
from paxon.layers.attention import grouped_query
from paxon.layers.norms import rms_norm
from paxon.layers.stacks import block, stack

BATCH, LENGTH, EMBED = 2, 4, 6


def _block(dtype=None, dropout=None):
  return block.TransformerBlock(
    attention_norm=rms_norm.RmsNorm(dtype=dtype),
    attention=grouped_query.GroupedQueryAttention(
      2, num_kv_heads=1, head_dim=3, dtype=dtype
    ),
    feed_forward_norm=rms_norm.RmsNorm(dtype=dtype),
    feed_forward=feed_forward.GatedFeedForward(8, dtype=dtype),
    dropout=dropout,
  )


def _args(dtype=jnp.float32):
  return (
    testing.normal(BATCH, LENGTH, EMBED, dtype=dtype),
    testing.make_positions(BATCH, LENGTH),
    testing.ones(BATCH, LENGTH),
  )


def _oracle(params, x):
  """The whole block in float64 numpy, one position and head at a time."""
  params = jax.tree.map(lambda p: np.asarray(p, np.float64), params)
  x = np.asarray(x, np.float64)

  def norm(v, name):
    return v / np.sqrt(np.mean(v**2) + 1e-6) * params[name]["scale"]

  attention, forward = params["attention"], params["feed_forward"]
  y = np.zeros_like(x)
  for b in range(BATCH):
    normed = [norm(v, "attention_norm") for v in x[b]]
    key = [v @ attention["key"][:, 0] for v in normed]
    value = [v @ attention["value"][:, 0] for v in normed]
    for t in range(LENGTH):
      y[b, t] = x[b, t]
      for n in range(2):
        query = normed[t] @ attention["query"][:, n]
        share = np.exp([query @ k / np.sqrt(3) for k in key[: t + 1]])
        context = (share / share.sum()) @ np.stack(value[: t + 1])
        y[b, t] += context @ attention["out"][n]
      v = norm(y[b, t], "feed_forward_norm")
      gate = v @ forward["gate"]
      hidden = gate / (1 + np.exp(-gate)) * (v @ forward["up"])
      y[b, t] += hidden @ forward["down"]
  return y


def test_matches_numpy():
  values = testing.random_values(_block(), *testing.in_context(*_args()))
  np.testing.assert_allclose(
    testing.apply(_block(), values, *testing.in_context(*_args())),
    _oracle(values["params"], _args()[0]),
    rtol=1e-5,
    atol=1e-5,
  )


def test_gradients_match_finite_differences():
  def loss(at):
    return jnp.sum(
      jnp.sin(_block().apply(at[0], *testing.in_context(at[1], *_args()[1:])))
    )

  values = testing.random_values(_block(), *testing.in_context(*_args()))
  testing.assert_gradients_match(loss, (values, _args()[0]))


def test_dropout_falls_on_branches_and_not_on_the_residual():
  layer = _block(dropout=nn.Dropout(1.0))
  values = testing.random_values(layer, *testing.in_context(*_args()))
  y = testing.apply(
    layer,
    values,
    *testing.in_context(*_args(), deterministic=False),
    rngs={"dropout": jax.random.key(0)},
  )
  np.testing.assert_array_equal(y, _args()[0])


def test_deterministic_means_no_dropout():
  layer = _block(dropout=nn.Dropout(0.5))
  values = testing.random_values(layer, *testing.in_context(*_args()))
  np.testing.assert_array_equal(
    testing.apply(layer, values, *testing.in_context(*_args())),
    testing.apply(_block(), values, *testing.in_context(*_args())),
  )


def test_both_branches_drop_independently():
  class Recorder(nn.Module):
    """A dropout that adds its random mask to a collection."""

    @nn.compact
    def __call__(self, x, *, deterministic):
      mask = jax.random.uniform(self.make_rng("dropout"), x.shape)
      self.sow("masks", "mask", mask)
      return x

  layer = _block(dropout=Recorder())
  values = testing.random_values(_block(), *testing.in_context(*_args()))
  _, state = testing.apply(
    layer,
    values,
    *testing.in_context(*_args(), deterministic=False),
    rngs={"dropout": jax.random.key(0)},
    mutable=["masks"],
  )
  first, second = state["masks"]["dropout"]["mask"]
  assert not np.any(np.asarray(first) == np.asarray(second))


def test_bfloat16_compute_keeps_float32_params():
  layer = _block(dtype=jnp.bfloat16)
  values = testing.random_values(
    layer, *testing.in_context(*_args(jnp.bfloat16))
  )
  y = testing.apply(layer, values, *testing.in_context(*_args(jnp.bfloat16)))
  assert y.dtype == jnp.bfloat16
  assert {p.dtype for p in jax.tree.leaves(values)} == {jnp.dtype("float32")}
  np.testing.assert_allclose(
    np.asarray(y, np.float32),
    _oracle(values["params"], _args()[0]),
    rtol=5e-2,
    atol=5e-2,
  )


def test_parameters_are_named_for_their_parts():
  axes = testing.axes(
    _block(dropout=nn.Dropout(0.1)), *testing.in_context(*_args())
  )
  assert axes == {
    "params/attention_norm/scale": ("embed",),
    "params/attention/query": ("embed", "heads", "head_dim"),
    "params/attention/key": ("embed", "kv_heads", "head_dim"),
    "params/attention/value": ("embed", "kv_heads", "head_dim"),
    "params/attention/out": ("heads", "head_dim", "embed"),
    "params/feed_forward_norm/scale": ("embed",),
    "params/feed_forward/gate": ("embed", "mlp"),
    "params/feed_forward/up": ("embed", "mlp"),
    "params/feed_forward/down": ("mlp", "embed"),
  }


def test_dropout_without_its_random_stream_is_an_error():
  layer = _block(dropout=nn.Dropout(0.5))
  values = testing.random_values(layer, *testing.in_context(*_args()))
  with pytest.raises(Exception, match="dropout"):
    layer.apply(values, *testing.in_context(*_args(), deterministic=False))


def test_tokens_are_one_unpadded_document_by_default():
  layer, args = _block(), _args()
  variables = jax.jit(layer.init)(jax.random.key(0), args[0])
  np.testing.assert_array_equal(
    testing.apply(layer, variables, args[0]),
    testing.apply(layer, variables, *testing.in_context(*args)),
  )
  layers = stack.Stack([layer], num_layers=2)
  variables = jax.jit(layers.init)(jax.random.key(0), args[0])
  np.testing.assert_array_equal(
    testing.apply(layers, variables, args[0]),
    testing.apply(layers, variables, *testing.in_context(*args)),
  )
