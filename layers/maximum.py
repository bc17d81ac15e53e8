"""Maximum over axes with a gradient that does not compare floats.

The gradient of `jnp.max` compares each value with the maximum. A compiler may
compute a value twice with different rounding, once for the maximum and once for
the comparison; XLA:CPU does so behind a norm. Then no value is equal to the
maximum, and the gradient is zero or NaN. Here it goes to the index of the
maximum: of equal values the first, as in a pooling window and in PyTorch's
`max_pool2d`.
"""

from collections.abc import Sequence
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def take_max(
  x: Float[Array, "*shape"], *, axes: Sequence[int], keepdims: bool = False
) -> Float[Array, "*rest"]:
  """Returns the maximum over `axes`; NaN if there is a NaN.

  Args:
    x: Any shape; `axes` must not be empty.
    axes: The reduced axes.
    keepdims: Whether the reduced axes remain with size one.
  """
  found = _take_max(x, tuple(sorted(axis % x.ndim for axis in axes)))
  return jnp.expand_dims(found, tuple(axes)) if keepdims else found


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _take_max(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
  return jnp.max(x, axis=axes)


@_take_max.defjvp
def _take_max_jvp(
  axes: tuple[int, ...],
  primals: tuple[jax.Array],
  tangents: tuple[jax.Array],
) -> tuple[jax.Array, jax.Array]:
  (x,), (tangent,) = primals, tangents
  first, count = axes[0], len(axes)

  def join(x: jax.Array) -> jax.Array:
    """Returns `x` with the reduced axes as one."""
    x = jnp.moveaxis(x, axes, range(first, first + count))
    return x.reshape(*x.shape[:first], -1, *x.shape[first + count :])

  joined = join(x)
  index = jnp.argmax(joined, axis=first, keepdims=True)
  # Not a gather: a comparison of integers is partitioned like its operands.
  ids = jax.lax.broadcasted_iota(index.dtype, joined.shape, first)
  chosen = jnp.where(ids == index, join(tangent), 0)
  return _take_max(x, axes), jnp.sum(chosen, axis=first)
