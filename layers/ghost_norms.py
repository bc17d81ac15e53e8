"""Norms of the gradient of each example, without the gradient (ghost norms).

The gradient of a kernel W from one example, in `y_t = x_t W` with the gradients
g_t of the outputs, is `sum_t x_t g_t^T`. Its squared norm is

  sum_{t,u} <x_t, x_u> <g_t, g_u>

which needs T^2 numbers instead of the size of W (Li et al. 2021,
https://arxiv.org/abs/2110.05679); the gradient itself is computed where it is
the smaller of the two (Bu et al. 2022, https://arxiv.org/abs/2205.10683). A
table of embeddings has a sum of g_t for each id, of which at most T differ.

Each matmul and each lookup has a scalar variable in the collection `ghost`:

  ghost/<path of the layer>/einsum/<matmul>/squared_norm
  ghost/<path of the layer>/lookup/<parameter>/squared_norm

The output does not depend on it, but its *gradient* is defined as the squared
norm of the gradient of the parameter, so it passes through scans and
rematerialization like any gradient. `learners.private_gradients` differentiates
with respect to it for one example at a time, under `jax.vmap`.

A layer must use such a parameter in this one matmul only, once.
"""

import functools
import math
from typing import Any, Final

from flax import linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from paxon.layers import embedding
from paxon.quantization import equations, matmuls
from paxon.sharding import variables

COLLECTION: Final = variables.GHOST
NAME: Final = "squared_norm"
_PARAMS: Final = "params"


class GhostEinsum(matmuls.Provider):
  """A plain einsum with ghost norms, for the field `einsum` of a layer.

  Initialization raises ValueError if a matmul is computed twice, or its right
  operand may be a parameter of another name.
  """

  def make_matmul(self, name: str) -> nn.Module:
    """Returns the matmul of this name."""
    return _GhostMatmul(name=name)


class _GhostMatmul(nn.Module):
  """One matmul, which has a ghost norm if its kernel is a parameter."""

  @nn.compact
  def __call__(
    self,
    equation: str,
    lhs: jax.Array,
    rhs: jax.Array,
    preferred_element_type: DTypeLike | None,
  ) -> jax.Array:
    dtype = jnp.dtype(preferred_element_type or lhs.dtype)
    parsed = equations.parse(equation, lhs.ndim, rhs.ndim)
    if self.is_initializing():
      if matmuls.parameter_axes(self, rhs.shape) is None:
        self._check_is_activation(rhs.shape)
        return _einsum(parsed, lhs, rhs, dtype)
      _make(self)
    elif not self.has_variable(COLLECTION, NAME):
      return _einsum(parsed, lhs, rhs, dtype)
    ghost = self.get_variable(COLLECTION, NAME)
    return _ghost_einsum(parsed, dtype, lhs, rhs, variables.unbox(ghost))

  def _check_is_activation(self, shape: tuple[int, ...]) -> None:
    provider = self.scope.parent if self.scope is not None else None
    layer = provider.parent if provider is not None else None
    found = {} if layer is None else layer.variables().get(_PARAMS, {})
    for name, value in variables.unbox(dict(found)).items():
      if getattr(value, "shape", None) == shape:
        raise ValueError(
          f"Ghost norms: the matmul {'/'.join(self.path)} has the shape"
          f" {shape} of the parameter {name!r} of its layer, which it may use;"
          " use another clipping, such as Clipping.PER_EXAMPLE, or untie the"
          " parameter."
        )


class GhostLookup(nn.Module):
  """A lookup with ghost norms, for the field `lookup` of `Embedding`.

  Attributes:
    lookup: `embedding.gather` or `embedding.one_hot`.
    parameter: Name of the table in its layer.
  """

  lookup: embedding.Lookup = embedding.gather
  parameter: str = "table"

  @nn.compact
  def __call__(self, table: jax.Array, ids: jax.Array) -> jax.Array:
    """Returns the rows of `ids`, [...,D].

    Raises:
      ValueError: During initialization: the table is used twice.
    """
    return _GhostTable(self.lookup, name=self.parameter)(table, ids)


class _GhostTable(nn.Module):
  lookup: embedding.Lookup

  @nn.compact
  def __call__(self, table: jax.Array, ids: jax.Array) -> jax.Array:
    if self.is_initializing():
      _make(self)
    elif not self.has_variable(COLLECTION, NAME):
      return self.lookup(table, ids)
    ghost = self.get_variable(COLLECTION, NAME)
    return _ghost_lookup(self.lookup, table, ids, variables.unbox(ghost))


def _make(module: nn.Module) -> None:
  if module.has_variable(COLLECTION, NAME):
    raise ValueError(
      f"Ghost norms: {'/'.join(module.path)} is computed twice in a forward"
      " pass, but the norm of a sum is no sum of norms; use another clipping,"
      " such as Clipping.PER_EXAMPLE."
    )
  module.variable(
    COLLECTION,
    NAME,
    variables.make_boxed_init(
      nn.initializers.zeros,
      (),
      shape=(),
      dtype=jnp.float32,
      update=variables.UpdateRule.OVERWRITE_WITH_GRADIENT,
      combine=variables.CombineRule.SUM,
    ),
  )


