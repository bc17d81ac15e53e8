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

`StaticRange` rounds weights to nearest, and stores the largest input.

Two methods set weights to zero instead, in groups of inputs of each output:

  Wanda        those with the smallest magnitude times the norm of the input
               (Sun et al. 2023, arXiv 2306.11695)
  SparseGpt    those with the smallest error of the outputs, one group after the
               other, and corrects the weights of later inputs as GPTQ does
               (Frantar & Alistarh 2023, arXiv 2301.00774)

Statistics are those of the model before quantization, for all matmuls at once.
A matmul with C inputs per output has one Hessian, float32 [C, C].
"""

from collections.abc import Callable
import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from paxon.quantization import (
  equations,
  number_formats,
  quantized_array,
  scaling,
)
from paxon.quantization import recipe as recipe_lib

COLLECTION = "calibration"
# Sum over tokens of the outer product of the inputs with themselves.
HESSIAN = "hessian"
# Sum over tokens of the magnitudes of inputs, and the largest.
SUM, LARGEST = "sum", "largest"
# Sum over tokens of the squares of inputs.
SQUARES = "squares"

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
    C, C], `SUM`, `SQUARES` or `LARGEST` [..., C]; of `StaticRange`, `LARGEST`
    of the whole operand [].
  """
  if isinstance(method, recipe_lib.StaticRange):
    return {LARGEST: scaling.find_amax(lhs)}
  batch = _batch(equation)
  tokens = [c for c in equation.lhs if c not in equation.rhs]
  x = _merge(
    lhs.astype(jnp.float32),
    equation.lhs,
    (batch, "".join(tokens), equation.contracted),
  )
  if isinstance(method, recipe_lib.SmoothQuant):
    return {LARGEST: jnp.max(jnp.abs(x), axis=-2)}
  if isinstance(method, recipe_lib.Wanda):
    return {SQUARES: jnp.sum(jnp.square(x), axis=-2)}
  found = {HESSIAN: jnp.einsum("...TC,...TD->...CD", x, x)}
  if isinstance(method, recipe_lib.Awq):
    found[SUM] = jnp.sum(jnp.abs(x), axis=-2)
  return found


def combine(first: Statistics, second: Statistics) -> Statistics:
  """Returns the statistics of two sets of tokens."""
  merge = {
    HESSIAN: jnp.add,
    SUM: jnp.add,
    SQUARES: jnp.add,
    LARGEST: jnp.maximum,
  }
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

  def merge(x: jax.Array) -> jax.Array:
    return _merge(x.astype(jnp.float32), equation.rhs, letters)

  def split(x: jax.Array) -> jax.Array:
    sizes = dict(zip(equation.rhs, rhs.shape, strict=True))
    if x.shape[-1] == 1:
      sizes |= dict.fromkeys(letters[2], 1)
    return _split(x, equation.rhs, letters, sizes)

  weights = merge(rhs)
  if isinstance(method, recipe_lib.Pruning):
    pruned = split(_prune(weights, statistics, method))
    sizes = zip(equation.rhs, rhs.shape, strict=True)
    scale = jnp.ones([1 if c in letters[1] else n for c, n in sizes])
    made = quantized_array.QuantizedArray(
      pruned, scale, format=number_formats.FLOAT32, power_of_two=True
    )
    return made, None
  if isinstance(method, recipe_lib.Gptq):
    made = round_to_nearest(rhs)
    ones = jnp.ones(rhs.shape, jnp.float32)
    scale = quantized_array.apply_by_group(jnp.multiply, ones, made.scale)
    values = _correct(
      weights,
      merge(scale),
      statistics[HESSIAN],
      number_format=made.format,
      damping=method.damping,
    )
    return dataclasses.replace(made, values=split(values)), None

  def store(factors: jax.Array) -> quantized_array.QuantizedArray:
    return round_to_nearest(rhs.astype(jnp.float32) * split(factors[..., None]))

  if isinstance(method, recipe_lib.SmoothQuant):
    factors = _smooth(
      statistics[LARGEST], jnp.max(jnp.abs(weights), axis=-1), method.strength
    )
    return store(factors), 1 / split(factors[..., None])

  def error(exponent: jax.Array) -> jax.Array:
    factors = _powers(statistics[SUM], exponent)
    off = merge(store(factors).dequantize()) / factors[..., None] - weights
    return jnp.einsum("...CN,...CD,...DN->...", off, statistics[HESSIAN], off)

  tried = jnp.asarray(_EXPONENTS, jnp.float32)
  # Sequentially, because a copy of the weights per exponent may not fit.
  best = jnp.argmin(jax.lax.map(error, tried), axis=0)
  factors = _powers(statistics[SUM], tried[best][..., None])
  return store(factors), 1 / split(factors[..., None])


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


