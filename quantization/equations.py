"""Einsum equations of two operands with different dtypes.

`jnp.einsum` promotes its operands to one dtype, for example an e4m3 kernel and
an e5m2 gradient. `dot` computes an equation with one `lax.dot_general` without
promotion.

A letter of an equation is batch (in both operands and the output), contracted
(in both operands only), or free (in one operand and the output).
"""

import dataclasses
import string

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike


@dataclasses.dataclass(frozen=True)
class Equation:
  """An einsum equation with one letter per dimension.

  Attributes:
    lhs: Letters of the left operand.
    rhs: Letters of the right operand.
    out: Letters of the output.
  """

  lhs: str
  rhs: str
  out: str

  @property
  def text(self) -> str:
    """The equation as text, `lhs,rhs->out`."""
    return f"{self.lhs},{self.rhs}->{self.out}"

  @property
  def backward_lhs(self) -> "Equation":
    """The equation for the gradient of `lhs`: out,rhs->lhs."""
    return Equation(self.out, self.rhs, self.lhs)

  @property
  def backward_rhs(self) -> "Equation":
    """The equation for the gradient of `rhs`: lhs,out->rhs."""
    return Equation(self.lhs, self.out, self.rhs)

  @property
  def contracted(self) -> str:
    """The contracted letters, in the order of the right operand."""
    return "".join(c for c in self.rhs if c not in self.out)

  def contracted_axes(self, letters: str) -> tuple[int, ...]:
    """Returns the contracted dimensions of an operand."""
    return tuple(i for i, c in enumerate(letters) if c in self.contracted)


def parse(equation: str, lhs_rank: int, rhs_rank: int) -> Equation:
  """Returns an equation with a letter for every dimension.

  Args:
    equation: `"lhs,rhs->out"`, as in `jnp.einsum`. `...` stands for the same
      dimensions in each term.
    lhs_rank: Rank of the left operand.
    rhs_rank: Rank of the right operand.

  Raises:
    ValueError: The equation does not have two operands and an output, a letter
      is repeated in a term or is in one term only, or the ranks do not match.
  """
  inputs, arrow, out = equation.replace(" ", "").partition("->")
  terms = inputs.split(",")
  if not arrow or len(terms) != 2:
    raise ValueError(
      f"A quantized einsum must have the form 'lhs,rhs->out', got '{equation}'."
    )
  unused = [c for c in string.ascii_letters if c not in equation]
  widths = {
    rank - len(term.replace("...", ""))
    for term, rank in zip(terms, (lhs_rank, rhs_rank), strict=True)
    if "..." in term
  }
  if len(widths) > 1 or min(widths, default=0) < 0:
    raise ValueError(
      f"'...' of '{equation}' does not stand for the same dimensions in "
      f"operands of {lhs_rank} and {rhs_rank} dimensions."
    )
  rest = "".join(unused[: max(widths, default=0)])
  full = Equation(*(t.replace("...", rest) for t in (*terms, out)))
  _check(equation, full, lhs_rank, rhs_rank)
  return full


def dot(
  equation: Equation,
  lhs: jax.Array,
  rhs: jax.Array,
  *,
  preferred_element_type: DTypeLike,
) -> jax.Array:
  """Computes the equation as one `lax.dot_general` and a transpose."""
  batch = [c for c in equation.lhs if c in equation.rhs and c in equation.out]
  contracted = equation.contracted
  dimensions = [
    (
      [equation.lhs.index(c) for c in letters],
      [equation.rhs.index(c) for c in letters],
    )
    for letters in (contracted, batch)
  ]
  # As in jnp.einsum; a plan distinguishes matmuls by their equations.
  with jax.named_scope(equation.text):
    out = jax.lax.dot_general(
      lhs,
      rhs,
      (dimensions[0], dimensions[1]),
      preferred_element_type=jnp.dtype(preferred_element_type),
    )
  inner = [*batch, *contracted]
  order = [
    *batch,
    *(c for c in equation.lhs if c not in inner),
    *(c for c in equation.rhs if c not in inner),
  ]
  return jnp.transpose(out, [order.index(c) for c in equation.out])


def like_output(scale: jax.Array, letters: str, out: str) -> jax.Array:
  """Returns scales of an operand in the dimensions of the output.

  Args:
    scale: A scalar, or of the operand's rank with size 1 in contracted
      dimensions.
    letters: Letters of the operand.
    out: Letters of the output.
  """
  if scale.ndim == 0:
    return scale
  kept = [c for c in out if c in letters]
  dropped = tuple(i for i, c in enumerate(letters) if c not in out)
  scale = jnp.squeeze(scale, dropped)
  present = [c for c in letters if c in out]
  scale = jnp.transpose(scale, [present.index(c) for c in kept])
  return jnp.expand_dims(
    scale, [i for i, c in enumerate(out) if c not in letters]
  )


def _check(equation: str, full: Equation, lhs_rank: int, rhs_rank: int) -> None:
  for term in (full.lhs, full.rhs, full.out):
    if len(set(term)) != len(term) or "." in term:
      raise ValueError(f"A letter may stand once in each term of '{equation}'.")
  for name, term, rank in (
    ("lhs", full.lhs, lhs_rank),
    ("rhs", full.rhs, rhs_rank),
  ):
    if len(term) != rank:
      raise ValueError(
        f"'{equation}' has {len(term)} dimensions in {name}, the operand has "
        f"{rank}."
      )
  both = set(full.lhs) & set(full.rhs)
  one = set(full.lhs) ^ set(full.rhs)
  lost = one - set(full.out)
  new = set(full.out) - one - both
  if lost or new:
    raise ValueError(
      f"Each letter of '{equation}' must be in two of its terms or in all, "
      f"{sorted(lost | new)} is in one."
    )
