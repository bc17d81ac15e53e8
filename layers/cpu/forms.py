"""Forms of matmuls, stored arrays and loops in which XLA:CPU is fast.

For other platforms than the CPU each function returns the usual form or choice.
Times are of jax 0.10.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from paxon.quantization import matmuls
from paxon.sharding import axes, logical, target

_LETTERS = "ABCEGIJLMO"
# For fewer tokens the gradient of a kernel is not worth a transposed copy.
_MIN_TOKENS_TO_COPY = 256
# Separate layers of smaller models take longer to compile than they save.
MIN_BYTES_TO_SEPARATE = 4 << 20


# --- Choices ------------------------------------------------------------------


def cached_dtype(dtype: DTypeLike) -> jnp.dtype:
  """Returns the dtype in which caches hold keys and values of `dtype`.

  float32 for bfloat16 on CPUs: XLA:CPU has no bfloat16 update in place, and
  rewrites the cache of all layers for each token of each layer. Such a cache is
  read in float32 as well, since XLA:CPU would round the whole cache to bfloat16
  and widen it again for each token.
  """
  is_widened = jnp.dtype(dtype) == jnp.bfloat16 and target.is_cpu()
  return jnp.dtype(jnp.float32 if is_widened else dtype)


def saved_dtype(dtype: DTypeLike) -> jnp.dtype:
  """Returns the dtype in which loops save activations of `dtype`.

  float32 for bfloat16 on one CPU: XLA:CPU writes bfloat16 to an array of all
  layers by converting all of that array to float32 and back. Not integers of 16
  bits, which have no derivative: a second one would be zero.
  """
  is_widened = jnp.dtype(dtype) == jnp.bfloat16 and target.is_one_cpu()
  return jnp.dtype(jnp.float32 if is_widened else dtype)


def recomputes_elementwise() -> bool:
  """Returns whether loops over layers recompute elementwise results.

  True on one CPU: a loop writes what it saves into arrays of all layers, which
  takes longer than to compute elementwise results again.
  """
  return target.is_one_cpu()


def scatters_one_head() -> bool:
  """Returns whether a cache of one head is written by a scatter.

  True on one CPU: XLA:CPU fuses an update of one head with the other shape in
  which attention reads it, and copies the array to write it twice.
  """
  return target.is_one_cpu()


def separates_layers(size: int) -> bool:
  """Returns whether layers are separate arrays in programs that decode.

  True on one CPU for variables of `size` bytes, unless they are small: a step
  copies a layer out of stacked arrays before it multiplies, and the copy of a
  cache takes longer than attention.
  """
  return target.is_one_cpu() and size >= MIN_BYTES_TO_SEPARATE


def drop_single_axes(x: jax.Array) -> jax.Array:
  """Returns `x` without leading axes of size one if it is for one CPU.

  With such an axis, as of a batch of one, XLA:CPU takes ten to twenty times as
  long to sum the product of two arrays, which the gradients of a norm do for
  each token and each feature.
  """
  if not target.is_one_cpu():
    return x
  singles = 0
  while singles < x.ndim - 1 and x.shape[singles] == 1:
    singles += 1
  return x.reshape(x.shape[singles:])


# --- Matmuls ------------------------------------------------------------------


def multiply_tokens(
  einsum: matmuls.Einsum,
  name: str,
  equation: str,
  x: jax.Array,
  kernel: jax.Array,
) -> jax.Array:
  """Returns `matmuls.call` of tokens and a kernel, both of one dtype.

  On CPUs tokens [B,T,D] are multiplied as one matrix [B * T, D]. With two axes
  of tokens the gradient of the kernel sums over both, and XLA:CPU writes a
  transposed copy of the output's gradient, with the derivative of the
  activation computed column by column: a third to a half of a float32 train
  step. In bfloat16 the result is rounded from float32, because XLA:CPU converts
  both operands of a bfloat16 matmul with a bfloat16 result to float32 first. It
  does so for the gradient of a bfloat16 kernel too, unless the tokens are a
  transposed copy, which takes half of the time together with the matmul.

  Tokens keep their axes where the length is split over devices: a joined axis
  would move them.

  `equation` contracts the last axes of `x` with the first of the kernel, such
  as `BTNH,NHD->BTD`; a `...` stands for any number of axes of tokens.
  """
  if isinstance(einsum, matmuls.Adapter) and not einsum.replaces_matmul:
    # The plain matmul is that of a layer without an adapter.
    out = multiply_tokens(jnp.einsum, name, equation, x, kernel)
    return einsum.adapt(equation, x, kernel, out, matmul=name)
  if einsum is not jnp.einsum or not target.is_cpu():
    return matmuls.call(einsum, name, equation, x, kernel)
  tokens, weights, output = _terms(equation, x.ndim)
  summed = sum(letter not in output for letter in weights)
  batch, inner = x.shape[: x.ndim - summed], kernel.shape[:summed]
  if not _may_join(batch, kernel):
    return _multiply(f"{tokens},{weights}->{output}", x, kernel)
  size = math.prod(inner)
  y = _multiply("MD,DF->MF", x.reshape(-1, size), kernel.reshape(size, -1))
  return y.reshape(*batch, *kernel.shape[summed:])


def _terms(equation: str, rank: int) -> tuple[str, str, str]:
  """Returns the letters of tokens [rank], kernel and output."""
  operands, output = equation.split("->")
  tokens, weights = operands.split(",")
  filler = _LETTERS[: rank - len(tokens.replace("...", ""))]
  return tokens.replace("...", filler), weights, output.replace("...", filler)


def _may_join(batch: tuple[int, ...], kernel: jax.Array) -> bool:
  """Returns whether joining axes moves no data between devices."""
  if target.num_devices() == 1:
    return len(batch) > 0
  # Tokens [B,T]; heads, which several devices may share, keep their axis.
  return (
    len(batch) == 2
    and kernel.ndim == 2
    and logical.num_shards((axes.BATCH, axes.LENGTH))[1] == 1
  )


def _multiply(equation: str, x: jax.Array, kernel: jax.Array) -> jax.Array:
  if jnp.dtype(x.dtype) != jnp.bfloat16:
    return jnp.einsum(equation, x, kernel)
  return _round_einsum(equation, x, kernel)


def _widely(equation: str, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
  wide = jnp.einsum(equation, lhs, rhs, preferred_element_type=jnp.float32)
  return wide.astype(lhs.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _round_einsum(equation: str, x: jax.Array, kernel: jax.Array) -> jax.Array:
  return _widely(equation, x, kernel)


def _forward(
  equation: str, x: jax.Array, kernel: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
  return _widely(equation, x, kernel), (x, kernel)


def _backward(
  equation: str, operands: tuple[jax.Array, jax.Array], gradient: jax.Array
) -> tuple[jax.Array, jax.Array]:
  operand_terms, output = equation.split("->")
  tokens, weights = operand_terms.split(",")
  x, kernel = operands
  x_bar = _widely(f"{output},{weights}->{tokens}", gradient, kernel)
  if len(tokens) == 2 and len(x) >= _MIN_TOKENS_TO_COPY and len(x) % 2 == 0:
    # Two axes of tokens, since XLA would make the transpose of a matrix part of
    # the matmul.
    x, gradient = (y.reshape(2, -1, y.shape[-1]) for y in (x, gradient))
    return x_bar, _widely("AMD,AMF->DF", x, gradient)
  return x_bar, _widely(f"{tokens},{output}->{weights}", x, gradient)


_round_einsum.defvjp(_forward, _backward)
