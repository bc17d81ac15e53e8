"""Tests for what is added to attention logits, and for norms of heads."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import testing
from paxon.layers.attention import head_norm, kernels, kv_cache, position_bias
from paxon.layers.attention import testing as attention_testing
from paxon.layers.positions import rotary_embedding

BATCH, LENGTH, EMBED, HEADS, HEAD_DIM = 2, 5, 6, 4, 4
POSITIONS = testing.array([[0, 1, 2, 0, 1], [0, 1, 2, 3, 4]], jnp.int32)
SEGMENTS = testing.array([[1, 1, 1, 2, 2], [1] * 5], jnp.int32)


def _layer(**kwargs):
  return attention_testing.grouped_query_attention(
    HEADS, num_kv_heads=2, head_dim=HEAD_DIM, **kwargs
  )


def _args():
  return testing.normal(BATCH, LENGTH, EMBED), POSITIONS, SEGMENTS


def _alibi_slopes(heads):
  """As transformers' `build_alibi_tensor` has them."""
  power = 2 ** math.floor(math.log2(heads))
  base = 2 ** (-(2 ** -(math.log2(power) - 3)))
  slopes = [base ** (i + 1) for i in range(power)]
  if power != heads:
    extra = 2 ** (-(2 ** -(math.log2(2 * power) - 3)))
    left = min(power, heads - power)
    slopes += [extra**i for i in range(1, 1 + 2 * left, 2)]
  return slopes


@pytest.mark.parametrize("heads", [1, 4, 8, 12, 20])
def test_alibi_matches_the_definition(heads):
  at = np.asarray(POSITIONS)
  part = position_bias.Alibi()
  run = jax.jit(lambda *positions: part.apply({}, *positions, heads))
  bias = run(at, at[:, :3])
  assert bias.shape == (BATCH, heads, LENGTH, 3)
  slopes = _alibi_slopes(heads)
  expected = np.zeros(bias.shape)
  for b, n, t, s in np.ndindex(bias.shape):
    expected[b, n, t, s] = -slopes[n] * abs(int(at[b, t]) - int(at[b, s]))
  np.testing.assert_allclose(bias, expected, rtol=1e-5)


def _t5_bucket(relative, bidirectional, buckets, longest):
  """As transformers' `_relative_position_bucket`; `relative` is key - query."""
  bucket = 0
  if bidirectional:
    buckets //= 2
    bucket += buckets * (relative > 0)
    relative = abs(relative)
  else:
    relative = -min(relative, 0)
  exact = buckets // 2
  if relative < exact:
    return bucket + relative
  scale = math.log(relative / exact) / math.log(longest / exact)
  return bucket + min(exact + int(scale * (buckets - exact)), buckets - 1)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("sizes", [(32, 128), (8, 20)], ids=str)
def test_t5_buckets_match_the_definition(bidirectional, sizes):
  layer = position_bias.RelativeBias(*sizes, bidirectional=bidirectional)
  q_positions = np.asarray([[0, 50, 300]], np.int32)
  kv_positions = np.arange(301, dtype=np.int32)[None]
  table = testing.normal(sizes[0], HEADS)
  values = {"params": {"table": table}}
  run = jax.jit(lambda *args: layer.apply(*args, HEADS))
  bias = np.asarray(run(values, q_positions, kv_positions))
  for t, query in enumerate((0, 50, 300)):
    rows = [_t5_bucket(s - query, bidirectional, *sizes) for s in range(301)]
    np.testing.assert_array_equal(bias[0, :, t], np.asarray(table)[rows].T)


def _oracle(params, logits_of):
  """Causal attention in float64 numpy, by a function that gives a logit."""
  p = jax.tree.map(lambda v: np.asarray(v, np.float64), params)
  x = np.asarray(_args()[0], np.float64)
  positions, segments = np.asarray(POSITIONS), np.asarray(SEGMENTS)
  y = np.zeros_like(x)
  for b, t, n in np.ndindex(BATCH, LENGTH, HEADS):
    seen = [
      s
      for s in range(t + 1)
      if segments[b, s] == segments[b, t] and positions[b, s] <= positions[b, t]
    ]
    k = n // 2
    query = x[b, t] @ p["query"][:, n]
    keys = [x[b, s] @ p["key"][:, k] for s in seen]
    logits = [
      logits_of(p, query, key, n, int(positions[b, t]), int(positions[b, s]))
      for key, s in zip(keys, seen, strict=True)
    ]
    share = np.exp(logits) / np.sum(np.exp(logits))
    values = np.stack([x[b, s] @ p["value"][:, k] for s in seen])
    y[b, t] += share @ values @ p["out"][n]
  return y


