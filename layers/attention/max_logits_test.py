"""Largest attention logits against their definition in float64 numpy."""

import functools

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import testing
from paxon.layers.attention import grouped_query, head_norm, kernels, max_logits
from paxon.layers.attention import mask as attention_mask
from paxon.layers.norms import rms_norm

POSITIONS = testing.array([[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5]], jnp.int32)
SEGMENTS = testing.array([[1, 1, 1, 2, 2, 0], [1] * 6], jnp.int32)
COLLECTION = max_logits.COLLECTION


def _layer(**fields):
  return grouped_query.GroupedQueryAttention(
    4,
    num_kv_heads=2,
    head_dim=4,
    max_logits=max_logits.MaxLogits(**fields),
    mask=attention_mask.MaskRules(window=3),
    logits=kernels.Logits(scale=0.7, cap=2.0),
  )


def _definition(params, x):
  """Returns the largest visible logit of each head."""
  x = np.asarray(x, np.float64)
  query, key = (
    np.einsum("btd,dnh->btnh", x, np.asarray(params[name], np.float64))
    for name in ("query", "key")
  )
  largest = np.full(4, -np.inf)
  for b, t, s, n in np.ndindex(2, 6, 6, 4):
    distance = POSITIONS[b, t] - POSITIONS[b, s]
    is_same = SEGMENTS[b, t] and SEGMENTS[b, t] == SEGMENTS[b, s]
    if is_same and 0 <= distance < 3:
      logit = 0.7 * query[b, t, n] @ key[b, s, n // 2]
      largest[n] = max(largest[n], logit)
  return largest


@pytest.mark.parametrize("chunk", [4, 512])
def test_matches_the_definition(chunk):
  layer, x = _layer(chunk=chunk), testing.normal(2, 6, 8)
  variables = nn.unbox(
    jax.jit(layer.init)(
      jax.random.key(0), *testing.in_context(x, POSITIONS, SEGMENTS)
    )
  )
  np.testing.assert_array_equal(
    variables[COLLECTION]["max_logits"]["maximum"], 0
  )
  _, new = testing.apply(
    layer,
    variables,
    *testing.in_context(x, POSITIONS, SEGMENTS),
    mutable=[COLLECTION],
  )
  np.testing.assert_allclose(
    new[COLLECTION]["max_logits"]["maximum"],
    _definition(variables["params"], x),
    rtol=1e-5,
  )


def test_changes_neither_outputs_nor_gradients():
  layer, x = _layer(), testing.normal(2, 6, 8)
  variables = nn.unbox(
    jax.jit(layer.init)(
      jax.random.key(0), *testing.in_context(x, POSITIONS, SEGMENTS)
    )
  )

  @functools.partial(jax.jit, static_argnums=1)
  def gradient(params, mutable):
    def loss(params):
      out, _ = layer.apply(
        variables | {"params": params},
        *testing.in_context(x, POSITIONS, SEGMENTS),
        mutable=mutable,
      )
      return jnp.sum(out**2)

    return jax.value_and_grad(loss)(params)

  jax.tree.map(
    np.testing.assert_array_equal,
    gradient(variables["params"], (COLLECTION,)),
    gradient(variables["params"], ()),
  )


def test_rejects_norms_of_heads():
  norm = head_norm.QueryKeyNorm(
    query_norm=rms_norm.RmsNorm(), key_norm=rms_norm.RmsNorm()
  )
  with pytest.raises(ValueError, match="max_logits serves to scale"):
    _layer().clone(head_norm=norm)


def test_rejects_an_empty_chunk():
  with pytest.raises(ValueError, match=r"MaxLogits.chunk must be positive"):
    max_logits.MaxLogits(chunk=0)
