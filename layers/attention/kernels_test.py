"""Tests for attention kernels: one battery for all of them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import testing
from paxon.layers.attention import cudnn_attention, kernels, splash
from paxon.layers.attention import mask as attention_mask

KERNELS = [
  pytest.param(kernels.plain, id="plain"),
  pytest.param(kernels.auto, id="auto"),
  pytest.param(kernels.fused, id="fused"),
  pytest.param(
    functools.partial(cudnn_attention.cudnn, implementation="xla"), id="cudnn"
  ),
  pytest.param(splash.Splash(interpret=True), id="splash"),
]
LENGTH, HEAD_DIM = 6, 4
# Two documents and padding; one document.
POSITIONS = [[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5]]
SEGMENTS = [[1, 1, 1, 2, 2, 0], [1, 1, 1, 1, 1, 1]]


def _mask(**kwargs):
  positions, segments = (
    testing.array(rows, jnp.int32) for rows in (POSITIONS, SEGMENTS)
  )
  return attention_mask.AttentionMask(
    q_positions=positions,
    kv_positions=positions,
    q_segment_ids=segments,
    kv_segment_ids=segments,
    rules=attention_mask.MaskRules(**kwargs),
  )


def _inputs(heads, kv_heads, dtype=jnp.float32):
  shapes = [heads, kv_heads, kv_heads]
  return tuple(
    testing.normal(2, LENGTH, n, HEAD_DIM, seed=i, dtype=dtype)
    for i, n in enumerate(shapes)
  )


@functools.cache
def _compiled(kernel, keywords):
  return jax.jit(lambda inputs, mask: kernel(*inputs, mask, **dict(keywords)))


def _run(kernel, inputs, mask, **keywords):
  """What a kernel gives, compiled as a whole: once for masks of one rule."""
  return np.asarray(_compiled(kernel, tuple(keywords.items()))(inputs, mask))


def _visible(b, t, s, causal=True, window=None):
  """The rules of the mask, from its description."""
  if SEGMENTS[b][t] != SEGMENTS[b][s] or SEGMENTS[b][s] == 0:
    return False
  distance = POSITIONS[b][t] - POSITIONS[b][s]
  if causal and distance < 0:
    return False
  return window is None or abs(distance) < window


def _oracle(
  query,
  key,
  value,
  logit_cap=None,
  scale=HEAD_DIM**-0.5,
  sinks=None,
  **settings,
):
  """One query, one head at a time, over the visible keys only."""
  query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
  groups = query.shape[2] // key.shape[2]
  out = np.zeros((*query.shape[:3], value.shape[-1]))
  for b, t, n in np.ndindex(query.shape[:3]):
    seen = [s for s in range(LENGTH) if _visible(b, t, s, **settings)]
    if not seen:
      continue
    k = n // groups
    logits = [query[b, t, n] @ key[b, s, k] * scale for s in seen]
    if logit_cap is not None:
      logits = logit_cap * np.tanh(np.asarray(logits) / logit_cap)
    nothing = 0.0 if sinks is None else np.exp(sinks[n])
    weights = np.exp(logits) / (np.sum(np.exp(logits)) + nothing)
    for s, weight in zip(seen, weights, strict=True):
      out[b, t, n] += weight * value[b, s, k]
  return out


@pytest.mark.nightly(keep=14)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (3, 1)])
@pytest.mark.parametrize(
  "settings", [{}, {"window": 2}, {"causal": False}], ids=str
)
def test_matches_numpy(kernel, heads, kv_heads, settings):
  inputs = _inputs(heads, kv_heads)
  np.testing.assert_allclose(
    _run(kernel, inputs, _mask(**settings)),
    _oracle(*inputs, **settings),
    rtol=1e-5,
    atol=1e-6,
  )


def test_gradients_match_finite_differences():
  def loss(inputs):
    query, key, value = inputs
    return jnp.sum(jnp.sin(kernels.plain(query, key, value, _mask())))

  testing.assert_gradients_match(loss, _inputs(4, 2))


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_query_without_keys_gives_zeros_and_zero_gradients(kernel):
  def padded(inputs):
    return kernel(*inputs, _mask())[0, 5]

  inputs = _inputs(4, 2)
  assert not np.any(_run(kernel, inputs, _mask())[0, 5])
  gradients = jax.jit(
    jax.grad(lambda i: jnp.sum(jnp.cos(padded(i)) + padded(i)))
  )(inputs)
  assert not any(np.any(g) for g in gradients)


@pytest.mark.parametrize("kernel", KERNELS)
def test_hidden_keys_have_no_influence(kernel):
  inputs = _inputs(4, 2)
  before = _run(kernel, inputs, _mask())
  query, key, value = map(np.array, inputs)
  # Position 2 of row 0 is the last of the first document.
  key[0, 2] = value[0, 2] = 50.0
  same = before == _run(kernel, (query, key, value), _mask())
  assert same[0, [0, 1, 3, 4, 5]].all()
  assert not same[0, 2].any()
  assert same[1].all()


@pytest.mark.parametrize("kernel", KERNELS)
def test_huge_logits_stay_finite(kernel):
  query, key, value = _inputs(4, 2)
  out = _run(kernel, (1e4 * query, 1e4 * key, value), _mask())
  assert np.all(np.isfinite(out))


@pytest.mark.parametrize("kernel", KERNELS)
def test_bfloat16_softmax_is_in_float32(kernel):
  inputs = _inputs(4, 2, jnp.bfloat16)
  out = _run(kernel, inputs, _mask())
  assert out.dtype == jnp.bfloat16
  np.testing.assert_allclose(
    np.asarray(out, np.float32), _oracle(*inputs), rtol=2e-2, atol=2e-2
  )


def test_plain_caps_the_scaled_logits():
  query, key, value = _inputs(4, 2)
  inputs = 3 * query, key, value
  capped = _run(kernels.plain, inputs, _mask(), logit_cap=1.5)
  np.testing.assert_allclose(
    capped, _oracle(*inputs, logit_cap=1.5), rtol=1e-5, atol=1e-6
  )
  assert np.max(np.abs(capped - _run(kernels.plain, inputs, _mask()))) > 0.1


def test_fused_says_that_it_cannot_cap():
  message = (
    r"kernels\.fused does not support .* logit_cap is 30\.0, but .*s\.plain"
  )
  query, key, value = _inputs(4, 2)
  with pytest.raises(ValueError, match=message):
    kernels.fused(query, key, value, _mask(), logit_cap=30.0)


@pytest.mark.parametrize("kernel", KERNELS)
def test_scale_takes_the_place_of_the_usual_one(kernel):
  inputs = _inputs(4, 2)
  np.testing.assert_allclose(
    _run(kernel, inputs, _mask(), scale=1.25),
    _oracle(*inputs, scale=1.25),
    rtol=1e-5,
    atol=1e-6,
  )


def test_sinks_take_their_share():
  inputs, sinks = _inputs(4, 2), testing.array([-3.0, 0.0, 0.7, 9.0])

  @jax.jit
  def run(inputs, sinks):
    return kernels.plain(*inputs, mask=_mask(), sinks=sinks, logit_cap=1.5)

  np.testing.assert_allclose(
    run(inputs, sinks),
    _oracle(*inputs, sinks=np.asarray(sinks, np.float64), logit_cap=1.5),
    rtol=1e-5,
    atol=1e-6,
  )


def test_huge_logits_and_sinks_stay_finite():
  def loss(inputs):
    return jnp.sum(kernels.plain(*inputs[:3], mask=_mask(), sinks=inputs[3]))

  query, key, value = _inputs(4, 2)
  both = jax.jit(jax.value_and_grad(loss))
  for size in (1e4, -1e4):
    inputs = 1e4 * query, 1e4 * key, value, np.full((4,), size, np.float32)
    leaves = jax.tree.leaves(both(inputs))
    assert all(np.all(np.isfinite(x)) for x in leaves)


def test_fused_says_that_it_has_no_sinks():
  message = r"kernels\.fused .*sinks.*use .*kernels\.plain"
  with pytest.raises(ValueError, match=message):
    kernels.fused(*_inputs(4, 2), mask=_mask(), sinks=jnp.zeros(4))


def test_plain_takes_values_of_another_width():
  query, key, _ = _inputs(4, 2)
  value = testing.normal(2, LENGTH, 2, 3, seed=5)
  np.testing.assert_allclose(
    _run(kernels.plain, (query, key, value), _mask()),
    _oracle(query, key, value),
    rtol=1e-5,
    atol=1e-6,
  )


@pytest.mark.parametrize(
  ("kernel", "dtype"),
  [
    (kernels.plain, jnp.float16),
    (kernels.plain, jnp.bfloat16),
    (kernels.fused, jnp.float16),
    (kernels.fused, jnp.bfloat16),
  ],
  ids=["plain-16", "plain-b16", "fused-16", "fused-b16"],
)
def test_narrow_dtypes_hide_keys_altogether(kernel, dtype):
  """In Pax a float16 mask hid nothing from float32 logits."""
  query, key, value = _inputs(4, 2, dtype)
  at = (0, slice(3, None))  # Another document, and padding.
  huge = testing.array(3e4, dtype)
  changed = key.at[at].set(huge), value.at[at].set(huge)
  # One operation at a time: as a whole, XLA has no such product of float16.
  before = kernel(query, key, value, _mask())[:, :3]
  after = kernel(query, *changed, _mask())[:, :3]
  np.testing.assert_array_equal(after, before)


@pytest.mark.parametrize("grouped", [False, True])
def test_wide_keys_and_values_give_the_same_as_narrow_ones(grouped):
  query, key, value = _inputs(4, 2 if grouped else 4, jnp.bfloat16)
  wide = key.astype(jnp.float32), value.astype(jnp.float32)
  expected = _run(kernels.plain, (query, key, value), _mask())
  for kernel in (
    kernels.auto,
    functools.partial(kernels.call, kernels.auto),
    functools.partial(kernels.call, kernels.plain),
  ):
    actual = _run(kernel, (query, *wide), _mask())
    assert actual.dtype == jnp.bfloat16
    np.testing.assert_array_equal(actual, expected)
  fused = _run(kernels.fused, (query, key, value), _mask())
  called = functools.partial(kernels.call, kernels.fused)
  np.testing.assert_array_equal(_run(called, (query, *wide), _mask()), fused)


def test_keys_narrower_than_queries_are_an_error():
  query, key, value = _inputs(4, 4)
  narrow = key.astype(jnp.bfloat16), value.astype(jnp.bfloat16)
  with pytest.raises(ValueError, match="wide_einsum needs operands of one"):
    kernels.plain(query, *narrow, _mask())


@pytest.mark.parametrize(
  # The two of `fused` are backward products of JAX's own form for XLA.
  ("kernel", "wide"),
  [
    pytest.param(kernels.plain, 0, id="plain"),
    pytest.param(kernels.fused, 2, id="fused"),
  ],
)
def test_products_with_a_float32_operand(kernel, wide):
  def loss(inputs):
    return jnp.sum(kernel(*inputs, _mask()).astype(jnp.float32))

  gradient = jax.make_jaxpr(jax.grad(loss))(_inputs(4, 2, jnp.bfloat16))
  dots = testing.dots(gradient)
  assert len(dots) == 6
  assert sum(jnp.float32 in d.operands for d in dots) == wide


@pytest.mark.parametrize("kernel", KERNELS)
def test_rejects_heads_that_do_not_divide(kernel):
  with pytest.raises(ValueError, match=r"\(3\) must be a multiple .* \(2\)"):
    kernel(*_inputs(3, 2), _mask())


ARRAYS = {
  "query": (2, 3, 4, 8),
  "key": (2, 5, 2, 8),
  "value": (2, 5, 2, 6),
  "q_positions": (2, 3),
  "kv_positions": (2, 5),
}


def _check_arrays(**shapes):
  arrays = {k: jnp.zeros(shape) for k, shape in (ARRAYS | shapes).items()}
  kernels.check_shapes("my_kernel", **arrays)


def test_arrays_that_fit_pass():
  _check_arrays()


@pytest.mark.parametrize(
  ("shapes", "message"),
  [
    ({"query": (2, 3, 32)}, r"queries \[B,T,N,H\].*got \(2, 3, 32\), \(2, 5,"),
    ({"key": (2, 5, 2, 6)}, r"needs queries .*\(2, 5, 2, 6\)"),
    ({"value": (2, 4, 2, 6)}, r"needs queries .*\(2, 4, 2, 6\)"),
    ({"query": (1, 3, 4, 8)}, r"needs queries .*\(1, 3, 4, 8\)"),
    ({"q_positions": (2, 5)}, r"a mask of \(2, 3\) queries, got .*\(2, 5\)"),
    ({"kv_positions": (1, 5)}, r"a mask of \(2, 5\) keys, got .*\(1, 5\)"),
    ({"query": (2, 3, 5, 8)}, r"query heads \(5\) must be a multiple .* \(2\)"),
  ],
  ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_rejects_arrays_that_do_not_fit(shapes, message):
  with pytest.raises(ValueError, match=message):
    _check_arrays(**shapes)
