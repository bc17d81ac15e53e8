"""Tests of equations of two operands."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.quantization import equations

SIZES = dict(
  zip("BTSDFENHKGVR", (2, 3, 5, 4, 6, 2, 3, 2, 2, 3, 7, 2), strict=True)
)
# As the layers have them.
EQUATIONS = [
  "BTD,DF->BTF",
  "BTD,DNH->BTNH",
  "BTNH,NHD->BTD",
  "BTD,DKGH->BTKGH",
  "BTED,EDF->BTEF",
  "BTD,VD->BTV",
  "BTKGH,BSKH->BKGTS",
  "BKGTS,BSKH->BTKGH",
  "BTNH,RNH->BTNR",
]


def _operands(equation: str) -> list[np.ndarray]:
  """Small integers, so that every sum is exact."""
  rng = np.random.default_rng(0)
  terms = equation.partition("->")[0].split(",")
  shapes = [[SIZES[c] for c in term] for term in terms]
  return [rng.integers(-8, 8, shape).astype(np.float32) for shape in shapes]


@pytest.mark.parametrize("equation", EQUATIONS)
def test_forward_and_backward_matmuls_match_numpy(equation):
  lhs, rhs = _operands(equation)
  parsed = equations.parse(equation, lhs.ndim, rhs.ndim)
  out = np.einsum(equation, lhs, rhs)

  def dot(part, x, y):
    run = functools.partial(
      equations.dot, part, preferred_element_type=jnp.float32
    )
    return jax.jit(run)(x, y)

  np.testing.assert_array_equal(dot(parsed, lhs, rhs), out)
  left, right, result = parsed.lhs, parsed.rhs, parsed.out
  np.testing.assert_array_equal(
    dot(parsed.backward_lhs, out, rhs),
    np.einsum(f"{result},{right}->{left}", out, rhs),
  )
  np.testing.assert_array_equal(
    dot(parsed.backward_rhs, lhs, out),
    np.einsum(f"{left},{result}->{right}", lhs, out),
  )


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_an_ellipsis_is_any_number_of_dimensions(rank):
  lhs = np.arange(4 * 2 ** (rank - 1), dtype=np.float32)
  lhs = lhs.reshape([2] * (rank - 1) + [4])
  rhs = np.arange(12, dtype=np.float32).reshape(4, 3)
  parsed = equations.parse("...D,DF->...F", rank, 2)
  got = equations.dot(
    parsed,
    jax.device_put(lhs),
    jax.device_put(rhs),
    preferred_element_type=jnp.float32,
  )
  np.testing.assert_array_equal(got, np.einsum("...D,DF->...F", lhs, rhs))


def test_operands_of_two_formats_are_not_promoted():
  lhs = jax.device_put(np.asarray([[0.5, 448.0]], jnp.float8_e4m3fn))
  rhs = jax.device_put(np.asarray([[1024.0], [57344.0]], jnp.float8_e5m2))
  parsed = equations.parse("AB,BC->AC", 2, 2)
  got = equations.dot(parsed, lhs, rhs, preferred_element_type=jnp.float32)
  assert float(got[0, 0]) == 0.5 * 2.0**10 + 448.0 * 57344.0


def test_scales_take_the_dimensions_of_the_output():
  parsed = equations.parse("BTKGH,BSKH->BKGTS", 5, 4)
  scale = jnp.arange(2 * 3 * 2 * 3, dtype=jnp.float32).reshape(2, 3, 2, 3, 1)
  moved = equations.like_output(scale, parsed.lhs, parsed.out)
  assert moved.shape == (2, 2, 3, 3, 1)
  assert float(moved[1, 0, 2, 1, 0]) == float(scale[1, 1, 0, 2, 0])


@pytest.mark.parametrize(
  ("equation", "ranks", "message"),
  [
    ("BTD,DF", (3, 2), r"have the form 'lhs,rhs->out', got 'BTD,DF'"),
    ("AB,BC,CD->AD", (2, 2), r"have the form 'lhs,rhs->out'"),
    ("AB,BC->AC", (3, 2), r"has 2 dimensions in lhs, the operand has 3"),
    ("AB,BC->AC", (2, 1), r"has 2 dimensions in rhs, the operand has 1"),
    ("AA,AC->C", (2, 2), r"A letter may stand once in each term of 'AA,AC->C'"),
    ("AB,BC->A", (2, 2), r"in two of its terms or in all, \['C'\] is in one"),
    ("AB,BC->ACD", (2, 2), r"in two of its terms or in all, \['D'\] is in one"),
    ("...AB,BC->...AC", (1, 2), r"'\.\.\.' of .* operands of 1 and 2"),
    ("...A,...A->...", (3, 2), r"'\.\.\.' of .* does not stand for the same"),
  ],
)
def test_rejects_equations_without_two_operands(equation, ranks, message):
  with pytest.raises(ValueError, match=message):
    equations.parse(equation, *ranks)
