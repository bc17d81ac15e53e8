"""Tests for `kernels.auto` of long sequences: by blocks, against `plain`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import testing
from paxon.layers.attention import kernels
from paxon.layers.attention import mask as attention_mask
from paxon.layers.attention import testing as attention_testing
from paxon.layers.cpu import causal_blocks
from paxon.sharding import mesh as mesh_lib
from paxon.sharding import target

REFERENCE = kernels.plain
# Fields of the mask, keywords, heads, key/value heads, width of values.
CASES = {
  "groups": ({}, {}, 4, 2, 3),
  "one group each": ({}, {"scale": 0.3, "logit_cap": 1.5}, 2, 2, 4),
  "multi-query window": ({"window": 6}, {}, 3, 1, 4),
  "window in a block": ({"window": 2}, {"logit_cap": 0.8}, 2, 1, 4),
  "chunks": ({"chunk": 5}, {}, 2, 2, 4),
}


def _blocks(query, key, value, mask, *, block_length=4, **keywords):
  """`kernels.auto` of shorter blocks."""

  def rules(**tokens):
    return attention_mask.AttentionMask(**tokens, rules=mask.rules).to_array()

  tokens = causal_blocks.Tokens(
    mask.q_positions,
    mask.kv_positions,
    mask.q_segment_ids,
    mask.kv_segment_ids,
  )
  return causal_blocks.attend(
    rules, query, key, value, tokens, block_length=block_length, **keywords
  )


def _mask(order, length, rules):
  """Two sequences of packed documents and padding, or the tokens shuffled."""
  segments = np.sort(np.random.default_rng(3).integers(0, 4, (2, length)))
  segments[1] = np.roll(segments[1], -3)
  positions = np.zeros_like(segments)
  for row, ids in enumerate(segments):
    for at, segment in enumerate(ids):
      positions[row, at] = np.sum(ids[:at] == segment)
  if order == "shuffled":
    at = np.random.default_rng(4).permutation(length)
    segments, positions = segments[:, at], positions[:, at]
  segments, positions = (
    testing.array(x, jnp.int32) for x in (segments, positions)
  )
  return attention_mask.AttentionMask(
    q_positions=positions,
    kv_positions=positions,
    q_segment_ids=segments,
    kv_segment_ids=segments,
    rules=attention_mask.MaskRules(**rules),
  )


def _arrays(length, heads, kv_heads, value_dim, dtype=jnp.float32):
  shapes = ((heads, 4), (kv_heads, 4), (kv_heads, value_dim))
  return [
    testing.normal(2, length, *shape, seed=i, dtype=dtype)
    for i, shape in enumerate(shapes)
  ]


@pytest.mark.nightly(keep=3)
@pytest.mark.parametrize("order", ["packed", "shuffled"])
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_are_those_of_plain(case, order):
  rules, keywords, *sizes = CASES[case]
  # The last block is filled up.
  arrays, mask = _arrays(18, *sizes), _mask(order, 18, rules)
  is_in_order = np.all(attention_mask.is_in_order(mask))
  assert is_in_order == (order == "packed")
  found, expected = (
    attention_testing.outcome(kernel, arrays, mask, **keywords)
    for kernel in (_blocks, REFERENCE)
  )
  for a, e in zip(found, expected, strict=True):
    np.testing.assert_allclose(a, e, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("length", [0, -4])
def test_a_block_has_queries(length):
  query, key, value = _arrays(16, 2, 1, 4)
  mask = _mask("packed", 16, {})
  with pytest.raises(ValueError, match=f"positive block_length, got {length}"):
    _blocks(query, key, value, mask, block_length=length)


def test_bfloat16_is_rounded_like_plain():
  arrays = _arrays(16, 2, 1, 4, jnp.bfloat16)
  mask = _mask("packed", 16, {})
  wide = [x.astype(jnp.float32) for x in arrays]
  exact = attention_testing.outcome(REFERENCE, wide, mask)
  with jax.numpy_dtype_promotion("strict"):
    found = attention_testing.outcome(_blocks, arrays, mask)
  for a, e in zip(found, exact, strict=True):
    np.testing.assert_allclose(a, e, rtol=0.03, atol=0.05)


def test_gradients_match_finite_differences():
  mask = _mask("packed", 12, {})

  def loss(arrays):
    query, key, value = arrays
    return jnp.sum(jnp.sin(_blocks(query, key, value, mask, logit_cap=2.0)))

  testing.assert_gradients_match(loss, _arrays(12, 2, 1, 4), has_rule=True)


def test_no_matrix_of_all_pairs_is_kept():
  """512 x 512 pairs of two heads in float32 would be 4 MB for two sequences."""
  mask = _mask("packed", 512, {})

  def temporaries(kernel):
    fn = jax.jit(jax.grad(lambda a: jnp.sum(jnp.sin(kernel(*a, mask)))))
    compiled = fn.lower(_arrays(512, 2, 2, 4)).compile()
    return compiled.memory_analysis().temp_size_in_bytes

  pairs = 2 * 2 * 512 * 512 * 4
  assert temporaries(REFERENCE) > 2 * pairs
  assert temporaries(kernels.auto) < 1.5 * pairs


def test_the_program_is_the_same_for_any_number_of_blocks():
  def num_lines(length):
    arrays, mask = _arrays(length, 2, 1, 4), _mask("packed", length, {})

    def loss(arrays):
      query, key, value = arrays
      return jnp.sum(jnp.sin(_blocks(query, key, value, mask)))

    return jax.jit(jax.grad(loss)).lower(arrays).as_text().count("\n")

  assert num_lines(64) == num_lines(8)


def test_blocks_are_chosen_for_long_sequences_on_one_cpu(monkeypatch):
  calls = []

  def blocks(*args, **keywords):
    calls.append(keywords)
    return args[1]

  monkeypatch.setattr(causal_blocks, "attend", blocks)

  def is_chosen(length=512, rules=None, **keywords):
    calls.clear()
    arrays, mask = (
      _arrays(length, 2, 2, 4),
      _mask("packed", length, rules or {}),
    )
    jax.eval_shape(
      lambda q, k, v: kernels.auto(q, k, v, mask, **keywords), *arrays
    )
    return bool(calls)

  assert is_chosen(logit_cap=3.0)
  assert is_chosen(rules={"window": 3})
  assert not is_chosen(length=511)
  assert not is_chosen(rules={"causal": False})
  assert not is_chosen(sinks=testing.normal(2))
  assert not is_chosen(bias=testing.normal(2, 2, 512, 512))
  with jax.set_mesh(mesh_lib.make_mesh(mesh_lib.MeshSpec.parse("data=8"))):
    assert not is_chosen()
  monkeypatch.setattr(target, "is_cpu", lambda: False)
  assert not is_chosen()