def _prune(
  weights: jax.Array, statistics: Statistics, method: recipe_lib.Pruning
) -> jax.Array:
  """Returns weights [..., C, N] of which groups of C keep `method.keep`.

  Raises:
    ValueError: `method.of` does not divide C.
  """
  size = weights.shape[-2]
  if size % method.of:
    raise ValueError(
      f"{type(method).__name__}.of ({method.of}) must divide the number of"
      f" inputs of each matmul; one has {size}."
    )
  if isinstance(method, recipe_lib.SparseGpt):
    return _correct_pruned(weights, statistics[HESSIAN], method)
  norms = jnp.sqrt(statistics[SQUARES])
  scores = jnp.abs(weights) * norms[..., None]
  groups = scores.reshape(*weights.shape[:-2], -1, method.of, scores.shape[-1])
  kept = _keep_largest(groups, method.keep).reshape(weights.shape)
  return jnp.where(kept, weights, 0.0)


def _keep_largest(scores: jax.Array, count: int) -> jax.Array:
  """Returns the mask of the largest scores [..., group, N]."""
  order = jnp.argsort(-scores, axis=-2, stable=True)
  return jnp.argsort(order, axis=-2, stable=True) < count


def _correct_pruned(
  weights: jax.Array, hessian: jax.Array, method: recipe_lib.SparseGpt
) -> jax.Array:
  """Returns weights of SparseGPT, for weights [..., C, N]."""
  if weights.ndim > 2:
    return jax.lax.map(
      lambda x: _correct_pruned(*x, method=method), (weights, hessian)
    )
  inverse = _upper_factor_of_inverse(_damp(hessian, method.damping))
  diagonal = jnp.diagonal(inverse)
  whole = method.of

  def choose(
    start: jax.Array, left: jax.Array, i: jax.Array, kept: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    def choose_group() -> jax.Array:
      group = jax.lax.dynamic_slice_in_dim(left, i, whole)
      cost = jax.lax.dynamic_slice_in_dim(diagonal, start + i, whole)
      return _keep_largest(jnp.square(group / cost[:, None]), method.keep)

    kept = jax.lax.cond(i % whole == 0, choose_group, lambda: kept)
    return jnp.where(kept[i % whole], left[i], 0.0), kept

  kept = jnp.ones((whole, weights.shape[-1]), bool)
  return _correct_blocks(weights, inverse, choose, kept, multiple_of=whole)


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
  order = jnp.argsort(-jnp.diagonal(hessian), stable=True)
  damped = _damp(hessian, damping)
  inverse = _upper_factor_of_inverse(damped[order][:, order])
  scale = scale[order]

  def round_row(
    start: jax.Array, left: jax.Array, i: jax.Array, nothing: None
  ) -> tuple[jax.Array, None]:
    row = quantized_array.to_format(left[i] / scale[start + i], number_format)
    return row.astype(jnp.float32) * scale[start + i], nothing

  made = _correct_blocks(weights[order], inverse, round_row, None)
  values = quantized_array.to_format(made / scale, number_format)
  return values[jnp.argsort(order)]


def _damp(hessian: jax.Array, damping: float) -> jax.Array:
  """Returns a Hessian [C, C] with a larger diagonal."""
  mean = jnp.mean(jnp.diagonal(hessian))
  # Without any input, all errors cost the same.
  added = jnp.where(mean == 0, 1.0, damping * mean)
  return hessian + added * jnp.eye(len(hessian))


def _correct_blocks(
  weights: jax.Array,
  inverse: jax.Array,
  choose: Callable[..., tuple[jax.Array, Any]],
  state: Any,
  *,
  multiple_of: int = 1,
) -> jax.Array:
  """Chooses weights input by input, and corrects later ones by each error.

  Args:
    weights: float32 [C, N].
    inverse: Upper factor of the inverse Hessian, [C, C].
    choose: `(start of a block, its corrected weights, input of the block,
      state) -> (chosen weights [N] of the input, state)`.
    state: The first state.
    multiple_of: Divides the sizes of blocks.

  Returns:
    The chosen weights.
  """
  size = len(weights)
  block = math.gcd(size, _BLOCK)
  block = size if block % multiple_of else block
  rows = jnp.arange(size)

  def correct_block(
    number: jax.Array, carry: tuple[jax.Array, jax.Array, Any]
  ) -> tuple[jax.Array, jax.Array, Any]:
    left, chosen, state = carry
    start = number * block
    of_block = jax.lax.dynamic_slice_in_dim(left, start, block)
    factors = jax.lax.dynamic_slice_in_dim(inverse, start, block)
    factor = jax.lax.dynamic_slice_in_dim(factors, start, block, 1)

    def correct_row(
      i: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array, Any]
    ) -> tuple[jax.Array, jax.Array, jax.Array, Any]:
      left, made, errors, state = carry
      row, state = choose(start, left, i, state)
      error = (left[i] - row) / factor[i, i]
      later = jnp.where(jnp.arange(block) > i, factor[i], 0.0)
      left -= jnp.outer(later, error)
      return left, made.at[i].set(row), errors.at[i].set(error), state

    blank = jnp.zeros_like(of_block)
    first = of_block, blank, blank, state
    _, made, errors, state = jax.lax.fori_loop(0, block, correct_row, first)
    later = jnp.where(rows >= start + block, factors, 0.0)
    left -= later.T @ errors
    chosen = jax.lax.dynamic_update_slice_in_dim(chosen, made, start, 0)
    return left, chosen, state

  first = weights, jnp.zeros_like(weights), state
  _, chosen, _ = jax.lax.fori_loop(0, size // block, correct_block, first)
  return chosen


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
