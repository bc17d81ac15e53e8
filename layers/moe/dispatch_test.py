"""Tests of dispatch: every form equals the sum over each token's experts."""

import functools

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers.moe import (
  dispatch,
  experts,
  grouped_matmul,
  platform_kernels,
  routing,
  testing,
  triton_kernel,
)

G, S, D, F, E, K = 2, 6, 4, 3, 5, 2
_BIG = dispatch.Capacity(minimum=K * G * S)
_SAME = {
  "dropless": dispatch.Dropless(kernel=grouped_matmul.Tiles()),
  "by platform": dispatch.Dropless(),
  "capacity": _BIG,
  "one-hot": dispatch.OneHotEinsum(minimum=K * G * S),
}


@functools.cache
def _jit(form):
  return jax.jit(form)


@functools.cache
def _stacks(kind=experts.GatedExperts, dtype=jnp.float32, **fields):
  x = jnp.zeros((1, 1, D), dtype)
  init = functools.partial(
    kind(mlp_dim=F, **fields).init_with_output, num_experts=E
  )
  return jax.jit(init)(jax.random.key(3), x)[0]


def _call(seed=0, k=K, none=True):
  rng = np.random.default_rng(seed)
  x = jnp.asarray(rng.normal(size=(G, S, D)), jnp.float32)
  ids = np.argsort(rng.random((G, S, E)), -1)[..., :k]
  if none:
    ids[0, 2, 1:] = ids[1, -1] = E
  weights = rng.random((G, S, k)) * (ids < E)
  return x, jnp.asarray(ids, jnp.int32), jnp.asarray(weights, jnp.float32)


def _expected(x, ids, weights, stacks, hidden):
  x64, ids, weights = (
    np.asarray(v).reshape(-1, v.shape[-1]) for v in (x, ids, weights)
  )
  y = testing.mix(x64, ids, weights, stacks.parameters, hidden)
  return y.reshape(x.shape)


def _gated(gate, up):
  return testing.silu(gate) * up


def _clamped(gate, up):
  gate, up = np.minimum(gate, 0.2), np.clip(up, -0.2, 0.2)
  return (up + 1) * gate / (1 + np.exp(-1.702 * gate))


@pytest.mark.nightly(keep=7)
@pytest.mark.parametrize(
  ("stacks", "hidden"),
  [
    pytest.param(_stacks(), _gated, id="gated"),
    pytest.param(
      _stacks(use_bias=True, bias_init=nn.initializers.normal(1.0)),
      _gated,
      id="gated-biases",
    ),
    pytest.param(
      _stacks(experts.PlainExperts, bias_init=nn.initializers.normal(1.0)),
      lambda gate, up: np.maximum(up, 0),
      id="plain-biases",
    ),
    pytest.param(
      _stacks(combine=experts.ClampedSwiglu(limit=0.2), use_bias=True),
      _clamped,
      id="clamped",
    ),
  ],
)
@pytest.mark.parametrize("form", _SAME)
def test_matches_numpy(form, stacks, hidden):
  call = _call()
  y = _jit(_SAME[form])(*call, stacks)
  np.testing.assert_allclose(
    y, _expected(*call, stacks, hidden), rtol=1e-5, atol=1e-6
  )


@pytest.mark.parametrize("form", _SAME)
@pytest.mark.parametrize("k", [1, E])
def test_one_choice_and_all(form, k):
  call, stacks = _call(k=k, none=False), _stacks()
  fits = dispatch.Capacity(minimum=G * S)
  form = fits if form == "capacity" else _SAME[form]
  np.testing.assert_allclose(
    _jit(form)(*call, stacks),
    _expected(*call, stacks, _gated),
    rtol=1e-5,
    atol=1e-6,
  )


def _dense(x, ids, weights, stacks):
  """The definition by einsums, to be differentiated by JAX."""
  p = stacks.parameters
  up = jnp.einsum("gsd,edf->gsef", x, p["up"])
  hidden = nn.silu(jnp.einsum("gsd,edf->gsef", x, p["gate"])) * up
  y = jnp.einsum("gsef,efd->gsed", hidden, p["down"])
  at = jax.nn.one_hot(ids, E) * weights[..., None]
  return jnp.einsum("gske,gsed->gsd", at, y)


