"""How rows of a table are looked up: by gathering, or by a product.

A lookup is a function `(table [V,D], ids [...]) -> rows [...,D]`, a field of
the layers that have a table, so it can be replaced, as by one that counts or
clips the gradients of single examples. Ids outside of the table give rows of
NaN.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

Lookup = Callable[[jax.Array, jax.Array], jax.Array]


def gather(
  table: Float[Array, "vocab embed"], ids: Int[Array, "*batch"]
) -> Float[Array, "*batch embed"]:
  """Returns the rows of `ids`; negative ids count from the end."""
  return jnp.take(table, ids, axis=0, mode="fill")


def one_hot(
  table: Float[Array, "vocab embed"], ids: Int[Array, "*batch"]
) -> Float[Array, "*batch embed"]:
  """Returns the same rows as a product of `table` with ones and zeros.

  A table that is split over the vocabulary stays where it is, and the gradient
  is a product, too, where `gather` has a scatter. It pays for small tables.
  """
  size = table.shape[0]
  ids = jnp.where(ids < 0, ids + size, ids)
  # A row of zeros, as an id outside of the table has, would pass unseen.
  valid = (ids >= 0) & (ids < size)
  chosen = jax.nn.one_hot(ids, size, dtype=table.dtype)
  # Exact, as each sum has one term, if the table's own digits are multiplied:
  # by default accelerators round float32 to 10 bits or fewer.
  is_wide = table.dtype.itemsize > 2
  precision = jax.lax.Precision.HIGHEST if is_wide else None
  rows = jnp.einsum("...V,VD->...D", chosen, table, precision=precision)
  return jnp.where(valid[..., None], rows, jnp.nan)
