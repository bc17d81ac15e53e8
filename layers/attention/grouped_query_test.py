"""Tests for grouped-query attention."""

import functools

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import testing
from paxon.layers.attention import kernels, kv_cache
from paxon.layers.attention import testing as attention_testing
from paxon.layers.positions import rotary_embedding

BATCH, LENGTH, EMBED, HEAD_DIM = 2, 6, 8, 4
# Two documents and padding; one document.
POSITIONS = testing.array([[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5]], jnp.int32)
SEGMENTS = testing.array([[1, 1, 1, 2, 2, 0], [1] * 6], jnp.int32)


def _layer(num_heads=4, num_kv_heads=2, **kwargs):
  return attention_testing.grouped_query_attention(
    num_heads, num_kv_heads=num_kv_heads, head_dim=HEAD_DIM, **kwargs
  )


def _x(dtype=jnp.float32):
  return testing.normal(BATCH, LENGTH, EMBED, dtype=dtype)


def _args(dtype=jnp.float32):
  return _x(dtype), POSITIONS, SEGMENTS


def _turned(vector, position):
  """Half-split rotary embedding of one head, by complex numbers."""
  half = vector.shape[-1] // 2
  angle = position * 10_000.0 ** (-np.arange(half) / half)
  turned = (vector[:half] + 1j * vector[half:]) * np.exp(1j * angle)
  return np.concatenate([turned.real, turned.imag])


def _oracle(params, x, *, rotary=False, causal=True, window=None):
  """The definition, in float64 numpy, one query and head at a time."""
  weights = {k: np.asarray(v, np.float64) for k, v in params.items()}
  x, positions, segments = (np.asarray(a) for a in (x, POSITIONS, SEGMENTS))
  x = x.astype(np.float64)
  num_heads, num_kv_heads = (weights[k].shape[1] for k in ("query", "key"))
  turn = _turned if rotary else lambda vector, position: vector
  out = np.zeros_like(x)
  for b, t, n in np.ndindex(BATCH, LENGTH, num_heads):
    k = n // (num_heads // num_kv_heads)
    at = positions[b, t]
    query = turn(x[b, t] @ weights["query"][:, n], at)
    logits, seen = [], []
    for s in range(LENGTH):
      distance = at - positions[b, s]
      if segments[b, s] != segments[b, t] or segments[b, s] == 0:
        continue
      if (causal and distance < 0) or (window and abs(distance) >= window):
        continue
      key = turn(x[b, s] @ weights["key"][:, k], positions[b, s])
      logits.append(query @ key / np.sqrt(HEAD_DIM))
      seen.append(x[b, s] @ weights["value"][:, k])
    if seen:
      share = np.exp(logits) / np.sum(np.exp(logits))
      out[b, t] += (share @ np.stack(seen)) @ weights["out"][n]
  return out


@pytest.mark.parametrize(
  ("heads", "settings"),
  [
    ((4, 4), {"rotary": True}),
    ((4, 2), {"rotary": True}),
    ((3, 1), {"rotary": True}),
    ((4, 2), {}),
    ((4, 2), {"rotary": True, "window": 2}),
    ((4, 2), {"causal": False}),
  ],
  ids=str,
)
def test_matches_numpy(heads, settings):
  fields = dict(settings)
  if fields.pop("rotary", False):
    fields["rotary"] = rotary_embedding.Rotary()
  layer = _layer(*heads, **fields)
  values = testing.random_values(layer, *testing.in_context(*_args()))
  np.testing.assert_allclose(
    testing.apply(layer, values, *testing.in_context(*_args())),
    _oracle(values["params"], _x(), **settings),
    rtol=1e-5,
    atol=1e-5,
  )


def test_gradients_match_finite_differences():
  layer = _layer(rotary=rotary_embedding.Rotary())

  def loss(at):
    return jnp.sum(
      jnp.sin(
        layer.apply(at[0], *testing.in_context(at[1], POSITIONS, SEGMENTS))
      )
    )

  values = testing.random_values(layer, *testing.in_context(*_args()))
  testing.assert_gradients_match(loss, (values, _x()))


