"""Tests for the FLOPs of matmuls."""

import itertools
import math
import random as random_lib

import jax
import jax.numpy as jnp
import pytest

from paxon.runner.plan.program_text import hlo, matmuls


def _all(text):
  program = hlo.parse(text)
  return [
    matmul
    for computation in program.computations.values()
    for instruction in computation.instructions.values()
    if (matmul := matmuls.find_matmul(instruction, computation)) is not None
  ]


def _compiled(function, *shapes, dtype=jnp.float32):
  args = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
  return jax.jit(function).lower(*args).compile()


def test_a_matmul_with_a_batch():
  text = _compiled(
    lambda x, y: jnp.einsum("bij,bjk->bik", x, y), (3, 4, 5), (3, 5, 6)
  ).as_text()
  (matmul,) = _all(text)
  assert matmul.flops == 2 * 3 * 4 * 5 * 6
  assert (matmul.dtype, matmul.is_batched) == ("float32", True)


def test_a_matmul_with_weights():
  (matmul,) = _all(_compiled(jnp.dot, (40, 50), (50, 60)).as_text())
  assert matmul.flops == 2 * 40 * 50 * 60
  assert not matmul.is_batched


@pytest.mark.parametrize(
  "options",
  [
    {},
    {"window_strides": (2, 1)},
    {"padding": ((1, 2), (0, 3))},
    {"padding": ((-1, 0), (0, -2))},
    {"lhs_dilation": (2, 3)},
    {"rhs_dilation": (2, 1)},
    {"feature_group_count": 2},
    {
      "window_strides": (2, 2),
      "padding": ((2, 1), (3, 2)),
      "lhs_dilation": (2, 1),
      "rhs_dilation": (1, 2),
    },
  ],
  ids=str,
)
def test_convolutions_as_the_compiler_counts_them(options):
  groups = options.get("feature_group_count", 1)

  def convolve(x, kernel):
    return jax.lax.conv_general_dilated(
      x,
      kernel,
      **{"window_strides": (1, 1), "padding": ((0, 0), (0, 0))} | options,
      dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )

  compiled = _compiled(convolve, (2, 9, 10, 4), (3, 3, 4 // groups, 6))
  (matmul,) = _all(compiled.as_text())
  assert matmul.flops == compiled.cost_analysis()["flops"]


def _by_definition(size, kernel, out, stride, low, lhs, rhs):
  """Pairs of output and window position, tried one by one."""
  count = 0
  for o, k in itertools.product(range(out), range(kernel)):
    position = o * stride - low + k * rhs
    inside = 0 <= position < (size - 1) * lhs + 1
    count += inside and position % lhs == 0
  return count


_TEXT = """HloModule m

ENTRY %main (p: {left}, q: {right}) -> {out} {{
  %p = {left} parameter(0)
  %q = {right} parameter(1)
  ROOT %c = {out} convolution(%p, %q), window={{{window}}}, dim_labels={labels}
}}
"""


def _convolution(left, right, out, window, labels):
  (matmul,) = _all(
    _TEXT.format(left=left, right=right, out=out, window=window, labels=labels)
  )
  return matmul


def test_a_batched_matmul_as_tpus_write_it():
  # 24 matmuls of [8,16] with [16,32]: of 24 x 24 window positions the
  # diagonal meets something.
  matmul = _convolution(
    "bf16[8,24,16]",
    "bf16[24,16,32]",
    "bf16[8,24,32]",
    "size=24 stride=23 pad=0_0 lhs_dilate=24",
    "b0f_0io->b0f",
  )
  assert matmul.flops == 2 * 24 * 8 * 16 * 32
  assert (matmul.is_batched, matmul.dtype) == (True, "bfloat16")
  assert _by_definition(24, 24, 24, 23, 0, 24, 1) == 24


def test_a_kernel_with_heads_as_tpus_write_it():
  # Every head is one window position, all of the others are padding.
  matmul = _convolution(
    "bf16[8,256,512,1]",
    "bf16[512,2,64,1]",
    "f32[8,256,2,64]",
    "size=1x2 pad=0_0x1_1 rhs_reversal=0x1",
    "0bf1_i1o0->0b1f",
  )
  assert matmul.flops == 2 * (8 * 256) * 512 * (2 * 64)
  assert not matmul.is_batched


@pytest.mark.parametrize("seed", range(6))
def test_odd_windows(seed):
  random = random_lib.Random(seed)
  size, kernel = random.randint(2, 9), random.randint(1, 6)
  stride, lhs, rhs = (random.randint(1, 3) for _ in range(3))
  low, high = random.randint(-1, 4), random.randint(0, 4)
  span = (size - 1) * lhs + 1 + low + high - (kernel - 1) * rhs - 1
  out = max(span // stride + 1, 1)
  matmul = _convolution(
    f"f32[2,{size},3]",
    f"f32[{kernel},3,5]",
    f"f32[2,{out},5]",
    f"size={kernel} stride={stride} pad={low}_{high} lhs_dilate={lhs}"
    f" rhs_dilate={rhs}",
    "b0f_0io->b0f",
  )
  valid = _by_definition(size, kernel, out, stride, low, lhs, rhs)
  assert matmul.flops == math.prod((2, 2, 3, 5)) * valid


def test_a_convolution_without_labels():
  text = _TEXT.format(
    left="f32[2,3]", right="f32[3,4]", out="f32[2,4]", window="", labels="x"
  )
  with pytest.raises(hlo.ParseError, match="convolution c has no dimension"):
    _all(text)


@pytest.mark.parametrize(
  ("dtype", "name"),
  [("bf16", "bfloat16"), ("s8", "int8"), ("u4", "uint4"), ("pred", "bool"),
   ("f8e4m3fn", "float8_e4m3fn"), ("token", "token")],
)  # fmt: skip
def test_names_of_dtypes(dtype, name):
  assert matmuls.dtype_name(dtype) == name