@pytest.mark.parametrize("form", _SAME)
def test_gradients(form):
  x, ids, weights = _call()
  stacks, seed = _stacks(), jax.random.normal(jax.random.key(1), x.shape)

  @functools.partial(jax.jit, static_argnums=0)
  def gradients(fn, x, weights, stacks):
    def loss(*args):
      x, weights, stacks = args
      return jnp.sum(fn(x, ids, weights, stacks) * seed)

    return jax.grad(loss, argnums=(0, 1, 2))(x, weights, stacks)

  expected = gradients(_dense, x, weights, stacks)
  actual = gradients(_SAME[form], x, weights, stacks)
  # A choice without an expert has a weight that nothing uses.
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
    actual,
    expected,
  )


@pytest.mark.parametrize("form", _SAME)
def test_bfloat16_tokens(form):
  x, ids, weights = _call()
  stacks = _stacks()
  low = _stacks(dtype=jnp.bfloat16)
  y = _jit(_SAME[form])(x.astype(jnp.bfloat16), ids, weights, low)
  assert y.dtype == jnp.bfloat16
  np.testing.assert_allclose(
    y.astype(jnp.float32),
    _expected(x, ids, weights, stacks, _gated),
    rtol=5e-2,
    atol=5e-2,
  )


def test_all_tokens_to_one_expert():
  x, ids, weights = _call(k=1, none=False)
  ids, stacks = jnp.full_like(ids, 3), _stacks()
  np.testing.assert_allclose(
    _jit(dispatch.Dropless())(x, ids, weights, stacks),
    _expected(x, ids, weights, stacks, _gated),
    rtol=1e-5,
    atol=1e-6,
  )


def test_permuted_tokens_are_permuted():
  x, ids, weights = _call()
  stacks, order = _stacks(), np.random.default_rng(7).permutation(S)
  dropless = _jit(dispatch.Dropless())
  y = dropless(x, ids, weights, stacks)
  permuted = dropless(x[:, order], ids[:, order], weights[:, order], stacks)
  np.testing.assert_allclose(permuted, y[:, order], rtol=1e-6)


def test_later_tokens_and_choices_lose():
  ids = jnp.asarray([[[0, 1], [0, 1], [1, 0], [0, 2]]], jnp.int32)
  exists, slots = dispatch.assign_slots(ids, 3)
  assert bool(exists.all())
  # First choices of 0 are tokens 0, 1, 3; then token 2 by its second.
  # Those of 1: token 2; then tokens 0 and 1.
  np.testing.assert_array_equal(slots, [[[0, 1], [1, 2], [0, 3], [2, 0]]])


@pytest.mark.parametrize(
  "kind", [dispatch.Capacity, dispatch.OneHotEinsum], ids=str
)
def test_drops_beyond_the_capacity(kind):
  x, ids, weights = _call()
  stacks, limited = (
    _stacks(),
    kind(minimum=2, groups=routing.TokenGroups(num_groups=G)),
  )
  kept = np.array(dispatch.assign_slots(ids, E)[1]) < 2
  kept &= np.asarray(ids) < E
  expected = _expected(x, ids, np.asarray(weights) * kept, stacks, _gated)
  np.testing.assert_allclose(
    _jit(limited)(x, ids, weights, stacks), expected, rtol=1e-5, atol=1e-6
  )
  asked = np.asarray(ids) < E
  share = 1 - kept.sum() / asked.sum()
  assert 0 < share < 1
  np.testing.assert_allclose(limited.count_dropped(ids, E), share, rtol=1e-6)


@pytest.mark.parametrize(
  ("size", "num_experts", "factor", "minimum", "expected"),
  [
    (8192, 64, 2.0, 1, 256),
    (16384, 16, 2.0, 1, 2048),
    (100, 8, 1.0, 1, 12),
    (110, 8, 1.0, 1, 16),
    (100, 8, 1.0, 12, 12),
    (100, 8, 1.0, 13, 13),
    (100, 8, 0.0, 7, 7),
  ],
)
def test_capacity_rule_of_pax(size, num_experts, factor, minimum, expected):
  assert (
    dispatch.capacity(size, num_experts, factor=factor, minimum=minimum)
    == expected
  )


def test_no_capacity():
  with pytest.raises(ValueError, match=r"factor above 0 or a minimum above 1"):
    dispatch.Capacity()


_KERNELS = {
  "tiles": grouped_matmul.Tiles(tile=8),
  "tiles of one": grouped_matmul.Tiles(tile=1),
  "triton": triton_kernel.Triton(
    interpret=True, rows=16, columns=16, contracting=16
  ),
  "megablox": platform_kernels.Megablox(interpret=True),
}
_SIZES = {
  "mixed": [3, 0, 17, 4],
  "empty ends": [0, 21, 5, 0],
  "one": [0, 0, 30, 0],
  "none": [0, 0, 0, 0],
  "full": [8, 8, 8, 8],
}


