"""Tests for ring attention: what devices hold, exchange and skip.

Values and gradients on one device are in `kernel_battery_test`.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import testing
from paxon.layers.attention import kernels, ring
from paxon.layers.attention import mask as attention_mask
from paxon.sharding import axes
from paxon.sharding import layout as layouts
from paxon.sharding import mesh as meshes

BATCH, LENGTH, HEADS, HEAD_DIM = 2, 32, 4, 8


def _layout(spec):
  return layouts.Layout(meshes.make_mesh(meshes.MeshSpec.parse(spec)))


def _mask(length=LENGTH, *, prefix=None, **settings):
  """A row of two documents and padding, and a row of one document."""
  first = length // 3
  segments = [
    [1] * first + [2] * (length - first - 3) + [0] * 3,
    [1] * length,
  ]
  positions = [
    [*range(first), *range(length - first - 3), 0, 0, 0],
    [*range(length)],
  ]
  positions = testing.array(positions, jnp.int32)
  is_prefix = None if prefix is None else positions < prefix
  return attention_mask.AttentionMask(
    q_positions=positions,
    kv_positions=positions,
    q_segment_ids=testing.array(segments, jnp.int32),
    kv_segment_ids=testing.array(segments, jnp.int32),
    q_prefix=is_prefix,
    kv_prefix=is_prefix,
    rules=attention_mask.MaskRules(**settings),
  )


def _inputs(kv_heads, length=LENGTH):
  heads = (HEADS, kv_heads, kv_heads)
  arrays = [
    testing.normal(BATCH, length, n, HEAD_DIM, seed=i)
    for i, n in enumerate(heads)
  ]
  return (*arrays, testing.normal(HEADS, seed=7))


def _gradient(kernel, mask, **keywords):
  def loss(inputs):
    query, key, value, sinks = inputs
    out = kernel(query, key, value, mask, sinks=sinks, **keywords)
    return jnp.sum(jnp.sin(out)), out

  return jax.grad(loss, has_aux=True)


@pytest.mark.nightly(keep=2)
@pytest.mark.parametrize(
  ("spec", "kv_heads", "settings", "keywords"),
  [
    pytest.param("sequence=8", 2, {}, {"scale": 0.5}, id="causal"),
    pytest.param(
      "sequence=2,tensor=2,fsdp=2",
      2,
      {"window": 7},
      {"logit_cap": 2.0},
      id="window",
    ),
    pytest.param(
      "sequence=4,data=2", 4, {"causal": False}, {}, id="both directions"
    ),
    pytest.param(
      "sequence=4,tensor=2", 1, {"prefix": 9}, {}, id="prefix, one kv head"
    ),
    pytest.param("sequence=2,tensor=4", 2, {}, {}, id="repeated kv heads"),
    pytest.param("tensor=8", 4, {}, {}, id="padded heads"),
  ],
)
def test_around_the_ring_is_plain_attention(spec, kv_heads, settings, keywords):
  mask, inputs = _mask(**settings), _inputs(kv_heads)
  kernel = ring.Ring(block_q=2, block_kv=4)
  step = _layout(spec).jit(_gradient(kernel, mask, **keywords))
  expected = jax.jit(_gradient(kernels.plain, mask, **keywords))(inputs)
  for a, e in zip(
    jax.tree.leaves(step(inputs)), jax.tree.leaves(expected), strict=True
  ):
    np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-5)


def _compiled(length, *, kernel=None, q_length=None, is_trained=True):
  """Attention of a training step, or of a decoding step."""
  layout = _layout("sequence=8")
  kernel = kernel or ring.Ring(block_q=4, block_kv=4)
  names = (axes.BATCH, axes.LENGTH, axes.ACTIVATION_HEADS, None)

  def shape(*sizes, dtype=jnp.float32):
    sharded = [n if s > 1 else None for n, s in zip(names, sizes, strict=False)]
    return jax.ShapeDtypeStruct(sizes, dtype, sharding=layout.sharding(sharded))

  q_length = q_length or length
  query = shape(BATCH, q_length, HEADS, HEAD_DIM)
  key = shape(BATCH, length, HEADS, HEAD_DIM)
  ids, kv_ids = (shape(BATCH, n, dtype=jnp.int32) for n in (q_length, length))

  def attend(query, key, value, ids, kv_ids):
    mask = attention_mask.AttentionMask(
      q_positions=ids,
      kv_positions=kv_ids,
      q_segment_ids=ids,
      kv_segment_ids=kv_ids,
    )
    return jnp.sum(kernel(query, key, value, mask))

  if is_trained:
    attend = jax.grad(attend, argnums=(0, 1, 2))
  return layout.jit(attend).lower(query, key, key, ids, kv_ids).compile()


def test_no_device_holds_a_row_of_keys_or_its_logits():
  small, large = _compiled(8 * 52), _compiled(8 * 4 * 52)
  text = small.as_text()
  assert "collective-permute" in text
  assert "all-gather" not in text
  assert "all-to-all" not in text
  shapes = [
    [int(n) for n in found.split(",")]
    for found in re.findall(r"\w+\[(\d+(?:,\d+)*)\]", text)
  ]
  assert any(52 in shape for shape in shapes)
  assert not any(8 * 52 in shape for shape in shapes)
  # Nor the logits of its own part, but those of a block.
  assert not any(shape.count(52) > 1 for shape in shapes)
  # So memory grows with the length, and not with its square.
  small, large = (
    c.memory_analysis().temp_size_in_bytes for c in (small, large)
  )
  assert 3 * small < large < 5 * small


def test_a_decoding_step_leaves_the_cache_where_it_is():
  mask = _mask()
  query, key, value, sinks = _inputs(2)
  mask = attention_mask.AttentionMask(
    q_positions=testing.array([[9], [31]], jnp.int32),
    kv_positions=mask.kv_positions,
    q_segment_ids=testing.array([[2], [1]], jnp.int32),
    kv_segment_ids=mask.kv_segment_ids,
  )
  arrays = query[:, :1], key, value

  def step(arrays):
    return ring.Ring(block_kv=4)(*arrays, mask=mask, sinks=sinks)

  whole = jax.jit(lambda arrays: kernels.plain(*arrays, mask=mask, sinks=sinks))
  np.testing.assert_allclose(
    _layout("sequence=4,tensor=2").jit(step)(arrays),
    whole(arrays),
    rtol=1e-5,
    atol=1e-6,
  )
  text = _compiled(8 * 12, q_length=1, is_trained=False).as_text()
  assert "all-reduce" in text
  assert "all-gather" not in text
  assert "collective-permute" not in text


def test_what_is_hidden_wholly_is_not_computed():
  """Not a number times a weight of zero is not a number."""
  mask, (query, key, value, _) = _mask(), _inputs(2)
  # Seen by the end of the row only.
  broken = np.array(key), np.array(value)
  for array in broken:
    array[1, 24:] = np.nan
  kernel = ring.Ring(block_q=4, block_kv=4)
  plain = jax.jit(lambda *inputs: kernels.plain(*inputs, mask=mask))
  run = jax.jit(lambda *inputs: kernel(*inputs, mask=mask))
  out = np.asarray(run(query, *broken))
  expected = np.asarray(plain(query, key, value))
  np.testing.assert_allclose(
    out[1, :24], expected[1, :24], rtol=1e-5, atol=1e-6
  )
  assert np.isnan(out[1, 24:]).all()
  # Blocks are computed for all rows of a device, or for none.
  assert np.isnan(np.asarray(plain(query, *broken))[1, :24]).all()


def test_zigzag_gives_each_device_as_much_to_see_in_every_step():
  devices, length = 8, 64
  piece = length // (2 * devices)
  layout = _layout(f"sequence={devices}")
  spec = jax.P(None, "sequence")

  def both(x):
    dealt = ring.deal_tokens(x, ("sequence",), devices)
    return dealt, ring.deal_tokens(dealt, ("sequence",), devices, is_back=True)

  positions = jnp.arange(length)[None]
  mapped = jax.shard_map(
    both, in_specs=spec, out_specs=(spec, spec), check_vma=False
  )
  dealt, back = layout.jit(mapped)(positions)
  np.testing.assert_array_equal(back, positions)
  held = np.asarray(dealt).reshape(devices, 2 * piece)
  for i, part in enumerate(held):
    assert {*(part // piece)} == {i, 2 * devices - 1 - i}
  for step in range(1, devices):
    seen = {
      int(np.sum(part[:, None] >= held[i - step][None]))
      for i, part in enumerate(held)
    }
    assert seen == {2 * piece**2}


def test_masks_that_are_even_already_are_not_dealt():
  def permutes(kernel):
    text = _compiled(8 * 12, kernel=kernel, is_trained=False).as_text()
    return len(re.findall(r"= \S+ collective-permute\(", text))

  assert permutes(ring.Ring(balanced=False)) < permutes(ring.Ring())
  for rules in ({"window": 3}, {"chunk": 4}, {"causal": False}):
    assert not ring.is_uneven(attention_mask.MaskRules(**rules))
  assert ring.is_uneven(attention_mask.MaskRules())


def test_what_a_ring_cannot_serve():
  query, key, value, _ = _inputs(2)
  bias = jnp.zeros((BATCH, HEADS, LENGTH, LENGTH))
  with pytest.raises(
    ValueError,
    match=r"ring\.Ring does not support this layer: there is a bias of shape"
    r" \(2, 4, 32, 32\), but ring attention never .*kernels\.plain",
  ):
    ring.Ring()(query, key, value, _mask(), bias=bias)
  with pytest.raises(ValueError, match=r"Ring\.block_kv must be positive"):
    ring.Ring(block_kv=0)
  unset = ring.Ring()
  # Tests check the type of arguments; programs do not.
  object.__setattr__(unset, "block_q", None)
  with pytest.raises(ValueError, match=r"must be positive, got None"):
    unset.__post_init__()
  with pytest.raises(ValueError, match=r"\(4\) must be a multiple of .* \(3\)"):
    ring.Ring()(query, *_inputs(3)[1:3], mask=_mask())
  short = tuple(x[:, :30] for x in (query, key, value))
  step = _layout("sequence=8").jit(lambda x: ring.Ring()(*x, mask=_mask(30)))
  with pytest.raises(ValueError, match=r"of size 30 does not divide by sequ"):
    step(short)
