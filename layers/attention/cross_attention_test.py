"""Tests for attention to a memory."""

from flax import linen as nn
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from paxon.layers import testing, token_context
from paxon.layers.attention import cross_attention, head_norm, kv_cache
from paxon.layers.attention import testing as attention_testing
from paxon.layers.stacks import stack
from paxon.sharding import variables

BATCH, LENGTH, MEMORY, EMBED, MEMORY_EMBED, HEAD_DIM = 2, 4, 5, 6, 3, 4
# Two packed examples with padding on both sides; one, with a short memory.
SEGMENTS = testing.array([[1, 1, 2, 0], [1, 1, 1, 1]], jnp.int32)
MEMORY_SEGMENTS = testing.array([[1, 2, 2, 2, 0], [1, 1, 0, 0, 0]], jnp.int32)


def _layer(num_heads=4, num_kv_heads=2, **kwargs):
  return cross_attention.CrossAttention(
    num_heads,
    num_kv_heads=num_kv_heads,
    head_dim=HEAD_DIM,
    **attention_testing.fields(**kwargs),
  )


def _x():
  return testing.normal(BATCH, LENGTH, EMBED)


def _memory():
  return testing.normal(BATCH, MEMORY, MEMORY_EMBED, seed=2)


def _args(x=None, memory=None, segment_ids=SEGMENTS, **static):
  x = _x() if x is None else x
  x, context = testing.in_context(x, segment_ids=segment_ids, **static)
  return x, _memory() if memory is None else memory, context, MEMORY_SEGMENTS


