"""Quantization of stored weights by statistics of their inputs.

A conversion applies the model to a few batches, with the collection
`calibration` mutable: each matmul that stores its weights sums statistics of
its left operand. Its weights are then quantized by the method of its recipe
(`recipe.Recipe.calibration`):

  Gptq         rounds the inputs of a matmul one after the other, and corrects
               the weights of the later ones by each error (Frantar et al. 2022,
               arXiv 2210.17323), in the order of the largest inputs, with the
               scales of the original weights
  Awq          multiplies the weights of large inputs before rounding, and
               divides the inputs (Lin et al. 2023, arXiv 2306.00978)
  SmoothQuant  the same by the largest magnitudes of inputs and weights, so that
               8-bit activations lose less (Xiao et al. 2022, arXiv 2211.10438)

Statistics are those of the model before quantization, for all matmuls at once.
A matmul with C inputs per output has one Hessian, float32 [C, C].
"""

from collections.abc import Callable
import dataclasses
import functools
import math

import jax
import jax.numpy as jnp

from paxon.quantization import equations, number_formats, quantized_array
from paxon.quantization import recipe as recipe_lib

COLLECTION = "calibration"
# Sum over tokens of the outer product of the inputs with themselves.
HESSIAN = "hessian"
# Sum over tokens of the magnitudes of inputs, and the largest.
SUM, LARGEST = "sum", "largest"

Statistics = dict[str, jax.Array]
# `(weights) -> quantized weights`.
Quantize = Callable[[jax.Array], quantized_array.QuantizedArray]

# Rows that are corrected one by one before all later rows are.
_BLOCK = 128
# Exponents of AWQ that are tried: 0 to 0.95 in steps of 0.05.
_EXPONENTS = tuple(i / 20 for i in range(20))


def measure(
  equation: equations.Equation,
  lhs: jax.Array,
  method: recipe_lib.Calibration,
) -> Statistics:
  """Returns the statistics of a left operand that a method needs, in float32.

  Args:
    equation: Equation of the matmul.
    lhs: The left operand.
    method: The method.

  Returns:
    Arrays with the batch letters of the equation, and C inputs: `HESSIAN` [...,
    C, C], `SUM` or `LARGEST` [..., C].
  """
  batch = _batch(equation)
  tokens = [c for c in equation.lhs if c not in equation.rhs]
  x = _merge(
    lhs.astype(jnp.float32),
    equation.lhs,
    (batch, "".join(tokens), equation.contracted),
  )
  if isinstance(method, recipe_lib.SmoothQuant):
    return {LARGEST: jnp.max(jnp.abs(x), axis=-2)}
  found = {HESSIAN: jnp.einsum("...TC,...TD->...CD", x, x)}
  if isinstance(method, recipe_lib.Awq):
    found[SUM] = jnp.sum(jnp.abs(x), axis=-2)
  return found


def combine(first: Statistics, second: Statistics) -> Statistics:
  """Returns the statistics of two sets of tokens."""
  merge = {HESSIAN: jnp.add, SUM: jnp.add, LARGEST: jnp.maximum}
  return {name: merge[name](first[name], second[name]) for name in first}


def quantize(
  equation: equations.Equation,
  rhs: jax.Array,
  statistics: Statistics,
  method: recipe_lib.Calibration,
  round_to_nearest: Quantize,
) -> tuple[quantized_array.QuantizedArray, jax.Array | None]:
  """Quantizes the right operand of a matmul.

  Args:
    equation: Equation of the matmul.
    rhs: The weights.
    statistics: Statistics of the left operand.
    method: The method.
    round_to_nearest: Chooses scales and rounds to nearest.

  Returns:
    The quantized weights, and the factors of the left operand, float32 of the
    rank of `rhs` with size 1 in dimensions that are neither contracted nor
    batch dimensions; None if there are none.
  """
  letters = (_batch(equation), equation.contracted, _free(equation))

  def merged(x: jax.Array) -> jax.Array:
    return _merge(x.astype(jnp.float32), equation.rhs, letters)

  def split(x: jax.Array) -> jax.Array:
    sizes = dict(zip(equation.rhs, rhs.shape, strict=True))
    if x.shape[-1] == 1:
      sizes |= dict.fromkeys(letters[2], 1)
    return _split(x, equation.rhs, letters, sizes)

  weights = merged(rhs)
  if isinstance(method, recipe_lib.Gptq):
    made = round_to_nearest(rhs)
    ones = jnp.ones(rhs.shape, jnp.float32)
    scale = quantized_array.by_group(jnp.multiply, ones, made.scale)
    values = _correct(
      weights,
      merged(scale),
      statistics[HESSIAN],
      number_format=made.format,
      damping=method.damping,
    )
    return dataclasses.replace(made, values=split(values)), None

  def rounded(factors: jax.Array) -> quantized_array.QuantizedArray:
    return round_to_nearest(rhs.astype(jnp.float32) * split(factors[..., None]))

  if isinstance(method, recipe_lib.SmoothQuant):
    factors = _smooth(
      statistics[LARGEST], jnp.max(jnp.abs(weights), axis=-1), method.strength
    )
    return rounded(factors), 1 / split(factors[..., None])

  def error(exponent: jax.Array) -> jax.Array:
    factors = _powers(statistics[SUM], exponent)
    off = merged(rounded(factors).dequantize()) / factors[..., None] - weights
    return jnp.einsum("...CN,...CD,...DN->...", off, statistics[HESSIAN], off)

  tried = jnp.asarray(_EXPONENTS, jnp.float32)
  # Sequentially, because a copy of the weights per exponent may not fit.
  best = jnp.argmin(jax.lax.map(error, tried), axis=0)
  factors = _powers(statistics[SUM], tried[best][..., None])
  return rounded(factors), 1 / split(factors[..., None])


