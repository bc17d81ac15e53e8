"""Tests for cuDNN attention: its masks, its layout over devices, its refusals.

There is no GPU here: XLA computes from the same description of the mask. What
the compiler for GPUs makes of it is tested with the plan.
"""

import dataclasses
import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import testing
from paxon.layers.attention import cudnn_attention, kernels
from paxon.layers.attention import mask as attention_mask
from paxon.sharding import layout as layouts
from paxon.sharding import mesh as meshes

LENGTH, HEAD_DIM = 8, 16
described = functools.partial(
  cudnn_attention.cudnn, packed=False, implementation="xla"
)

packed = functools.partial(cudnn_attention.cudnn, implementation="xla")


def _mask(segments, positions=None, **settings):
  segments = testing.array(segments, jnp.int32)
  if positions is None:
    positions = np.broadcast_to(np.arange(segments.shape[1]), segments.shape)
  positions = testing.array(positions, jnp.int32)
  return attention_mask.AttentionMask(
    q_positions=positions,
    kv_positions=positions,
    q_segment_ids=segments,
    kv_segment_ids=segments,
    rules=attention_mask.MaskRules(**settings),
  )


def _rows(*lengths):
  return [[1] * n + [0] * (LENGTH - n) for n in lengths]


def _inputs(
  heads=4, kv_heads=2, batch=3, dtype=jnp.float32, length=LENGTH
) -> tuple[jax.Array, jax.Array, jax.Array]:
  query, key, value = (
    testing.normal(batch, length, n, HEAD_DIM, seed=i, dtype=dtype)
    for i, n in enumerate((heads, kv_heads, kv_heads))
  )
  return query, key, value


def _both(inputs, mask, **fields):
  """What is computed by a description of the mask, and by the mask."""

  def run(inputs):
    return [
      fn(*inputs, mask=mask, **fields) for fn in (described, kernels.plain)
    ]

  return jax.jit(run)(inputs)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize(
  "settings", [{}, {"window": 1}, {"window": 3}, {"causal": False}], ids=str
)
def test_a_described_mask_is_the_mask(kv_heads, settings):
  mask = _mask(_rows(LENGTH, 5, 0), **settings)
  found, expected = _both(_inputs(kv_heads=kv_heads), mask)
  np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_gradients_through_a_described_mask():
  mask = _mask(_rows(LENGTH, 5, 0), window=3)

  def gradients(kernel):
    def loss(inputs):
      return jnp.sum(jnp.sin(kernel(*inputs, mask)))

    return jax.jit(jax.grad(loss))(_inputs())

  for actual, expected in zip(
    gradients(described), gradients(kernels.plain), strict=True
  ):
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
  ("segments", "positions"),
  [
    pytest.param([1, 1, 1, 2, 2, 2, 0, 0], None, id="two documents"),
    pytest.param([0, 0, 1, 1, 1, 1, 1, 1], None, id="padding in front"),
    pytest.param([1, 1, 0, 1, 1, 1, 1, 1], None, id="padding inside"),
    pytest.param([1] * 8, [0, 1, 2, 3, 0, 1, 2, 3], id="positions restart"),
    pytest.param([1] * 8, [7, 6, 5, 4, 3, 2, 1, 0], id="positions reversed"),
  ],
)
def test_a_broken_promise_is_nan_in_its_row_only(segments, positions):
  ordinary = list(range(LENGTH))
  mask = _mask(
    [segments, [1] * LENGTH, [2] * LENGTH],
    [positions or ordinary, ordinary, [n + 5 for n in ordinary]],
  )
  out, expected = map(np.asarray, _both(_inputs(), mask))
  seen = np.asarray(segments) != 0
  assert np.all(np.isnan(out[0, seen]))
  np.testing.assert_allclose(out[1:], expected[1:], rtol=1e-5, atol=1e-6)


def _lowers_as_causal(mask):
  """Whether cuDNN gets causality besides the mask as a bias."""
  calls = []

  def record(*arrays, **settings):
    calls.append(settings)
    return arrays[0]

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(jax.nn, "dot_product_attention", record)
    packed(*_inputs(), mask)
  return [c.get("is_causal", False) for c in calls] == [True]


