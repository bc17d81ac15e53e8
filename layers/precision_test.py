"""Tests for operations that need float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import precision, testing


@pytest.mark.parametrize(
  ("dtype", "expected"),
  [
    (jnp.bfloat16, "float32"),
    (jnp.float16, "float32"),
    (jnp.float32, "float32"),
    (jnp.float64, "float64"),
  ],
)
def test_narrow_dtypes_are_widened_and_wide_ones_kept(dtype, expected):
  assert precision.at_least_float32(dtype) == jnp.dtype(expected)


def test_widening_keeps_values():
  x = jax.device_put(np.asarray([1.5, -2.0], jnp.bfloat16))
  assert precision.widen(x).dtype == jnp.float32
  assert precision.widen(x).tolist() == [1.5, -2.0]
  with jax.enable_x64(True):
    assert precision.widen(jnp.ones(2, jnp.float64)).dtype == jnp.float64


EQUATION = "BTD,VD->BTV"
SHAPES = ((2, 3, 8), (5, 8), (2, 3, 5))


def _operands(dtype):
  return tuple(
    testing.normal(*shape, seed=i, dtype=dtype)
    for i, shape in enumerate(SHAPES[:2])
  )


def _product(lhs, rhs):
  return precision.wide_einsum(
    EQUATION, lhs, rhs, preferred_element_type=jnp.float32
  )


def _gradients(product, operands, cotangent):
  return jax.vjp(product, *operands)[1](cotangent)


def test_is_einsum_with_a_float32_result():
  lhs, rhs = _operands(jnp.bfloat16)
  y = _product(lhs, rhs)
  assert y.dtype == jnp.float32
  expected = np.asarray(lhs, np.float64) @ np.asarray(rhs, np.float64).T
  np.testing.assert_allclose(y, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_gradients_are_those_of_the_rounded_cotangent(dtype):
  operands = _operands(dtype)
  cotangent = testing.normal(*SHAPES[2], seed=9)
  actual = _gradients(_product, operands, cotangent)
  assert [a.dtype for a in actual] == [dtype, dtype]
  lhs, rhs, rounded = (
    np.asarray(x, np.float64) for x in (*operands, cotangent.astype(dtype))
  )
  expected = rounded @ rhs, np.einsum("BTV,BTD->VD", rounded, lhs)
  # One rounding of the result, and no more.
  rtol = float(jnp.finfo(dtype).eps)
  for a, e in zip(actual, expected, strict=True):
    np.testing.assert_allclose(np.asarray(a, np.float64), e, rtol=rtol)


def test_no_product_multiplies_float32():
  def loss(lhs, rhs):
    return jnp.sum(jnp.sin(_product(lhs, rhs)))

  step = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(
    *_operands(jnp.bfloat16)
  )
  dots = testing.dots(step)
  assert [d.operands for d in dots] == [(jnp.bfloat16, jnp.bfloat16)] * 3
  assert [d.result for d in dots].count(jnp.float32) == 1


def test_float32_is_bitwise_einsum():
  operands, cotangent = _operands(jnp.float32), testing.normal(*SHAPES[2])
  plain = lambda lhs, rhs: jnp.einsum(EQUATION, lhs, rhs)  # noqa: E731
  for run in (
    lambda f: f(*operands),
    lambda f: _gradients(f, operands, cotangent),
  ):
    jax.tree.map(np.testing.assert_array_equal, run(_product), run(plain))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_rounded_einsum_rounds_once_and_so_does_its_gradient(dtype):
  def rounded(lhs, rhs):
    return precision.rounded_einsum(
      EQUATION, lhs, rhs, preferred_element_type=jnp.float32
    )

  operands, cotangent = _operands(dtype), testing.normal(*SHAPES[2], seed=9)
  y = rounded(*operands)
  assert y.dtype == jnp.float32
  np.testing.assert_array_equal(y, y.astype(dtype).astype(jnp.float32))
  # Half of the distance between two numbers, and the error of the sum.
  rtol = float(jnp.finfo(dtype).eps) / 2 + 1e-6
  lhs, rhs, bar = (
    np.asarray(x, np.float64) for x in (*operands, cotangent.astype(dtype))
  )
  np.testing.assert_allclose(y, lhs @ rhs.T, rtol=rtol, atol=1e-6)
  actual = _gradients(rounded, operands, cotangent)
  expected = bar @ rhs, np.einsum("BTV,BTD->VD", bar, lhs)
  for a, e in zip(actual, expected, strict=True):
    assert a.dtype == dtype
    np.testing.assert_allclose(
      np.asarray(a, np.float64), e, rtol=2 * rtol, atol=1e-6
    )


def test_rounded_einsum_keeps_the_dtype_if_none_is_preferred():
  lhs, rhs = _operands(jnp.bfloat16)
  assert precision.rounded_einsum(EQUATION, lhs, rhs).dtype == jnp.bfloat16


@pytest.mark.parametrize("argnum", [0, 1])
def test_one_operand_may_be_a_constant(argnum):
  operands = _operands(jnp.bfloat16)
  loss = lambda *a: jnp.sum(_product(*a))  # noqa: E731
  own = jax.grad(loss, argnums=argnum)
  both = jax.grad(loss, argnums=(0, 1))
  np.testing.assert_array_equal(own(*operands), both(*operands)[argnum])
  assert len(testing.dots(jax.make_jaxpr(own)(*operands))) == 2


@pytest.mark.parametrize(
  "transform",
  [
    pytest.param(jax.jit, id="jit"),
    pytest.param(jax.checkpoint, id="remat"),
    pytest.param(lambda f: lambda *a: jax.vmap(f)(*a), id="vmap"),
  ],
)
def test_transforms_change_nothing(transform):
  if transform in (jax.jit, jax.checkpoint):
    operands = _operands(jnp.bfloat16)
    run, expected = transform(_product), _product
  else:
    operands = tuple(jnp.stack([x, 2 * x]) for x in _operands(jnp.bfloat16))
    run = transform(_product)
    expected = lambda *a: jnp.stack(  # noqa: E731
      [_product(*(x[i] for x in a)) for i in range(2)]
    )
  loss = lambda f: lambda *a: jnp.sum(jnp.sin(f(*a)))  # noqa: E731
  actual, wanted = (
    jax.value_and_grad(loss(f), argnums=(0, 1))(*operands)
    for f in (run, expected)
  )
  for a, e in zip(*map(jax.tree.leaves, (actual, wanted)), strict=True):
    np.testing.assert_allclose(
      np.asarray(a, np.float32), np.asarray(e, np.float32), rtol=2e-2
    )


def test_rejects_operands_of_two_dtypes():
  lhs, rhs = _operands(jnp.bfloat16)
  message = r"operands of one dtype, got bfloat16 and float32"
  with pytest.raises(ValueError, match=message):
    _product(lhs, rhs.astype(jnp.float32))
