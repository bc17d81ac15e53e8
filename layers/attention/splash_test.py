"""Tests for splash attention: rows, blocks, devices, refusals.

Pallas interprets the kernel; the compiler for TPUs is tested with the plan.
Values and gradients of small rows are in `kernel_battery_test`.
"""

import jax
from jax import ad_checkpoint
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import remat, testing
from paxon.layers.attention import kernel_support, kernels, splash
from paxon.layers.attention import mask as attention_mask
from paxon.sharding import layout as layouts
from paxon.sharding import mesh as meshes

HEAD_DIM = 16
interpreted = splash.Splash(interpret=True)


def _mask(segments, positions=None, **settings):
  segments = testing.array(segments, jnp.int32)
  if positions is None:
    positions = jnp.broadcast_to(
      jnp.arange(segments.shape[1], dtype=jnp.int32), segments.shape
    )
  positions = testing.array(positions, jnp.int32)
  return attention_mask.AttentionMask(
    q_positions=positions,
    kv_positions=positions,
    q_segment_ids=segments,
    kv_segment_ids=segments,
    rules=attention_mask.MaskRules(**settings),
  )


def _inputs(batch, length, heads=4, kv_heads=2, dtype=jnp.float32):
  return tuple(
    testing.normal(batch, length, n, HEAD_DIM, seed=i, dtype=dtype)
    for i, n in enumerate((heads, kv_heads, kv_heads))
  )


def _gradient(kernel, mask, **keywords):
  def loss(inputs):
    out = kernel(inputs[0], inputs[1], inputs[2], mask, **keywords)
    return jnp.sum(jnp.sin(out)), out

  return jax.jit(jax.grad(loss, has_aux=True))


def _assert_same(found, expected):
  for a, e in zip(
    jax.tree.leaves(found), jax.tree.leaves(expected), strict=True
  ):
    np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("fused_backward", [False, True])
def test_several_blocks_and_a_padded_row(fused_backward):
  kernel = splash.Splash(
    block_q=128,
    block_kv=256,
    block_kv_compute=128,
    fused_backward=fused_backward,
    interpret=True,
  )
  length = 250
  segments = [[1] * 130 + [2] * 90 + [0] * 30]
  positions = [[*range(130), *range(90), *range(30)]]
  mask = _mask(segments, positions, window=70)
  inputs = _inputs(1, length, heads=2, kv_heads=1)
  step = _gradient(kernel, mask, logit_cap=3.0)
  _assert_same(
    step(inputs), _gradient(kernels.plain, mask, logit_cap=3.0)(inputs)
  )


@pytest.mark.parametrize(
  ("spec", "kv_heads", "is_trained"),
  [("data=2,tensor=2,fsdp=2", 2, False), ("fsdp=2,tensor=4", 1, True)],
)
def test_each_device_computes_its_rows_and_heads(spec, kv_heads, is_trained):
  # Positions go on over the second document, as places do.
  mask = _mask([[1] * 5 + [2] * 3, [1] * 6 + [0] * 2] * 2)
  mesh = meshes.make_mesh(meshes.MeshSpec.parse(spec))
  inputs = _inputs(4, 8, kv_heads=kv_heads)
  sinks = testing.normal(4, seed=9)

  def of(kernel):
    def attend(arrays):
      inputs, sinks = arrays
      return kernel(*inputs, mask, sinks=sinks)

    def loss(arrays):
      return jnp.sum(jnp.sin(attend(arrays)))

    return jax.grad(loss) if is_trained else attend

  step = layouts.Layout(mesh).jit(of(interpreted))
  expected = jax.jit(of(kernels.plain))((inputs, sinks))
  _assert_same(step((inputs, sinks)), expected)


@pytest.mark.parametrize(
  ("segments", "positions"),
  [
    pytest.param([1, 1, 1, 1], [0, 1, 0, 1], id="positions restart"),
    pytest.param([1, 2, 1, 1], [0, 0, 1, 2], id="a document in two pieces"),
  ],
)
def test_rows_whose_places_are_no_positions_are_nan(segments, positions):
  mask = _mask([segments, [1] * 4], [positions, [0, 1, 2, 3]])
  inputs = _inputs(2, 4)
  out, expected = (
    np.asarray(jax.jit(lambda i: kernel(*i, mask=mask))(inputs))  # noqa: B023
    for kernel in (interpreted, kernels.plain)
  )
  assert np.isnan(out[0]).all()
  _assert_same(out[1], expected[1])