def _oracle(params, *, scale=HEAD_DIM**-0.5):
  """The definition, in float64 numpy, one query and head at a time."""
  w = {k: np.asarray(v, np.float64) for k, v in params.items()}
  x, memory = (np.asarray(a, np.float64) for a in (_x(), _memory()))
  segments, memory_segments = map(np.asarray, (SEGMENTS, MEMORY_SEGMENTS))
  groups = w["query"].shape[1] // w["key"].shape[1]

  def heads(name, tokens, n):
    return tokens @ w[name][:, n] + w.get(f"{name}_bias", np.zeros((9, 1)))[n]

  out = np.zeros_like(x)
  for b, t, n in np.ndindex(BATCH, LENGTH, w["query"].shape[1]):
    same = memory_segments[b] == segments[b, t]
    seen = memory[b][same & (memory_segments[b] != 0)]
    if len(seen):
      query = heads("query", x[b, t], n)
      share = np.exp(heads("key", seen, n // groups) @ query * scale)
      share /= share.sum()
      out[b, t] += share @ heads("value", seen, n // groups) @ w["out"][n]
  return out + w.get("out_bias", 0.0)


@pytest.mark.parametrize(
  "fields", [{}, {"use_bias": True}, {"logit_scale": 1.0}], ids=str
)
def test_matches_numpy(fields):
  layer = _layer(**fields)
  values = testing.random_values(layer, *_args())
  scale = fields.get("logit_scale", HEAD_DIM**-0.5)
  np.testing.assert_allclose(
    testing.apply(layer, values, *_args()),
    _oracle(values["params"], scale=scale),
    rtol=1e-5,
    atol=1e-5,
  )


def test_gradients_match_finite_differences():
  layer = _layer()
  values = testing.random_values(layer, *_args())

  def loss(at):
    return jnp.sum(jnp.sin(layer.apply(at[0], *_args(at[1], at[2]))))

  testing.assert_gradients_match(loss, (values, _x(), _memory()))


def test_padding_and_other_examples_have_no_influence():
  layer = _layer()
  values = testing.random_values(layer, *_args())
  changed = _memory().at[0, 1:4].set(9.0).at[0, 4].set(7.0).at[1, 2:].set(8.0)
  before, after = (
    np.asarray(testing.apply(layer, values, *_args(memory=m)))
    for m in (_memory(), changed)
  )
  same = (before == after).all(axis=-1)
  assert same.tolist() == [[True, True, False, True], [True] * 4]


class _Residual(nn.Module):
  """A block, so that the memory goes through a stack."""

  layer: nn.Module

  @nn.compact
  def __call__(self, x, memory, context, memory_segments):
    return x + self.layer(x, memory, context, memory_segments)


@pytest.mark.parametrize("scan", [False, True])
def test_decoding_without_the_memory_gives_what_the_forward_pass_gives(scan):
  calls = []

  def einsum(equation, x, *args):
    calls.append(x.shape)
    return jnp.einsum(equation, x, *args)

  layer = _layer(einsum=einsum, key_norm=head_norm.HeadNorm())
  model = stack.Stack((_Residual(layer),), num_layers=2, scan=scan)
  # The prompt of the second row is shorter.
  x, segments = _x(), jnp.ones_like(SEGMENTS).at[1, 1].set(0)
  args = _args(segment_ids=segments)
  values = testing.random_values(model, *args)
  expected = testing.apply(model, values, *args)
  first = _args(x[:, :2], segment_ids=segments[:, :2], cache_length=2)
  y, state = testing.apply(model, values, *first, mutable=["cache"])
  outputs = [y]
  calls.clear()

  @jax.jit
  def step(v, x, segments):
    context = token_context.TokenContext(segment_ids=segments)
    return model.apply(v, x, None, context, None, mutable=["cache"])

  for t in range(2, LENGTH):
    at = slice(t, t + 1)
    y, state = step({**values, **state}, x[:, at], segments[:, at])
    outputs.append(y)
  # Neither keys nor values were made again.
  assert calls
  assert {shape[1] for shape in calls} == {1}
  np.testing.assert_allclose(
    np.concatenate(outputs, axis=1), expected, rtol=1e-5, atol=1e-6
  )


def test_several_samples_share_the_memory_of_their_prompt():
  layer = _layer()
  values = testing.random_values(layer, *_args())
  _, state = testing.apply(
    layer, values, *_args(cache_length=9), mutable=["cache"]
  )
  x = testing.normal(2 * BATCH, 1, EMBED, seed=5)
  y = testing.apply(layer, {**values, **state}, x, None)
  repeated = (jnp.repeat(a, 2, axis=0) for a in (_memory(), MEMORY_SEGMENTS))
  memory, memory_segments = repeated
  context = token_context.ONE_DOCUMENT
  expected = testing.apply(layer, values, x, memory, context, memory_segments)
  np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)


def test_storage_is_a_part():
  cache = cross_attention.MemoryCache(kv_cache.Cast(jnp.bfloat16))
  layer = _layer(cache=cache)
  values = testing.random_values(layer, *_args())
  y, state = testing.apply(
    layer, values, *_args(cache_length=4), mutable=["cache"]
  )
  kept = variables.unbox(state)["cache"]["cache"]
  assert kept["shared_key"].dtype == kept["shared_value"].dtype == jnp.bfloat16
  x, _, context, _ = _args()
  again = testing.apply(layer, {**values, **state}, x, None, context)
  np.testing.assert_allclose(again, y, rtol=2e-2, atol=2e-2)


def test_logical_axes():
  kept = ("batch", "kv_heads", "kv_length", "head_dim")
  found = testing.axes(_layer(use_bias=True), *_args(cache_length=4))
  assert found == {
    "params/query": ("embed", "heads", "head_dim"),
    "params/query_bias": ("heads", "head_dim"),
    "params/key": ("embed", "kv_heads", "head_dim"),
    "params/key_bias": ("kv_heads", "head_dim"),
    "params/value": ("embed", "kv_heads", "head_dim"),
    "params/value_bias": ("kv_heads", "head_dim"),
    "params/out": ("heads", "head_dim", "embed"),
    "params/out_bias": ("embed",),
    "cache/cache/shared_key": kept,
    "cache/cache/shared_value": kept,
    "cache/cache/shared_positions": ("batch", "kv_length"),
    "cache/cache/shared_segment_ids": ("batch", "kv_length"),
    "cache/cache/index": (),
  }


def test_rejects_what_does_not_go_together():
  layer = _layer()
  values = testing.random_values(layer, *_args())

  def run(variables, *args):
    call = lambda v, *a: layer.apply(v, *a, mutable=["cache"])  # noqa: E731
    return jax.eval_shape(call, variables, *args)

  with pytest.raises(ValueError, match=r"no memory, and no cache with its"):
    run(values, _x(), None)
  with pytest.raises(ValueError, match=r"batch of 3 sequences for 2 memories"):
    run(values, jnp.ones((3, 1, EMBED)), _memory())
  _, state = run(values, *_args(cache_length=4))
  with pytest.raises(ValueError, match=r"are in the cache already"):
    run({**values, **state}, *_args())


def test_rejects_combined_projections(monkeypatch):
  # Tests check annotations, programs do not.
  monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
  message = r"CrossAttention\.projections must be Separate.*, got CombinedProj"
  with pytest.raises(ValueError, match=message):
    _layer(combined=True)


def test_rejects_heads_that_do_not_divide():
  message = r"CrossAttention.num_heads \(4\) must be a multiple of .* \(3\)"
  with pytest.raises(ValueError, match=message):
    _layer(4, 3)


def test_all_tokens_are_of_one_document_by_default():
  layer = _layer()
  values = testing.random_values(layer, *_args())
  args = list(_args(segment_ids=jnp.ones_like(SEGMENTS)))
  args[-1] = jnp.ones_like(MEMORY_SEGMENTS)
  np.testing.assert_array_equal(
    testing.apply(layer, values, *args[:2]),
    testing.apply(layer, values, *args),
  )
