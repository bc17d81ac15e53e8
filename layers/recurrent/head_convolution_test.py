"""Tests for convolutions of queries, keys and values, against float64 numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import testing as layer_testing
from paxon.layers import token_context
from paxon.layers.attention import testing as attention_testing
from paxon.layers.recurrent import head_convolution, testing

LAYER = head_convolution.HeadConvolution()
# Query heads, and heads of keys and values.
HEADS, KV_HEADS, HEAD_DIM, EMBED = 4, 2, 4, 5
PACKED = testing.segments("11112222203", "00111111100")
CONTEXT = token_context.TokenContext(segment_ids=PACKED)


def _inputs():
  batch, length = PACKED.shape
  return tuple(
    layer_testing.normal(batch, length, heads, HEAD_DIM, seed=seed)
    for seed, heads in enumerate((HEADS, KV_HEADS, KV_HEADS))
  )


def _convolve(x, kernel, segments):
  """Sums over the tokens of the same document, one at a time."""
  y = np.zeros_like(x)
  for b, t in np.argwhere(np.asarray(segments) != 0):
    for back in range(len(kernel)):
      if t >= back and segments[b, t - back] == segments[b, t]:
        y[b, t] += kernel[len(kernel) - 1 - back] * x[b, t - back]
  return y


def _wide(tree):
  return jax.tree.map(lambda v: np.asarray(v, np.float64), tree)


def test_equals_the_definition():
  inputs = _inputs()
  values = layer_testing.random_values(LAYER, *inputs, CONTEXT)
  # Padding of NaN changes nothing.
  dirty = tuple(
    jnp.where((PACKED == 0)[..., None, None], jnp.nan, x) for x in inputs
  )
  found = layer_testing.apply(LAYER, values, *dirty, CONTEXT)
  for name, x, y in zip(("query", "key", "value"), inputs, found, strict=True):
    kernel = np.asarray(values["params"][name]["kernel"], np.float64)
    expected = _convolve(_wide(x), kernel, np.asarray(PACKED))
    assert np.isfinite(y).all()
    is_real = np.asarray(PACKED) != 0
    np.testing.assert_allclose(
      np.asarray(y)[is_real], expected[is_real], rtol=1e-5, atol=1e-6
    )


def test_initial_kernels_are_those_of_primer():
  values = layer_testing.initial_values(LAYER, *_inputs(), CONTEXT)
  expected = np.array([0.5 / 3, 0.5 / 3, 0.5])[:, None, None]
  for name, heads in (("query", HEADS), ("key", KV_HEADS), ("value", KV_HEADS)):
    kernel = values["params"][name]["kernel"]
    assert kernel.shape == (3, heads, HEAD_DIM)
    np.testing.assert_allclose(
      kernel, np.broadcast_to(expected, kernel.shape), rtol=1e-6
    )


def test_gradients_match_finite_differences():
  inputs = _inputs()
  values = layer_testing.random_values(LAYER, *inputs, CONTEXT)

  def loss(at):
    outputs = LAYER.apply({"params": at[0]}, *at[1], CONTEXT)
    return sum(jnp.sum(jnp.sin(y)) for y in outputs)

  layer_testing.assert_gradients_match(
    loss, (values["params"], inputs), rtol=1e-5
  )


def _attention():
  return attention_testing.grouped_query_attention(
    HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, convolution=LAYER
  )


def test_attention_convolves_after_its_projections():
  layer = _attention()
  x = layer_testing.normal(*PACKED.shape, EMBED)
  values = layer_testing.random_values(
    layer, *layer_testing.in_context(x, None, PACKED)
  )
  found = layer_testing.apply(
    layer, values, *layer_testing.in_context(x, None, PACKED)
  )
  p, segments = _wide(values["params"]), np.asarray(PACKED)
  query, key, value = (
    _convolve(
      np.einsum("btd,dnh->btnh", _wide(x), p[name]),
      p["convolution"][name]["kernel"],
      segments,
    )
    for name in ("query", "key", "value")
  )
  expected = np.zeros(x.shape)
  for b, t in np.argwhere(segments != 0):
    seen = [s for s in range(t + 1) if segments[b, s] == segments[b, t]]
    for n in range(HEADS):
      k = n // (HEADS // KV_HEADS)
      logits = key[b, seen, k] @ query[b, t, n] / HEAD_DIM**0.5
      weights = np.exp(logits - logits.max())
      context = weights / weights.sum() @ value[b, seen, k]
      expected[b, t] += context @ p["out"][n]
  np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_packed_documents_are_separate():
  layer = _attention()
  x = layer_testing.normal(*PACKED.shape, EMBED)
  values = layer_testing.random_values(
    layer, *layer_testing.in_context(x, None, PACKED)
  )
  packed = layer_testing.apply(
    layer, values, *layer_testing.in_context(x, None, PACKED)
  )
  alone = layer_testing.apply(layer, values, x[:1, 4:9])
  np.testing.assert_allclose(packed[:1, 4:9], alone, rtol=1e-5, atol=1e-6)


def test_steps_give_the_whole():
  """Prefill, single tokens and two at once, of sequences with padding."""
  inputs = _inputs()
  segments = testing.segments("11111111111", "00111111111")
  values = layer_testing.random_values(LAYER, *inputs)
  whole = layer_testing.apply(
    LAYER, values, *inputs, token_context.TokenContext(segment_ids=segments)
  )
  state, found = {}, []
  for begin, end in ((0, 4), (4, 5), (5, 6), (6, 8), (8, 11)):
    y, state = layer_testing.apply(
      LAYER,
      {**values, **state},
      *(x[:, begin:end] for x in inputs),
      token_context.TokenContext(
        segment_ids=segments[:, begin:end], cache_length=None if begin else 11
      ),
      mutable=["cache"],
    )
    found.append(y)
  for one, parts in zip(whole, zip(*found, strict=True), strict=True):
    np.testing.assert_allclose(
      np.concatenate(parts, axis=1), one, rtol=1e-6, atol=1e-6
    )


def test_errors():
  with pytest.raises(ValueError, match=r"HeadConvolution\.width must be"):
    head_convolution.HeadConvolution(0)
