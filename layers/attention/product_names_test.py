"""Tests that layers name their products, and compute them as they are told."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import embedding, feed_forward, linear, testing, unembedding
from paxon.layers.attention import (
  cross_attention,
  grouped_query,
  kernels,
  latent,
  projections,
)
from paxon.layers.attention import mask as attention_mask
from paxon.layers.positions import rotary_embedding
from paxon.quantization import einsum, recipe, recipes

BATCH, LENGTH, EMBED = 2, 3, 4
# Quantizes nothing: the products of `jnp.einsum`, by another way.
_NOTHING = recipe.Recipe(None, None, None)


def _x():
  return testing.normal(BATCH, LENGTH, EMBED)


def _tokens():
  ones = testing.ones(BATCH, LENGTH)
  return testing.in_context(_x(), testing.make_positions(BATCH, LENGTH), ones)


def _cross_args():
  x, context = _tokens()
  return x, _x(), context, testing.ones(BATCH, LENGTH)


def _attention(**fields):
  return lambda **given: grouped_query.GroupedQueryAttention(
    2, num_kv_heads=1, head_dim=4, **fields, **given
  )


def _latent(**given):
  return latent.LatentAttention(
    2,
    head_dim=4,
    rope_dim=2,
    value_dim=4,
    latent_dim=3,
    query_latent_dim=3,
    rotary=rotary_embedding.Rotary(),
    **given,
  )


def _cross(**given):
  return cross_attention.CrossAttention(2, num_kv_heads=1, head_dim=4, **given)


def _plain(**given):
  return _attention(kernel=kernels.PlainKernel(**given))()


_CASES = {
  "gated": (
    lambda **f: feed_forward.GatedFeedForward(8, **f),
    lambda: (_x(),),
    {"gate", "up", "down"},
  ),
  "feed_forward": (
    lambda **f: feed_forward.FeedForward(8, **f),
    lambda: (_x(),),
    {"up", "down"},
  ),
  "linear": (
    lambda **f: linear.Linear(8, **f),
    lambda: (_x(),),
    {"kernel"},
  ),
  "einsum": (
    lambda **f: linear.Einsum("BTD,DF->BTF", {"F": 8}, (None, None), **f),
    lambda: (_x(),),
    {"kernel"},
  ),
  "unembedding": (
    lambda **f: unembedding.Unembedding(8, **f),
    lambda: (_x(),),
    {"kernel"},
  ),
  "attention": (_attention(), _tokens, {"query", "key", "value", "out"}),
  "output gate": (
    _attention(projections=projections.GatedProjections()),
    _tokens,
    {"query", "key", "value", "gate", "out"},
  ),
  "combined": (
    _attention(projections=projections.CombinedProjections()),
    _tokens,
    {"qkv", "out"},
  ),
  "cross": (
    _cross,
    _cross_args,
    {"query", "key", "value", "out"},
  ),
  "latent": (
    _latent,
    _tokens,
    {"query_latent", "query", "latent", "key", "value", "out"},
  ),
  "plain_kernel": (_plain, _tokens, {"logits", "context"}),
}


@pytest.mark.parametrize(("make", "args", "names"), _CASES.values(), ids=_CASES)
def test_each_product_has_a_name_of_its_own(make, args, names):
  layer = make(einsum=einsum.QuantizedEinsum(recipes.find_recipe("fp8")))
  state = testing.specs(layer, *args())["fp8"]
  inner = state.get("kernel", state)["einsum"]
  assert set(inner) == names


@pytest.mark.parametrize(
  ("make", "args"), [c[:2] for c in _CASES.values()], ids=_CASES
)
def test_a_provider_gets_the_operands_of_einsum(make, args):
  provider = make(einsum=einsum.QuantizedEinsum(_NOTHING))
  plain = make(einsum=jnp.einsum)
  values = testing.random_values(plain, *args())
  np.testing.assert_allclose(
    provider.apply(values, *args()),
    plain.apply(values, *args()),
    rtol=1e-6,
    atol=1e-6,
  )


def test_a_table_is_a_head_with_a_name():
  layer = embedding.Embedding(
    8, EMBED, einsum=einsum.QuantizedEinsum(recipes.find_recipe("fp8_current"))
  )
  plain = embedding.Embedding(8, EMBED)
  values = testing.random_values(plain, testing.ones(BATCH, LENGTH))
  got = testing.apply(layer, values, _x(), method="attend")
  wanted = testing.apply(plain, values, _x(), method="attend")
  assert got.dtype == jnp.float32
  # e4m3 has three bits after the point: each factor is within 1/16.
  bound = 0.14 * np.abs(_x()) @ np.abs(values["params"]["table"]).T
  assert np.all(np.abs(got - wanted) <= bound)
  assert np.any(got != wanted)


def test_the_plain_kernel_as_a_part_is_the_function():
  query, key, value = (testing.normal(2, 4, n, 8, seed=n) for n in (4, 2, 2))
  ones = jnp.ones((2, 4), jnp.int32)
  places = jnp.broadcast_to(jnp.arange(4, dtype=jnp.int32)[None], (2, 4))
  mask = attention_mask.AttentionMask(
    q_positions=places,
    kv_positions=places,
    q_segment_ids=ones,
    kv_segment_ids=ones,
    rules=attention_mask.MaskRules(causal=True),
  )
  kernel = kernels.PlainKernel(einsum.QuantizedEinsum(_NOTHING))
  got = jax.jit(lambda *a: kernel.apply({}, *a, mask, logit_cap=3.0))(
    query, key, value
  )
  wanted = kernels.plain(query, key, value, mask, logit_cap=3.0)
  np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)
