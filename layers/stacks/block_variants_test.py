"""Tests for the orders in which blocks apply their parts.

The parts are affine maps that do not commute, so each order has its own result.
What real parts do in a cache or a packed row is tested with real ones.
"""

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import feed_forward, testing
from paxon.layers.attention import head_norm, position_bias
from paxon.layers.attention import testing as attention_testing
from paxon.layers.norms import layer_norm, rms_norm
from paxon.layers.stacks import block, shared, stack

BATCH, LENGTH, EMBED = 2, 5, 6


class Affine(nn.Module):
  """`factor * x + shift`; also in the place of attention."""

  factor: float
  shift: float

  def __call__(self, x, *args, **kwargs):
    """Returns the map of `x`."""
    del args, kwargs
    return self.factor * x + self.shift


A, F = Affine(2.0, 1.0), Affine(3.0, -1.0)
M, N, P, Q = (Affine(0.5, s) for s in (0.1, 0.2, 0.3, 0.4))


def _of(part):
  return lambda x: part.factor * x + part.shift


a, f, m, n, p, q = (_of(part) for part in (A, F, M, N, P, Q))


def _sandwich(x, inner):
  first, second = (m, n) if inner else ((lambda x: x),) * 2
  x = x + p(a(first(x)))
  return x + q(f(second(x)))


ORDERS = {
  "post": (
    block.PostNormBlock(A, M, F, N),
    lambda x: n(m(x + a(x)) + f(m(x + a(x)))),
  ),
  "sandwich": (
    block.SandwichBlock(A, P, F, Q, M, N),
    lambda x: _sandwich(x, inner=True),
  ),
  "norms of branches only": (
    block.SandwichBlock(A, P, F, Q),
    lambda x: _sandwich(x, inner=False),
  ),
  "parallel, one norm": (
    block.ParallelBlock(M, A, F),
    lambda x: x + a(m(x)) + f(m(x)),
  ),
  "parallel, two norms": (
    block.ParallelBlock(M, A, F, N),
    lambda x: x + a(m(x)) + f(n(x)),
  ),
}


def _args():
  return (
    testing.normal(BATCH, LENGTH, EMBED),
    testing.make_positions(BATCH, LENGTH),
    testing.ones(BATCH, LENGTH),
  )


@pytest.mark.parametrize("order", ORDERS)
def test_order_of_the_parts(order):
  layer, formula = ORDERS[order]
  x = _args()[0]
  np.testing.assert_allclose(
    layer.apply({}, *testing.in_context(*_args())),
    formula(np.asarray(x)),
    rtol=1e-6,
  )


@pytest.mark.parametrize("order", ORDERS)
def test_dropout_is_on_branches_only(order):
  """A dropout of everything leaves the residual stream, normed or not."""
  layer, _ = ORDERS[order]
  layer = layer.clone(dropout=nn.Dropout(1.0))
  x = np.asarray(_args()[0])
  y = layer.apply({}, *testing.in_context(*_args(), deterministic=False))
  expected = n(m(x)) if order == "post" else x
  np.testing.assert_allclose(y, expected, rtol=1e-6)


class Told(nn.Module):
  """An attention that returns the tokens of a prefix."""

  def __call__(self, x, context):
    """Returns `x` where its context has a prefix, else nothing."""
    if context.prefix is None:
      return jnp.zeros_like(x)
    return jnp.where(context.prefix[:, :, None], x, 0)


BLOCKS = {
  "pre": block.TransformerBlock(N, Told(), N, F),
  "post": block.PostNormBlock(Told(), N, F, N),
  "sandwich": block.SandwichBlock(Told(), N, F, N, N, N),
  "parallel": block.ParallelBlock(N, Told(), F),
}


@pytest.mark.parametrize("order", BLOCKS)
def test_attention_gets_the_prefix(order):
  layer = BLOCKS[order]
  none = layer.apply({}, *testing.in_context(*_args()))
  prefix = jax.device_put(testing.make_positions(BATCH, LENGTH) < 2)
  told = np.asarray(
    layer.apply({}, *testing.in_context(*_args(), prefix)) != none
  ).any(axis=-1)
  np.testing.assert_array_equal(told, prefix)


class Silent(nn.Module):
  """A feed-forward layer that says whether its dropout is on."""

  dropout: nn.Module | None = None

  @nn.compact
  def __call__(self, x, **kwargs):
    """Returns ones while training."""
    self.param("unused", nn.initializers.zeros, (1,))
    assert set(kwargs) == ({"deterministic"} if self.dropout else set())
    deterministic = kwargs.get("deterministic", True)
    return jnp.full_like(x, 0 if deterministic else 1)