def test_attention_to_another_row_sees_segments_only():
  mask = attention_mask.AttentionMask(
    q_positions=testing.array([[5, 1, 0]], jnp.int32),
    kv_positions=jnp.zeros((1, 5), jnp.int32),
    q_segment_ids=testing.array([[1, 7, 2]], jnp.int32),
    kv_segment_ids=testing.array([[2, 1, 1, 0, 2]], jnp.int32),
    rules=attention_mask.MaskRules(causal=False),
  )
  query, key, value = _inputs(1, 5)
  arrays = query[:, :3], key, value
  out, expected = (
    jax.jit(lambda arrays: kernel(*arrays, mask=mask))(arrays)  # noqa: B023
    for kernel in (interpreted, kernels.plain)
  )
  assert not np.any(out[:, 1]), "nothing is of segment 7"
  _assert_same(out, expected)


def test_calls_with_a_cache_go_where_the_configuration_says():
  query, key, value = _inputs(1, 6)
  mask = _mask([[1] * 6])
  mask = attention_mask.AttentionMask(
    q_positions=mask.q_positions[:, 5:],
    kv_positions=mask.kv_positions,
    q_segment_ids=mask.q_segment_ids[:, 5:],
    kv_segment_ids=mask.kv_segment_ids,
  )
  arrays = query[:, 5:], key, value
  with pytest.raises(
    ValueError,
    match=r"1 queries attend to 6 keys .*set with_cache to a kernel .*s\.plain",
  ):
    splash.Splash()(*arrays, mask)
  kernel = splash.Splash(with_cache=kernels.plain)
  found, expected = (
    jax.jit(lambda i: fn(*i, mask=mask, scale=0.3, logit_cap=2.0))(arrays)  # noqa: B023
    for fn in (kernel, kernels.plain)
  )
  np.testing.assert_array_equal(found, expected)


def test_a_block_divides_the_padded_row():
  def blocks(length, **fields):
    found = splash.Splash(**fields).blocks(length, length)
    return found.block_q, found.block_kv, found.block_kv_compute

  assert blocks(128) == (128, 128, 128)
  assert blocks(2048) == (512, 512, 512)
  assert blocks(640) == (128, 128, 128)
  assert blocks(768) == (384, 384, 384)
  fields = {"block_kv": 1024, "block_kv_compute": 256, "block_q_backward": 128}
  assert blocks(2048, **fields) == (512, 1024, 256)
  backward = splash.Splash(**fields).blocks(2048, 2048)
  assert (backward.block_q_dkv, backward.block_kv_dkv) == (128, 1024)
  assert (backward.block_q_dq, backward.block_kv_dq) == (128, 1024)
  assert backward.has_backward_blocks


@pytest.mark.parametrize("field", ["block_q", "block_kv", "block_kv_compute"])
@pytest.mark.parametrize("size", [0, -128, 200])
def test_rejects_a_block_that_is_no_multiple(field, size):
  message = rf"Splash\.{field} must be a positive multiple of 128, got {size}"
  with pytest.raises(ValueError, match=message):
    splash.Splash(**{field: size})


def test_what_splash_attention_cannot_serve():
  inputs = _inputs(1, 8)
  mask = _mask([[1] * 8])
  kernel = splash.Splash()
  with pytest.raises(ValueError, match=r"splash attention has no bias; use "):
    kernel(*inputs, mask=mask, bias=jnp.zeros((1, 4, 8, 8)))
  with pytest.raises(ValueError, match=r"dtype is float16, and .* bfloat16 or"):
    kernel(*_inputs(1, 8, dtype=jnp.float16), mask=mask)
  with pytest.raises(ValueError, match=r"\(3\) must be a multiple of .* \(2\)"):
    kernel(*_inputs(1, 8, heads=3), mask=mask)
  layout = layouts.Layout(meshes.make_mesh(meshes.MeshSpec.parse("sequence=8")))
  step = layout.jit(lambda arrays: interpreted(*arrays, mask=mask))
  with pytest.raises(
    ValueError,
    match=r"Splash attention needs whole sequences .*use .*ring\.Ring",
  ):
    step(inputs)


def test_an_interpreted_kernel_runs_everywhere():
  assert splash.Splash().support is kernel_support.SPLASH
  assert interpreted.support.platforms == ()


def test_residuals_of_the_kernel_have_a_remat_name(capsys):
  mask = _mask([[1] * 128])

  def loss(query, key, value):
    out = interpreted(query, key, value, mask)
    return jnp.sum(jnp.sin(remat.tag(out, remat.ATTENTION_CONTEXT)))

  def saved(policy):
    kept = jax.checkpoint(loss, policy=policy)
    ad_checkpoint.print_saved_residuals(kept, *_inputs(1, 128))
    return capsys.readouterr().out

  # The output and the statistics, with which the kernel is not run again.
  text = saved(remat.save_only(remat.ATTENTION_RESIDUALS))
  assert {"f32[1,4,128,16] output", "f32[1,4,128] output"} <= {
    line.partition(" of ")[0] for line in text.splitlines()
  }
  assert "output of" not in saved(remat.save_nothing)