@pytest.mark.parametrize(
  "settings",
  [{}, {"window": 1}, {"window": 2}, {"chunk": 2}, {"causal": False}],
  ids=str,
)
def test_packed_documents_are_masked_by_bias_and_index(settings):
  mask = _mask(
    [[1, 1, 1, 2, 2, 2, 3, 0], [1, 0, 2, 2, 2, 2, 4, 4], [3] * LENGTH],
    [[0, 1, 2, 0, 1, 2, 0, 0], [0, 9, 0, 1, 2, 3, 0, 1], range(5, 13)],
    **settings,
  )
  assert _lowers_as_causal(mask) == ("causal" not in settings)

  def differentiate(kernel):
    def loss(inputs):
      out = kernel(*inputs, mask)
      return jnp.sum(jnp.sin(out)), out

    return jax.jit(jax.grad(loss, has_aux=True))(_inputs())

  found, expected = map(differentiate, (packed, kernels.plain))
  for f, e in zip(
    jax.tree.leaves(found), jax.tree.leaves(expected), strict=True
  ):
    np.testing.assert_allclose(f, e, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
  ("segments", "positions"),
  [
    pytest.param([2, 2, 2, 1, 1, 1, 0, 0], None, id="ids fall"),
    pytest.param([1, 2, 1, 2, 1, 2, 1, 2], None, id="interleaved"),
    pytest.param([1] * 8, [7, 6, 5, 4, 3, 2, 1, 0], id="positions reversed"),
  ],
)
def test_packed_documents_out_of_order_are_nan(segments, positions):
  ordinary = list(range(LENGTH))
  mask = _mask(
    [segments, [1] * LENGTH, [1, 1, 1, 2, 2, 2, 2, 2]],
    [positions or ordinary, ordinary, ordinary],
  )
  out = np.asarray(packed(*_inputs(), mask))
  expected = np.asarray(kernels.plain(*_inputs(), mask))
  assert np.all(np.isnan(out[0, np.asarray(segments) != 0]))
  np.testing.assert_allclose(out[1:], expected[1:], rtol=1e-5, atol=1e-6)


def test_a_prefix_is_masked_by_bias_alone():
  mask = _mask([[1] * LENGTH] * 3)
  prefix = testing.array([[True] * 3 + [False] * 5] * 3, jnp.bool)
  mask = dataclasses.replace(mask, q_prefix=prefix, kv_prefix=prefix)
  assert not _lowers_as_causal(mask)
  found, expected = packed(*_inputs(), mask), kernels.plain(*_inputs(), mask)
  np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_one_document_a_row_is_not_packed():
  mask, inputs = _mask(_rows(LENGTH, 5, 0)), _inputs(dtype=jnp.bfloat16)
  with cudnn_attention.stand_in():
    found = cudnn_attention.one_document(*inputs, mask)
    expected = cudnn_attention.cudnn(*inputs, mask, packed=False)
    np.testing.assert_array_equal(found, expected)
    # It has the promise of `packed=False`, and what a broken one does.
    broken = _mask([[1] * 3 + [2] * 5] * 3)
    assert np.isnan(cudnn_attention.one_document(*inputs, broken)).all()
    with pytest.raises(
      ValueError, match=r"one_document .* logit_cap is 5\.0, but "
    ):
      cudnn_attention.one_document(*inputs, mask, logit_cap=5.0)


def test_a_call_with_a_cache_takes_any_mask():
  (query, _, _), (_, key, value) = _inputs(length=2), _inputs()
  mask = attention_mask.AttentionMask(
    q_positions=testing.array([[3, 4]] * 3, jnp.int32),
    kv_positions=_mask(_rows(5, 5, 5)).q_positions,
    q_segment_ids=testing.ones(3, 2),
    kv_segment_ids=testing.array(_rows(5, 5, 5), jnp.int32),
  )
  found, expected = _both((query, key, value), mask)
  np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.nightly(keep=6)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
  ("spec", "heads", "kv_heads"),
  [
    ("data=2,tensor=4", 4, 4),
    ("fsdp=4,tensor=2", 4, 1),
    ("data=8", 4, 2),
    # Their key/value heads are repeated, or padded; the last has one.
    ("data=2,tensor=4", 8, 2),
    ("data=2,tensor=4", 6, 3),
    ("tensor=8", 6, 1),
  ],
)
def test_each_device_computes_its_rows_and_heads(spec, heads, kv_heads, packed):
  mesh = meshes.make_mesh(meshes.MeshSpec.parse(spec))
  layout = layouts.Layout(mesh)
  kernel = functools.partial(
    cudnn_attention.cudnn, packed=packed, implementation="xla"
  )
  mask = _mask(_rows(8, 7, 6, 5, 4, 3, 2, 1))

  def loss(inputs):
    out = kernel(inputs[0], inputs[1], inputs[2], mask)
    return jnp.sum(jnp.sin(out)), out

  inputs = _inputs(heads=heads, kv_heads=kv_heads, batch=8)
  step = jax.grad(loss, has_aux=True)
  expected, actual = jax.jit(step)(inputs), layout.jit(step)(inputs)
  for a, e in zip(
    jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True
  ):
    np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-6)