def test_kernels_are_interchangeable():
  values = testing.random_values(_layer(), *testing.in_context(*_args()))
  plain = testing.apply(
    _layer(kernel=kernels.plain), values, *testing.in_context(*_args())
  )
  fused = testing.apply(
    _layer(kernel=kernels.fused), values, *testing.in_context(*_args())
  )
  np.testing.assert_allclose(plain, fused, rtol=1e-5, atol=1e-6)


def test_later_tokens_and_other_documents_have_no_influence():
  layer = _layer(rotary=rotary_embedding.Rotary())
  values = testing.random_values(layer, *testing.in_context(*_args()))
  before = np.asarray(
    testing.apply(layer, values, *testing.in_context(*_args()))
  )
  changed = _x().at[:, 2].set(9.0)
  after = np.asarray(
    testing.apply(
      layer, values, *testing.in_context(changed, POSITIONS, SEGMENTS)
    )
  )
  same = (before == after).all(axis=-1)
  assert same.tolist() == [
    [True, True, False, True, True, True],
    [True, True, False, False, False, False],
  ]


@pytest.mark.parametrize("prompt", [1, 3, 5])
def test_decoding_gives_what_the_forward_pass_gives(prompt):
  layer = _layer(rotary=rotary_embedding.Rotary(), window=4)
  x, positions, segments = (
    _x(),
    testing.make_positions(2, 6),
    testing.ones(2, 6),
  )
  values = testing.random_values(
    layer, *testing.in_context(x, positions, segments)
  )
  expected = testing.apply(
    layer, values, *testing.in_context(x, positions, segments)
  )
  args = (x, positions, segments)
  cut = lambda a, b: [np.asarray(y)[:, a:b] for y in args]  # noqa: E731
  y, state = testing.apply(
    layer,
    values,
    *testing.in_context(*cut(0, prompt), cache_length=LENGTH),
    mutable=["cache"],
  )
  outputs = [y]
  step = jax.jit(
    lambda v, *a: testing.apply(
      layer, v, *testing.in_context(*a), mutable=["cache"]
    )
  )
  for t in range(prompt, LENGTH):
    y, state = step({**values, **state}, *cut(t, t + 1))
    outputs.append(y)
  np.testing.assert_allclose(
    np.concatenate(outputs, axis=1), expected, rtol=1e-5, atol=1e-6
  )


def test_bfloat16_compute_keeps_float32_params():
  layer = _layer(dtype=jnp.bfloat16, rotary=rotary_embedding.Rotary())
  values = testing.random_values(layer, *testing.in_context(*_args()))
  y = testing.apply(layer, values, *testing.in_context(*_args()))
  assert y.dtype == jnp.bfloat16
  assert {p.dtype for p in values["params"].values()} == {jnp.dtype("float32")}
  np.testing.assert_allclose(
    np.asarray(y, np.float32),
    _oracle(values["params"], _x(), rotary=True),
    rtol=2e-2,
    atol=3e-2,
  )


def test_logical_axes():
  assert testing.axes(_layer(), *testing.in_context(*_args())) == {
    "params/query": ("embed", "heads", "head_dim"),
    "params/key": ("embed", "kv_heads", "head_dim"),
    "params/value": ("embed", "kv_heads", "head_dim"),
    "params/out": ("heads", "head_dim", "embed"),
  }


def test_kernels_start_with_the_variance_of_their_fan_in():
  layer = attention_testing.grouped_query_attention(
    16, num_kv_heads=8, head_dim=8
  )
  x = testing.normal(1, 2, 64)
  tokens = (x, testing.make_positions(1, 2), testing.ones(1, 2))
  params = testing.initial_values(layer, *testing.in_context(*tokens))["params"]
  fan_in = {"query": 64, "key": 64, "value": 64, "out": 16 * 8}
  for name, terms in fan_in.items():
    deviation = np.std(np.asarray(params[name]))
    np.testing.assert_allclose(deviation, terms**-0.5, rtol=0.05, err_msg=name)