def _with_alibi(params, query, key, head, q_at, kv_at):
  del params
  slope = _alibi_slopes(HEADS)[head]
  return query @ key / 2 - slope * (q_at - kv_at)


def _with_t5(params, query, key, head, q_at, kv_at):
  bucket = _t5_bucket(kv_at - q_at, False, 4, 6)
  return query @ key / 2 + params["position_bias"]["table"][bucket, head]


def _turned(v, at):
  angle = at * 10_000.0 ** (-np.arange(2) / 2)
  turned = (v[:2] + 1j * v[2:]) * np.exp(1j * angle)
  return np.concatenate([turned.real, turned.imag])


def _with_norms(params, query, key, head, q_at, kv_at):
  del head
  query, key = (
    v / np.sqrt(np.mean(v**2) + 1e-6) * params[name]["scale"]
    for v, name in ((query, "query_norm"), (key, "key_norm"))
  )
  return _turned(query, q_at) @ _turned(key, kv_at) / 2


VARIANTS = {
  "alibi": (lambda: {"position_bias": position_bias.Alibi()}, _with_alibi),
  "t5": (
    lambda: {
      "position_bias": position_bias.RelativeBias(num_buckets=4, max_distance=6)
    },
    _with_t5,
  ),
  "norms": (
    lambda: {
      "query_norm": head_norm.HeadNorm(),
      "key_norm": head_norm.HeadNorm(),
      "rotary": rotary_embedding.Rotary(),
    },
    _with_norms,
  ),
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
  "kernel", [kernels.plain, kernels.fused], ids=["plain", "fused"]
)
def test_attention_matches_numpy(variant, kernel):
  fields, formula = VARIANTS[variant]
  layer = _layer(kernel=kernel, **fields())
  values = testing.random_values(layer, *testing.in_context(*_args()))
  np.testing.assert_allclose(
    testing.apply(layer, values, *testing.in_context(*_args())),
    _oracle(values["params"], formula),
    rtol=1e-5,
    atol=1e-5,
  )


@pytest.mark.parametrize("variant", ["t5", "norms"])
def test_gradients_match_finite_differences(variant):
  layer = _layer(**VARIANTS[variant][0]())

  def loss(at):
    return jnp.sum(
      jnp.sin(
        layer.apply(at[0], *testing.in_context(at[1], POSITIONS, SEGMENTS))
      )
    )

  values = testing.random_values(layer, *testing.in_context(*_args()))
  testing.assert_gradients_match(loss, (values, _args()[0]), rtol=1e-5)


def test_keys_are_stored_normalized():
  """So that decoding, which reads them, is the forward pass."""
  layer = _layer(
    key_norm=head_norm.HeadNorm(scale_init=jax.nn.initializers.ones)
  )
  values = testing.initial_values(layer, *testing.in_context(*_args()))
  _, state = testing.apply(
    layer,
    values,
    *testing.in_context(*_args(), cache_length=LENGTH),
    mutable=[kv_cache.COLLECTION],
  )
  key = np.asarray(state["cache"]["cache"]["key"].value)
  np.testing.assert_allclose(np.mean(key**2, axis=-1), 1, rtol=1e-3)


def test_names_axes_and_dtypes():
  layer = _layer(
    query_norm=head_norm.HeadNorm(dtype=jnp.bfloat16),
    key_norm=head_norm.HeadNorm(dtype=jnp.bfloat16),
    position_bias=position_bias.RelativeBias(),
    dtype=jnp.bfloat16,
  )
  specs = testing.specs(layer, *testing.in_context(*_args()))["params"]
  assert specs["query_norm"]["scale"].axes == ("head_dim",)
  table = specs["position_bias"]["table"]
  assert table.shape == (32, HEADS)
  assert table.axes == (None, "heads")
  assert not table.regularized
  values = testing.random_values(layer, *testing.in_context(*_args()))
  assert (
    testing.apply(layer, values, *testing.in_context(*_args())).dtype
    == jnp.bfloat16
  )


def test_rejects_wrong_sizes():
  part = position_bias.RelativeBias
  with pytest.raises(ValueError, match=r"multiple of 4, got 6"):
    part(num_buckets=6, bidirectional=True)
  with pytest.raises(
    ValueError, match=r"max_distance \(16\) must exceed the 16"
  ):
    part(max_distance=16)
  with pytest.raises(ValueError, match=r"num_buckets must be positive, got 0"):
    part(num_buckets=0)
  with pytest.raises(ValueError, match=r"HeadNorm\.epsilon must be in"):
    head_norm.HeadNorm(epsilon=0.0)