@functools.cache
def _multiply_with_gradients(kernel):
  """Returns a function of the sizes, too, so that it is compiled once."""

  def loss(x, w, sizes, seed):
    out = grouped_matmul.grouped_matmul(x, w, sizes, kernel=kernel)
    return jnp.sum(out * seed), out

  return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))


@pytest.mark.parametrize("sizes", _SIZES.values(), ids=_SIZES)
@pytest.mark.parametrize("kernel", _KERNELS.values(), ids=_KERNELS)
def test_grouped_matmul_with_gradients(kernel, sizes):
  rows, width, columns = 32, 6, 5
  rng = np.random.default_rng(0)
  x = rng.normal(size=(rows, width))
  # Padding must reach nothing.
  x[sum(sizes) :] = np.nan
  w = rng.normal(size=(len(sizes), width, columns))
  seed = rng.normal(size=(rows, columns))
  y, dx, dw = np.zeros((rows, columns)), np.zeros_like(x), np.zeros_like(w)
  row = 0
  for e, size in enumerate(sizes):
    at = slice(row, row + size)
    y[at], dx[at] = x[at] @ w[e], seed[at] @ w[e].T
    dw[e] = x[at].T @ seed[at]
    row += size

  (_, out), grads = _multiply_with_gradients(kernel)(
    jnp.asarray(x, jnp.float32),
    jnp.asarray(w, jnp.float32),
    jnp.asarray(sizes, jnp.int32),
    jnp.asarray(seed, jnp.float32),
  )
  np.testing.assert_allclose(out, y, rtol=1e-5, atol=1e-5)
  np.testing.assert_allclose(grads[0], dx, rtol=1e-5, atol=1e-5)
  np.testing.assert_allclose(grads[1], dw, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
  ("rows", "num_experts", "contracting", "tile", "most"),
  [
    # One expert shares no tile.
    (8192, 1, 2816, 512, 1.0),
    (8192, 2, 2816, 512, 1.0625),
    (8192, 8, 1024, 128, 1.11),
    (8192, 8, 2816, 256, 1.22),
    (32768, 8, 2816, 256, 1.0625),
    (65536, 8, 2816, 512, 1.0625),
    (200, 8, 2816, 256, 8.0),
    (40, 8, 64, 128, 8.0),
  ],
)
def test_tiles_of_megablox_waste_few_rows(
  rows, num_experts, contracting, tile, most
):
  kernel = platform_kernels.Megablox()
  found = kernel.choose_rows(
    rows, num_experts=num_experts, contracting=contracting
  )
  assert found == tile
  # A group is computed in each tile that has one of its rows.
  sizes = np.full(num_experts, rows // num_experts)
  shift = np.arange(num_experts) - (num_experts - 1) / 2
  sizes += (shift * rows / num_experts**2).astype(int)
  sizes[-1] += rows - sizes.sum()
  ends = np.cumsum(sizes)
  tiles = np.sum(-(-ends // tile) - (ends - sizes) // tile)
  assert tiles * tile <= most * max(rows, tile)


def test_rows_of_megablox_can_be_set():
  kernel = platform_kernels.Megablox(rows=512)
  assert kernel.choose_rows(8192, num_experts=8, contracting=64) == 512
  with pytest.raises(ValueError, match=r"Megablox\.rows must be positive"):
    platform_kernels.Megablox(rows=0)


def test_kernel_rejects_a_dtype():
  x, w = jnp.ones((4, 2), jnp.float16), jnp.ones((1, 2, 2), jnp.float16)
  with pytest.raises(
    ValueError, match=r"Megablox does not support .* dtype is float16.*Tiles"
  ):
    grouped_matmul.grouped_matmul(
      x, w, jnp.asarray([4]), kernel=platform_kernels.Megablox()
    )


def test_kernel_rejects_another_platform():
  x, w = jnp.ones((4, 2)), jnp.ones((1, 2, 2))

  def run(x, w):
    return grouped_matmul.grouped_matmul(
      x, w, jnp.asarray([4]), kernel=platform_kernels.Megablox()
    )

  with pytest.raises(NotImplementedError, match=r"platform cpu"):
    jax.jit(run)(x, w)