@pytest.mark.parametrize("order", BLOCKS)
@pytest.mark.parametrize("mark", [lambda x: x, lambda x: shared.shared("x", x)])
def test_feed_forward_hears_of_training_where_it_has_a_dropout(order, mark):
  none = BLOCKS[order].clone(feed_forward=mark(Silent()))
  hidden = none.clone(feed_forward=mark(Silent(nn.Dropout(0.5))))
  args, key = _args(), jax.random.key(0)
  evaluated = none.init_with_output(key, *testing.in_context(*args))[0]
  for layer, deterministic, same in (
    (none, False, True),
    (hidden, True, True),
    (hidden, False, False),
  ):
    y, _ = layer.init_with_output(
      key, *testing.in_context(*args, deterministic=deterministic)
    )
    assert np.array_equal(y, evaluated) is same


def _attention(**kwargs):
  return attention_testing.grouped_query_attention(
    2, num_kv_heads=1, head_dim=4, **kwargs
  )


def _norm():
  return rms_norm.RmsNorm()


def _real():
  forward = feed_forward.GatedFeedForward(8)
  return {
    "post, ALiBi": block.PostNormBlock(
      _attention(position_bias=position_bias.Alibi()),
      layer_norm.LayerNorm(),
      feed_forward.FeedForward(8),
      layer_norm.LayerNorm(),
    ),
    "sandwich, norms of queries and keys": block.SandwichBlock(
      _attention(
        query_norm=head_norm.HeadNorm(), key_norm=head_norm.HeadNorm()
      ),
      _norm(),
      forward,
      _norm(),
      _norm(),
      _norm(),
    ),
    "parallel, T5": block.ParallelBlock(
      _norm(),
      _attention(
        position_bias=position_bias.RelativeBias(num_buckets=4, max_distance=6)
      ),
      forward,
    ),
  }


@pytest.mark.parametrize("kind", _real())
def test_decoding_gives_what_the_forward_pass_gives(kind):
  layer = stack.Stack((_real()[kind],), num_layers=2)
  values = testing.random_values(layer, *testing.in_context(*_args()))
  expected = testing.apply(layer, values, *testing.in_context(*_args()))
  y, state = testing.apply(
    layer,
    values,
    *testing.in_context(
      *(np.asarray(x)[:, :3] for x in _args()), cache_length=LENGTH + 1
    ),
    mutable=["cache"],
  )
  outputs = [y]
  step = jax.jit(
    lambda v, *args: layer.apply(
      v, *testing.in_context(*args), mutable=["cache"]
    )
  )
  for t in range(3, LENGTH):
    y, state = step(
      {**values, **state}, *(np.asarray(x)[:, t : t + 1] for x in _args())
    )
    outputs.append(y)
  np.testing.assert_allclose(
    np.concatenate(outputs, axis=1), expected, rtol=1e-5, atol=1e-5
  )


@pytest.mark.parametrize("kind", _real())
def test_packed_documents_are_separate_documents(kind):
  layer = _real()[kind]
  x = _args()[0][:1]
  positions = testing.array([[0, 1, 0, 1, 2]], jnp.int32)
  segments = testing.array([[1, 1, 2, 2, 2]], jnp.int32)
  values = testing.random_values(
    layer, *testing.in_context(x, positions, segments)
  )
  together = testing.apply(
    layer, values, *testing.in_context(x, positions, segments)
  )
  for inside in (slice(0, 2), slice(2, 5)):
    alone = testing.apply(
      layer,
      values,
      *testing.in_context(
        x[:, inside],
        positions[:, inside],
        testing.ones(1, inside.stop - inside.start),
      ),
    )
    np.testing.assert_allclose(together[:, inside], alone, rtol=1e-5, atol=1e-5)


def test_names():
  axes = testing.axes(
    _real()["sandwich, norms of queries and keys"],
    *testing.in_context(*_args()),
  )
  assert {k: v for k, v in axes.items() if k.endswith("scale")} == {
    "params/attention_norm/scale": ("embed",),
    "params/post_attention_norm/scale": ("embed",),
    "params/feed_forward_norm/scale": ("embed",),
    "params/post_feed_forward_norm/scale": ("embed",),
    "params/attention/query_norm/scale": ("head_dim",),
    "params/attention/key_norm/scale": ("head_dim",),
  }