def test_einsum_and_cache_are_parts():
  calls = []

  def einsum(equation, *args):
    calls.append(equation)
    return jnp.einsum(equation, *args)

  layer = _layer(
    einsum=einsum, cache=kv_cache.ContiguousCache(kv_cache.Cast(jnp.bfloat16))
  )
  values = testing.random_values(_layer(), *testing.in_context(*_args()))
  _, state = testing.apply(
    layer,
    values,
    *testing.in_context(*_args(), cache_length=7),
    mutable=["cache"],
  )
  assert nn.unbox(state)["cache"]["cache"]["key"].dtype == jnp.bfloat16
  assert calls == ["BTD,DNH->BTNH"] * 3 + ["BTNH,NHD->BTD"]


def test_two_layers_in_one_module_keep_their_own_caches():
  class Two(nn.Module):
    @nn.compact
    def __call__(self, x, *args, **kwargs):
      x = _layer(name="first")(x, *args, **kwargs)
      return _layer(name="second")(x, *args, **kwargs)

  def run(*args):
    return Two().init(
      jax.random.key(0), *testing.in_context(*args, cache_length=6)
    )

  state = jax.eval_shape(run, *_args())
  assert set(state["cache"]) == {"first", "second"}


def test_rejects_heads_that_do_not_divide():
  message = (
    r"GroupedQueryAttention.num_heads \(12\) must be a multiple of "
    r"num_kv_heads \(5\); use 1, 2, 3, 4, 6 or 12\."
  )
  with pytest.raises(ValueError, match=message):
    _layer(12, 5)
  with pytest.raises(ValueError, match=r"num_kv_heads \(2\); use 1\."):
    _layer(1, 2)


def test_rejects_an_odd_head_dim_with_rotary():
  make = functools.partial(
    attention_testing.grouped_query_attention, 4, num_kv_heads=2, head_dim=31
  )
  message = r"GroupedQueryAttention.head_dim must be even for Rotary, got 31"
  with pytest.raises(ValueError, match=message):
    make(rotary=rotary_embedding.Rotary())
  with pytest.raises(ValueError, match=r"must be at most .*head_dim \(31\)"):
    make(rotary=rotary_embedding.Rotary(rotary_dim=32))
  make(rotary=rotary_embedding.Rotary(rotary_dim=30))


@pytest.mark.parametrize(
  "field", ["num_heads", "num_kv_heads", "head_dim", "window"]
)
def test_rejects_nonpositive_sizes(field):
  sizes = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 4, field: 0}
  with pytest.raises(ValueError, match=f"{field} must be positive, got 0"):
    attention_testing.grouped_query_attention(**sizes)


def test_tokens_are_one_unpadded_document_by_default():
  layer = _layer(rotary=rotary_embedding.Rotary())
  x = testing.normal(2, 6, 8)
  positions, ones = testing.make_positions(2, 6), testing.ones(2, 6)
  variables = jax.jit(layer.init)(jax.random.key(0), x)
  expected, cache = testing.apply(
    layer,
    variables,
    *testing.in_context(x, positions, ones, cache_length=8),
    mutable=["cache"],
  )
  np.testing.assert_array_equal(testing.apply(layer, variables, x), expected)
  np.testing.assert_array_equal(
    testing.apply(layer, variables, *testing.in_context(x, positions)), expected
  )
  out, by_default = testing.apply(
    layer, variables, *testing.in_context(x, cache_length=8), mutable=["cache"]
  )
  np.testing.assert_array_equal(out, expected)
  jax.tree.map(np.testing.assert_array_equal, by_default, cache)


def test_decoding_needs_positions():
  layer = _layer()
  x = testing.normal(2, 3, 8)
  variables = jax.jit(layer.init)(jax.random.key(0), x)
  _, cache = layer.apply(
    variables, *testing.in_context(x, cache_length=8), mutable=["cache"]
  )
  message = r"GroupedQueryAttention needs `positions` while decoding"
  with pytest.raises(ValueError, match=message):
    layer.apply({**variables, **cache}, x[:, :1], mutable=["cache"])