def _smooth(
  inputs: jax.Array, weights: jax.Array, strength: float
) -> jax.Array:
  """Returns the factors of SmoothQuant for magnitudes [..., C] of a matmul."""
  floor = 1e-5
  factors = jnp.maximum(inputs, floor) ** strength
  factors /= jnp.maximum(weights, floor) ** (1 - strength)
  return jnp.maximum(factors, floor)


def _powers(magnitudes: jax.Array, exponent: jax.Array) -> jax.Array:
  """Returns the factors of AWQ for magnitudes [..., C] of inputs."""
  largest = jnp.max(magnitudes, axis=-1, keepdims=True)
  share = magnitudes / jnp.where(largest == 0, 1.0, largest)
  factors = jnp.maximum(share**exponent, 1e-4)
  top = jnp.max(factors, axis=-1, keepdims=True)
  bottom = jnp.min(factors, axis=-1, keepdims=True)
  return factors / jnp.sqrt(top * bottom)


def _correct(
  weights: jax.Array,
  scale: jax.Array,
  hessian: jax.Array,
  *,
  number_format: number_formats.NumberFormat,
  damping: float,
) -> jax.Array:
  """Returns values of GPTQ, for weights and scales [..., C, N]."""
  if weights.ndim > 2:
    correct = functools.partial(
      _correct, number_format=number_format, damping=damping
    )
    return jax.lax.map(lambda x: correct(*x), (weights, scale, hessian))
  size = len(weights)
  diagonal = jnp.diagonal(hessian)
  order = jnp.argsort(-diagonal, stable=True)
  mean = jnp.mean(diagonal)
  # Without any input, all errors cost the same.
  hessian += jnp.where(mean == 0, 1.0, damping * mean) * jnp.eye(size)
  inverse = _upper_factor_of_inverse(hessian[order][:, order])
  block = math.gcd(size, _BLOCK)
  rows = jnp.arange(size)

  def correct_row(
    i: jax.Array, carry: tuple[jax.Array, ...]
  ) -> tuple[jax.Array, ...]:
    left, values, errors, scales, factor = carry
    row = quantized_array.to_format(left[i] / scales[i], number_format)
    error = (left[i] - row.astype(jnp.float32) * scales[i]) / factor[i, i]
    later = jnp.where(jnp.arange(block) > i, factor[i], 0.0)
    left -= jnp.outer(later, error)
    return left, values.at[i].set(row), errors.at[i].set(error), scales, factor

  def correct_block(
    number: jax.Array, carry: tuple[jax.Array, jax.Array]
  ) -> tuple[jax.Array, jax.Array]:
    left, values = carry
    start = number * block

    def part(x: jax.Array, axis: int = 0) -> jax.Array:
      return jax.lax.dynamic_slice_in_dim(x, start, block, axis)

    of_block = part(left)
    _, made, errors, *_ = jax.lax.fori_loop(
      0,
      block,
      correct_row,
      (
        of_block,
        part(values),
        jnp.zeros_like(of_block),
        part(scale[order]),
        part(part(inverse), axis=1),
      ),
    )
    later = jnp.where(rows >= start + block, part(inverse), 0.0)
    left -= later.T @ errors
    return left, jax.lax.dynamic_update_slice_in_dim(values, made, start, 0)

  empty = jnp.zeros(weights.shape, number_format.dtype)
  blocks = (weights[order], empty)
  _, values = jax.lax.fori_loop(0, size // block, correct_block, blocks)
  return values[jnp.argsort(order)]


def _upper_factor_of_inverse(x: jax.Array) -> jax.Array:
  """Returns the upper U with inv(x) = U.T @ U, without inverting `x`."""
  # With rows and columns reversed, x is L @ L.T, and U is L's reversed inverse.
  lower = jnp.linalg.cholesky(x[::-1, ::-1])
  eye = jnp.eye(len(x), dtype=x.dtype)
  inverse = jax.scipy.linalg.solve_triangular(lower, eye, lower=True)
  return inverse[::-1, ::-1]


def _batch(equation: equations.Equation) -> str:
  """Returns the letters of the right operand that are in all terms."""
  both = (c for c in equation.rhs if c in equation.lhs and c in equation.out)
  return "".join(both)


def _free(equation: equations.Equation) -> str:
  """Returns the letters of the right operand that the left has not."""
  return "".join(c for c in equation.rhs if c not in equation.lhs)


def _merge(
  x: jax.Array, letters: str, groups: tuple[str, str, str]
) -> jax.Array:
  """Returns [*first, second, third], one dimension for the last two groups."""
  order = "".join(groups)
  sizes = dict(zip(letters, x.shape, strict=True))
  x = jnp.transpose(x, [letters.index(c) for c in order])
  first, *rest = groups
  return x.reshape(
    *(sizes[c] for c in first),
    *(math.prod(sizes[c] for c in group) for group in rest),
  )


def _split(
  x: jax.Array,
  letters: str,
  groups: tuple[str, str, str],
  sizes: dict[str, int],
) -> jax.Array:
  """Returns the array of which `x` is merged."""
  order = "".join(groups)
  x = x.reshape([sizes[c] for c in order])
  return jnp.transpose(x, [order.index(c) for c in letters])
