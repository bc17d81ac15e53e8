"""Tests for attention in blocks: it equals attention of whole rows."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import testing
from paxon.layers.attention import kernels, local_blocks, position_bias
from paxon.layers.attention import mask as attention_mask
from paxon.layers.attention import testing as attention_testing
from paxon.sharding import layout, mesh

LENGTH = 11
# Documents of 5, 3 and 1 tokens, padding; one document; padding before it.
POSITIONS = [
  [0, 1, 2, 3, 4, 0, 1, 2, 0, 0, 0],
  list(range(11)),
  [0, 0, *range(9)],
]
SEGMENTS = [
  [1, 1, 1, 1, 1, 2, 2, 2, 5, 0, 0],
  [1] * 11,
  [0, 0, *[3] * 9],
]
PREFIX = [
  [1, 1, 1, 0, 0, 1, 1, 0, 0, 0, 0],
  [1] * 7 + [0] * 4,
  [0] * 11,
]


def _mask(positions=POSITIONS, segments=SEGMENTS, *, prefix=None, **rules):
  positions, segments = (
    testing.array(rows, jnp.int32) for rows in (positions, segments)
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


def _inputs(rows=3, length=LENGTH):
  return tuple(
    testing.normal(rows, length, heads, 4, seed=i)
    for i, heads in enumerate((4, 2, 2))
  )


def _values_and_gradients(kernel, inputs, mask, **settings):
  def loss(inputs):
    out = kernel(*inputs, mask, **settings)
    return jnp.sum(jnp.sin(out)), out

  (_, out), gradients = jax.value_and_grad(loss, has_aux=True)(inputs)
  return out, gradients


def _assert_equal(block_length, mask, *, gradients=True, **settings):
  blocks = local_blocks.LocalBlocks(block_length=block_length)
  inputs = _inputs()

  @jax.jit
  def both(inputs, mask):
    return [
      _values_and_gradients(kernel, inputs, mask, **settings)
      if gradients
      else kernel(*inputs, mask=mask, **settings)
      for kernel in (blocks, kernels.plain)
    ]

  actual, expected = both(inputs, mask)
  jax.tree.map(
    lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-6),
    actual,
    expected,
  )
  assert np.any(jax.tree.leaves(expected)[0])


@pytest.mark.parametrize(
  ("block_length", "rules"),
  [
    (2, {"window": 2}),
    (3, {"window": 1}),
    (2, {"window": 6}),
    (3, {"window": 3, "causal": False}),
    (4, {"window": 2, "right_window": 3, "causal": False}),
    (4, {"window": 5, "right_window": 0, "causal": False}),
    (3, {"chunk": 4}),
    (4, {"chunk": 3, "causal": False}),
    (2, {"window": 4, "prefix": PREFIX}),
    (64, {"window": 3}),
  ],
  ids=lambda value: (
    str({k: v for k, v in value.items() if k != "prefix"})
    if isinstance(value, dict)
    else str(value)
  ),
)
def test_equals_plain_attention_of_the_same_mask(block_length, rules):
  _assert_equal(block_length, _mask(**rules), gradients=False)


@pytest.mark.parametrize(
  "rules",
  [
    {"window": 4, "right_window": 2, "causal": False},
    {"window": 3, "prefix": PREFIX},
  ],
  ids=["limits on both sides", "prefix"],
)
def test_has_the_gradients_of_plain_attention(rules):
  _assert_equal(3, _mask(**rules))


def test_hands_settings_on():
  settings = {
    "scale": 0.9,
    "logit_cap": 1.5,
    "sinks": testing.normal(4, seed=9),
  }
  _assert_equal(3, _mask(window=3), **settings)


@pytest.mark.parametrize(
  "settings",
  [
    {"position_bias": position_bias.Alibi(), "sinks": kernels.LearnedSinks()},
    {
      "position_bias": position_bias.RelativeBias(4, 6, bidirectional=True),
      "relative_position": position_bias.TransformerXlPosition(embed_dim=4),
      "causal": False,
      "right_window": 1,
    },
  ],
  ids=["alibi", "t5 and transformer xl"],
)
def test_biases_by_position_in_blocks(settings):
  """In a layer, with the gradients of all parameters."""
  args = testing.in_context(
    testing.normal(3, LENGTH, 8),
    *(testing.array(rows, jnp.int32) for rows in (POSITIONS, SEGMENTS)),
  )
  layers = [
    attention_testing.grouped_query_attention(
      4, num_kv_heads=2, head_dim=4, window=3, kernel=kernel, **settings
    )
    for kernel in (local_blocks.LocalBlocks(block_length=4), kernels.plain)
  ]
  values = testing.random_values(layers[0], *args)

  def loss(values, layer):
    out = layer.apply(values, *args)
    return jnp.sum(jnp.sin(out)), out

  @jax.jit
  def both(values):
    gradient = jax.value_and_grad(loss, has_aux=True)
    return [gradient(values, layer) for layer in layers]

  actual, expected = both(values)
  jax.tree.map(
    lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-5),
    actual,
    expected,
  )


def test_memory_grows_with_the_length_and_not_its_square():
  def largest(kernel, length):
    mask = _mask([range(length)], [[1] * length], window=16)

    def gradients(inputs):
      return _values_and_gradients(kernel, inputs, mask)

    compiled = jax.jit(gradients).lower(_inputs(1, length)).compile()
    return compiled.memory_analysis().temp_size_in_bytes

  blocks = local_blocks.LocalBlocks(block_length=16)
  assert largest(blocks, 1024) < 2.3 * largest(blocks, 512)
  # With an einsum of its own `plain` computes all pairs on any platform.
  whole = functools.partial(kernels.plain, einsum=jnp.einsum)
  assert largest(blocks, 1024) < largest(whole, 1024) / 8


def test_rows_whose_places_are_not_positions_become_nan():
  ordered = list(range(6))
  positions = [
    ordered,
    [0, 1, 2, 4, 5, 6],  # A gap.
    [0, 1, 0, 1, 2, 3],  # A segment that comes again.
    [0, 1, 0, 0, 1, 0],
    [0, 1, 0, 2, 3, 4],  # Padding inside of a segment.
    [3, 4, 5, 6, 7, 0],  # A document's second part, and padding.
  ]
  segments = [
    [1] * 6,
    [1] * 6,
    [1, 1, 2, 2, 1, 1],
    [4, 4, 0, 7, 7, 0],
    [1, 1, 0, 1, 1, 1],
    [1] * 5 + [0],
  ]
  blocks = local_blocks.LocalBlocks(block_length=2)
  mask = _mask(positions, segments, window=2)
  out = np.asarray(jax.jit(blocks)(*_inputs(6, 6), mask))
  is_nan = np.isnan(out).all(axis=(1, 2, 3))
  assert is_nan.tolist() == [False, True, True, False, True, False]
  assert np.isfinite(out[~is_nan]).all()


def test_other_keys_than_queries_become_nan():
  mask = _mask([list(range(6))], [[1] * 6], window=2)
  moved = attention_mask.AttentionMask(
    q_positions=mask.q_positions + 1,
    kv_positions=mask.kv_positions,
    q_segment_ids=mask.q_segment_ids,
    kv_segment_ids=mask.kv_segment_ids,
    rules=attention_mask.MaskRules(window=2),
  )
  blocks = local_blocks.LocalBlocks(block_length=2)
  assert np.isnan(jax.jit(blocks)(*_inputs(1, 6), moved)).all()


def test_decoding_gives_what_the_forward_pass_gives():
  layer = attention_testing.grouped_query_attention(
    4,
    num_kv_heads=2,
    head_dim=4,
    window=3,
    kernel=local_blocks.LocalBlocks(block_length=2),
    position_bias=position_bias.Alibi(),
  )
  args = (
    testing.normal(2, 6, 8),
    testing.make_positions(2, 6),
    testing.ones(2, 6),
  )
  values = testing.random_values(layer, *testing.in_context(*args))
  expected = testing.apply(layer, values, *testing.in_context(*args))
  prompt, new = ([a[:, at] for a in args] for at in (slice(5), slice(5, 6)))
  y, state = testing.apply(
    layer,
    values,
    *testing.in_context(*prompt, cache_length=6),
    mutable=["cache"],
  )
  last, _ = testing.apply(
    layer, {**values, **state}, *testing.in_context(*new), mutable=["cache"]
  )
  np.testing.assert_allclose(
    jnp.concatenate([y, last], axis=1), expected, rtol=1e-5, atol=1e-6
  )


@pytest.mark.parametrize(
  "axes", ["data=2,tensor=4", "data=2,sequence=4"], ids=str
)
def test_sharded_equals_unsharded(axes):
  layer = attention_testing.grouped_query_attention(
    8,
    num_kv_heads=4,
    head_dim=4,
    window=3,
    kernel=local_blocks.LocalBlocks(block_length=4),
  )
  args = (
    testing.normal(2, 16, 8),
    testing.make_positions(2, 16),
    testing.ones(2, 16),
  )
  values = testing.random_values(layer, *testing.in_context(*args))
  where = layout.Layout(mesh.make_mesh(mesh.MeshSpec.parse(axes)))
  shardings = where.shardings(testing.specs(layer, *testing.in_context(*args)))
  batch = tuple(where.batch_sharding(a.ndim) for a in args)
  compiled = (
    where.jit(
      lambda values, *args: layer.apply(values, *testing.in_context(*args)),
      in_shardings=(shardings, *batch),
    )
    .lower(values, *args)
    .compile()
  )
  placed = testing.place((values, *args), compiled.input_shardings[0])
  np.testing.assert_allclose(
    compiled(*placed),
    testing.apply(layer, values, *testing.in_context(*args)),
    rtol=1e-5,
    atol=1e-6,
  )
  # Neighbours exchange blocks; of whole rows only numbers of tokens are put
  # together, to compare their order.
  gathers = re.findall(r"= (\S+) all-gather\(", compiled.as_text())
  assert all(kind.startswith("s32[") for kind in gathers), gathers


@pytest.mark.parametrize(
  "rules",
  [{}, {"causal": False, "right_window": 1}, {"prefix": PREFIX}],
  ids=["causal", "right window", "prefix"],
)
def test_rejects_a_mask_without_a_limit(rules):
  message = r"LocalBlocks .* neither window nor chunk is set, but blocks need"
  with pytest.raises(ValueError, match=message):
    local_blocks.LocalBlocks()(*_inputs(), mask=_mask(**rules))


def test_rejects_a_bias_of_all_pairs():
  bias = jnp.zeros((3, 4, LENGTH, LENGTH))
  message = r"bias of shape .*, but blocks take a bias as a function of posit"
  with pytest.raises(ValueError, match=message):
    local_blocks.LocalBlocks()(*_inputs(), mask=_mask(window=2), bias=bias)


def test_rejects_an_empty_block():
  message = r"LocalBlocks\.block_length must be positive, got 0"
  with pytest.raises(ValueError, match=message):
    local_blocks.LocalBlocks(block_length=0)