def _einsum(
  equation: equations.Equation,
  lhs: jax.Array,
  rhs: jax.Array,
  dtype: jnp.dtype,
) -> jax.Array:
  return jnp.einsum(equation.text, lhs, rhs, preferred_element_type=dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _ghost_einsum(
  equation: equations.Equation,
  dtype: jnp.dtype,
  lhs: jax.Array,
  rhs: jax.Array,
  ghost: jax.Array,
) -> jax.Array:
  del ghost
  return _einsum(equation, lhs, rhs, dtype)


def _forward_einsum(
  equation: equations.Equation,
  dtype: jnp.dtype,
  lhs: jax.Array,
  rhs: jax.Array,
  ghost: jax.Array,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
  del ghost
  return _einsum(equation, lhs, rhs, dtype), (lhs, rhs)


def _backward_einsum(
  equation: equations.Equation,
  dtype: jnp.dtype,
  operands: tuple[jax.Array, jax.Array],
  gradient: jax.Array,
) -> tuple[jax.Array, ...]:
  """Returns the gradients; what is not used, the compiler removes."""
  del dtype
  lhs, rhs = operands

  def multiply(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    return _einsum(equation, lhs, rhs, gradient.dtype)

  _, pull = jax.vjp(multiply, lhs, rhs)
  return *pull(gradient), squared_norm(equation, lhs, gradient)


_ghost_einsum.defvjp(_forward_einsum, _backward_einsum)


def squared_norm(
  equation: equations.Equation, lhs: jax.Array, gradient: jax.Array
) -> jax.Array:
  """Returns the squared norm of the gradient of a kernel, float32.

  Args:
    equation: Equation of the matmul of `lhs` and the kernel.
    lhs: Activations of one example.
    gradient: Gradient of the output.
  """
  sizes = dict(zip(equation.lhs, lhs.shape, strict=True))
  sizes |= dict(zip(equation.out, gradient.shape, strict=True))
  kernel = set(equation.rhs)
  tokens = "".join(c for c in equation.lhs if c not in kernel)
  shared = "".join(
    c for c in equation.rhs if c in equation.lhs and c in equation.out
  )
  num_tokens = math.prod(sizes[c] for c in tokens)
  num_weights = math.prod(sizes[c] for c in kernel - set(shared))
  wide = functools.partial(
    jnp.einsum,
    # Accelerators round float32 operands by default.
    precision=jax.lax.Precision.HIGHEST,
    preferred_element_type=jnp.float32,
  )
  if 2 * num_tokens**2 >= num_weights:
    dtype = jnp.promote_types(lhs.dtype, gradient.dtype)
    whole = wide(
      equation.backward_rhs.text, lhs.astype(dtype), gradient.astype(dtype)
    )
    return jnp.sum(jnp.square(whole))
  # Other letters for the second token of each pair.
  unused = (
    c
    for c in "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
    if c not in equation.text
  )
  other = str.maketrans({c: next(unused) for c in tokens})
  pairs = shared + tokens + tokens.translate(other)

  def multiply_pairs(letters: str, x: jax.Array) -> jax.Array:
    return wide(f"{letters},{letters.translate(other)}->{pairs}", x, x)

  return jnp.sum(
    multiply_pairs(equation.lhs, lhs) * multiply_pairs(equation.out, gradient)
  )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ghost_lookup(
  lookup: embedding.Lookup,
  table: jax.Array,
  ids: jax.Array,
  ghost: jax.Array,
) -> jax.Array:
  del ghost
  return lookup(table, ids)


def _forward_lookup(
  lookup: embedding.Lookup,
  table: jax.Array,
  ids: jax.Array,
  ghost: jax.Array,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
  del ghost
  return lookup(table, ids), (table, ids)


def _backward_lookup(
  lookup: embedding.Lookup,
  residuals: tuple[jax.Array, jax.Array],
  gradient: jax.Array,
) -> tuple[Any, ...]:
  table, ids = residuals
  _, pull = jax.vjp(lambda table: lookup(table, ids), table)
  return (
    *pull(gradient),
    None,
    _squared_norm_of_rows(ids, gradient, size=table.shape[0]),
  )


def _squared_norm_of_rows(
  ids: jax.Array, gradient: jax.Array, *, size: int
) -> jax.Array:
  """Returns the squared norm of the gradient of a table, float32."""
  ids = ids.reshape(-1)
  ids = jnp.where(ids < 0, ids + size, ids)
  rows = gradient.reshape(ids.size, -1).astype(jnp.float32)
  order = jnp.argsort(ids)
  ids = ids[order]
  is_new = jnp.concatenate([jnp.zeros((1,), bool), ids[1:] != ids[:-1]])
  sums = jax.ops.segment_sum(
    rows[order], jnp.cumsum(is_new), num_segments=ids.size
  )
  return jnp.sum(jnp.square(sums))


_ghost_lookup.defvjp(_forward_lookup, _backward_lookup)