def test_split_sequences_are_an_error():
  mesh = meshes.make_mesh(meshes.MeshSpec.parse("sequence=8"))
  inputs = _inputs(heads=8, kv_heads=2, batch=8)
  mask = _mask(_rows(*[8] * 8))
  message = r"needs whole sequences on each device, .* 'length' over"
  with pytest.raises(ValueError, match=message):
    layouts.Layout(mesh).jit(lambda i: described(i[0], i[1], i[2], mask))(
      inputs
    )


def test_heads_of_queries_and_keys_must_be_together():
  mesh = meshes.make_mesh(meshes.MeshSpec.parse("tensor=2,data=4"))
  rules = tuple(
    (name, None if name == "activation_kv_heads" else axis)
    for name, axis in layouts.Layout(mesh).rules
  )
  inputs = _inputs(batch=4)
  mask = _mask(_rows(8, 8, 8, 8))
  with pytest.raises(ValueError, match=r"query and key/value heads"):
    layouts.Layout(mesh, rules).jit(
      lambda i: described(i[0], i[1], i[2], mask)
    )(inputs)


@pytest.mark.parametrize(
  ("head_dim", "dtype", "message"),
  [
    (128, "float32", r"dtype is float32, and the kernel takes bfloat16 or fl"),
    (60, "bfloat16", r"its head_dim is 60, .* multiples of 8 up to 256"),
    (512, "float16", r"its head_dim is 512"),
  ],
)
def test_layers_that_cudnn_cannot_serve(head_dim, dtype, message):
  assert cudnn_attention.problem(head_dim=128, dtype="bfloat16") is None
  query = jnp.zeros((1, LENGTH, 1, head_dim), dtype)
  with pytest.raises(ValueError, match=message):
    cudnn_attention.cudnn(query, query, query, _mask(_rows(LENGTH)))


def test_what_cudnn_has_no_word_for_is_refused():
  inputs = _inputs(dtype=jnp.bfloat16)
  mask = _mask(_rows(8, 8, 8), causal=False, window=3)
  with pytest.raises(ValueError, match=r"windows for causal masks only"):
    cudnn_attention.cudnn(*inputs, mask, packed=False)
  with pytest.raises(
    ValueError,
    match=r"logit_cap is 30\.0, but jax\.nn\..* has no soft cap; use",
  ):
    cudnn_attention.cudnn(*inputs, mask, logit_cap=30.0)
  with pytest.raises(
    ValueError, match=r"a bias of shape \(4, 8, 8\), but cuDNN materi"
  ):
    cudnn_attention.one_document(*inputs, mask, bias=jnp.zeros((4, 8, 8)))


def test_one_document_has_the_keywords_of_a_kernel_only():
  of_plain = inspect.signature(kernels.plain).parameters
  of_cudnn = inspect.signature(cudnn_attention.one_document).parameters
  assert list(of_cudnn) == [name for name in of_plain if name != "einsum"]


def test_scale_is_that_of_all_kernels():
  mask, inputs = _mask(_rows(LENGTH, 5, 0)), _inputs()
  found, expected = _both(inputs, mask, scale=0.7)
  np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_without_cudnn_it_says_so_and_xla_can_stand_in():
  inputs = _inputs(dtype=jnp.bfloat16)
  mask = _mask(_rows(8, 5, 0))
  with pytest.raises(
    cudnn_attention.CudnnMissingError, match=r"JAX reports: .*kernels\.fused\."
  ):
    cudnn_attention.cudnn(*inputs, mask, packed=False)
  with cudnn_attention.stand_in():
    out = cudnn_attention.cudnn(*inputs, mask, packed=False)
  np.testing.assert_array_equal(out, described(*inputs, mask))
