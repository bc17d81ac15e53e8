"""Tests for `kernels.auto` of short sequences and steps, against `plain`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import testing
from paxon.layers.attention import kernels
from paxon.layers.attention import mask as attention_mask
from paxon.layers.attention import testing as attention_testing
from paxon.layers.cpu import one_pass
from paxon.sharding import target

REFERENCE = kernels.plain
# Fields of the mask, heads, key/value heads, queries, keys, width of values.
CASES = {
  "one key head each": ({}, 2, 2, 64, 64, 4),
  "groups": ({}, 4, 2, 65, 65, 3),
  "one key head": ({"window": 6}, 3, 1, 64, 64, 4),
  "bidirectional": ({"causal": False}, 2, 2, 64, 64, 4),
  "other keys": ({"causal": False}, 2, 1, 64, 24, 5),
}


def _mask(length, keys, rules):
  """Documents and padding; the first and the last tokens see nothing."""
  rng = np.random.default_rng(3)
  segments = np.sort(rng.integers(0, 4, (2, max(length, keys))))
  segments[1] = np.roll(segments[1], -3)
  positions = np.broadcast_to(np.arange(segments.shape[1]), segments.shape)
  segments, positions = (
    testing.array(x, jnp.int32) for x in (segments, positions)
  )
  return attention_mask.AttentionMask(
    q_positions=positions[:, :length],
    kv_positions=positions[:, :keys],
    q_segment_ids=segments[:, :length],
    kv_segment_ids=segments[:, :keys],
    rules=attention_mask.MaskRules(**rules),
  )


def _arrays(heads, kv_heads, length, keys, value_dim, dtype=jnp.float32):
  shapes = (
    (length, heads, 8),
    (keys, kv_heads, 8),
    (keys, kv_heads, value_dim),
  )
  return [
    testing.normal(2, *shape, seed=i, dtype=dtype)
    for i, shape in enumerate(shapes)
  ]


@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_are_those_of_the_plain_form(case):
  rules, heads, kv_heads, length, keys, value_dim = CASES[case]
  arrays = _arrays(heads, kv_heads, length, keys, value_dim)
  mask = _mask(length, keys, rules)
  assert not np.all(mask.sees_any(mask.to_array()))
  found, expected = (
    attention_testing.outcome(kernel, arrays, mask, scale=0.4)
    for kernel in (kernels.auto, REFERENCE)
  )
  for a, e in zip(found, expected, strict=True):
    np.testing.assert_allclose(a, e, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_bfloat16_is_rounded_like_the_plain_form(batch, kv_heads):
  # XLA:CPU has no kernel for some bfloat16 matmuls; one that it cannot compute
  # is an error when it runs.
  arrays = _arrays(2, kv_heads, 128, 128, 8, jnp.bfloat16)
  arrays = [x[:batch] for x in arrays]
  mask = jax.tree.map(lambda x: x[:batch], _mask(128, 128, {}))
  wide = [x.astype(jnp.float32) for x in arrays]
  exact = attention_testing.outcome(REFERENCE, wide, mask)
  with jax.numpy_dtype_promotion("strict"):
    found = attention_testing.outcome(kernels.auto, arrays, mask)
  for a, e in zip(found, exact, strict=True):
    np.testing.assert_allclose(a, e, rtol=0.03, atol=0.06)


def test_large_logits_do_not_overflow():
  query, key, value = _arrays(2, 2, 64, 64, 4)
  arrays, mask = [query * 100, key * 100, value], _mask(64, 64, {})
  found, expected = (
    attention_testing.outcome(kernel, arrays, mask)
    for kernel in (kernels.auto, REFERENCE)
  )
  for a, e in zip(found, expected, strict=True):
    np.testing.assert_allclose(a, e, rtol=1e-3, atol=1e-2)


def test_nothing_of_the_size_of_all_pairs_is_saved():
  arrays, mask = _arrays(2, 2, 64, 64, 4), _mask(64, 64, {})

  def attend(query, key, value):
    return kernels.auto(query, key, value, mask)

  _, backward = jax.vjp(attend, *arrays)
  largest = max(
    x.size for x in jax.tree.leaves(backward) if x.dtype == jnp.float32
  )
  # The mask [B,1,T,S] is one for all heads.
  assert largest == 2 * 64 * 64


def test_one_pass_is_used_for_short_sequences_on_one_cpu(monkeypatch):
  calls = []

  def attend(query, *args, **keywords):
    calls.append(keywords)
    return query

  monkeypatch.setattr(one_pass, "attend", attend)

  def is_used(length=64, **keywords):
    calls.clear()
    query, key, value = _arrays(2, 2, length, length, 8)
    kernels.auto(query, key, value, _mask(length, length, {}), **keywords)
    return bool(calls)

  assert is_used()
  assert is_used(scale=0.3)
  assert not is_used(length=63)
  assert not is_used(logit_cap=2.0)
  assert not is_used(bias=jnp.zeros((2, 2, 64, 64)))
  assert not is_used(sinks=jnp.zeros(2))
  monkeypatch.setattr(target, "is_cpu", lambda: False)
  assert not is_used()
