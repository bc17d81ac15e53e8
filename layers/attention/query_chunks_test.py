"""Tests for attention a few queries at a time: it equals whole rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import testing
from paxon.layers.attention import kernels, query_chunks
from paxon.layers.attention import mask as attention_mask

LENGTH = 7
POSITIONS = [[0, 1, 2, 0, 1, 2, 0], list(range(7))]
SEGMENTS = [[1, 1, 1, 2, 2, 2, 0], [1] * 7]
PREFIX = [[1, 1, 0, 1, 1, 0, 0], [1, 1, 1, 1, 1, 0, 0]]


def _mask(*, prefix=None, **rules):
  positions, segments = (
    testing.array(rows, jnp.int32) for rows in (POSITIONS, SEGMENTS)
  )
  prefix = None if prefix is None else testing.array(prefix, bool)
  return attention_mask.AttentionMask(
    q_positions=positions,
    kv_positions=positions,
    q_segment_ids=segments,
    kv_segment_ids=segments,
    q_prefix=prefix,
    kv_prefix=prefix,
    rules=attention_mask.MaskRules(**rules),
  )


def _inputs(length=LENGTH):
  return tuple(
    testing.normal(2, length, heads, 4, seed=i)
    for i, heads in enumerate((4, 2, 2))
  )


def _values_and_gradients(kernel, inputs, mask, **settings):
  def loss(inputs):
    out = kernel(*inputs, mask, **settings)
    return jnp.sum(jnp.sin(out)), out

  (_, out), gradients = jax.value_and_grad(loss, has_aux=True)(inputs)
  return out, gradients


@pytest.mark.parametrize(
  ("length", "settings", "rules"),
  [
    (3, {"logit_cap": 1.5, "scale": 0.9}, {}),
    (2, {"bias": testing.normal(2, 4, LENGTH, LENGTH)}, {"prefix": PREFIX}),
    (7, {"sinks": testing.normal(4)}, {"window": 2, "causal": False}),
  ],
  ids=["cap and scale", "bias and prefix", "whole rows"],
)
def test_equals_plain_attention_of_whole_rows(length, settings, rules):
  chunked = query_chunks.QueryChunks(length=length)

  @jax.jit
  def both(inputs, mask):
    return [
      _values_and_gradients(kernel, inputs, mask, **settings)
      for kernel in (chunked, kernels.plain)
    ]

  actual, expected = both(_inputs(), _mask(**rules))
  jax.tree.map(
    lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-6),
    actual,
    expected,
  )


def _dense(query, key, value, mask):
  """Returns attention by the definition, with whole matrices of weights.

  On CPUs `kernels.plain` has none at this length either.
  """
  heads = query.shape[2] // key.shape[2]
  key, value = (jnp.repeat(x, heads, axis=2) for x in (key, value))
  scores = jnp.einsum("BTNH,BSNH->BNTS", query, key) / query.shape[-1] ** 0.5
  scores = jnp.where(mask.to_array(), scores, -1e30)
  return jnp.einsum("BNTS,BSNH->BTNH", jax.nn.softmax(scores), value)


def test_memory_grows_with_the_length_and_not_its_square():
  def temporaries(kernel, length=1024):
    ones = jnp.ones((2, length), jnp.int32)
    mask = attention_mask.AttentionMask(
      q_positions=testing.make_positions(2, length),
      kv_positions=testing.make_positions(2, length),
      q_segment_ids=ones,
      kv_segment_ids=ones,
    )

    def gradients(inputs):
      return _values_and_gradients(kernel, inputs, mask)

    compiled = jax.jit(gradients).lower(_inputs(length)).compile()
    return compiled.memory_analysis().temp_size_in_bytes

  chunked = query_chunks.QueryChunks(length=32)
  assert temporaries(chunked) < temporaries(_dense) / 8
  assert temporaries(chunked, 2048) < 2.5 * temporaries(chunked)


def test_rejects_an_empty_chunk():
  message = r"QueryChunks\.length must be positive, got 0"
  with pytest.raises(ValueError, match=message):
    query_chunks.QueryChunks(length=0)
