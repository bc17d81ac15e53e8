"""Grouped matmul: each group of consecutive tokens times its own matrix.

  y[r] = x[r] @ w[e]   for the sizes[e] rows r of group e

Rows after the last group are padding: their output and gradient are zero, and
their content, even NaN, reaches nothing. The derivative is defined here, from
two products that each kernel provides: `multiply`, also with transposed
matrices, and `multiply_transposed`, the gradient of the matrices.

`lax.ragged_dot` is not a kernel here: outside of the forward pass on some TPUs
it multiplies each row with the matrices of all groups.

Letters: R rows, E groups, K and N the dimensions of a matrix.
"""

from collections.abc import Callable
import contextlib
import dataclasses
import functools
from typing import Any, Final, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from paxon.layers import precision
from paxon.sharding import checks, target

# Names by which plans find the two products of all kernels.
PRODUCT: Final = "_grouped_product"
GROUPED_MATMUL_TRANSPOSED: Final = "_grouped_product_of_rows"


@runtime_checkable
class Kernel(Protocol):
  """The two products of a grouped matmul; hashable."""

  @property
  def support(self) -> target.Support:
    """Features that the kernel supports."""
    ...

  def multiply(
    self, x: jax.Array, w: jax.Array, sizes: jax.Array, *, transposed: bool
  ) -> jax.Array:
    """Returns `x[r] @ w[e]`, or `x[r] @ w[e].T`; zero in padding."""
    ...

  def multiply_transposed(
    self, x: jax.Array, y: jax.Array, sizes: jax.Array
  ) -> jax.Array:
    """Returns the sum over the rows of each group of outer products [E,K,N]."""
    ...


def grouped_matmul(
  x: Float[Array, "rows k"],
  w: Float[Array, "experts k n"],
  sizes: Int[Array, " experts"],
  *,
  kernel: Kernel,
) -> Float[Array, "rows n"]:
  """Returns each row times the matrix of its group, in the dtype of `x`.

  Sums are in float32 for dtypes of less precision.

  Raises:
    ValueError: Shapes or dtypes do not fit, or the kernel does not support
      them.
  """
  if x.shape[1] != w.shape[1] or sizes.shape[0] != w.shape[0]:
    raise ValueError(
      f"grouped_matmul needs x [R,K], w [E,K,N] and sizes [E], got"
      f" {x.shape}, {w.shape} and {sizes.shape}."
    )
  if x.dtype != w.dtype:
    raise ValueError(
      f"grouped_matmul needs one dtype, got {x.dtype} and {w.dtype}."
    )
  check(kernel.support, x.dtype.name)
  return _grouped_matmul(kernel, x, w, sizes.astype(jnp.int32))


def multiply(
  kernel: Kernel,
  x: jax.Array,
  w: jax.Array,
  sizes: jax.Array,
  *,
  transposed: bool,
) -> jax.Array:
  """Returns `Kernel.multiply`, by the name that plans find; no derivative."""
  return _grouped_product(kernel, x, w, sizes, transposed=transposed)


def multiply_rows(
  kernel: Kernel, x: jax.Array, y: jax.Array, sizes: jax.Array
) -> jax.Array:
  """Returns `Kernel.multiply_transposed`, as `multiply` does."""
  return _grouped_product_of_rows(kernel, x, y, sizes)


def check(support: target.Support, dtype: str) -> None:
  """Raises ValueError unless a kernel supports a dtype."""
  problems = list(support.problems(target.Request(dtype=dtype)))
  if problems:
    raise ValueError(
      f"{support.name} does not support this grouped matmul:"
      f" {'; '.join(problems)}; use {_TILES.name}, which supports all."
    )


def on_supported_platforms(
  support: target.Support,
  kernel: Callable[..., jax.Array],
  *operands: jax.Array,
) -> jax.Array:
  """Calls a kernel in programs for its platforms; others do not compile."""
  if not support.platforms:
    return kernel(*operands)
  branches: dict[str, Any] = dict.fromkeys(support.platforms, kernel)
  return jax.lax.platform_dependent(*operands, **branches)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _grouped_matmul(
  kernel: Kernel, x: jax.Array, w: jax.Array, sizes: jax.Array
) -> jax.Array:
  return _grouped_product(kernel, x, w, sizes, transposed=False)


def _forward(
  kernel: Kernel, x: jax.Array, w: jax.Array, sizes: jax.Array
) -> tuple[jax.Array, Any]:
  return _grouped_matmul(kernel, x, w, sizes), (x, w, sizes)


def _backward(
  kernel: Kernel, saved: Any, gradient: jax.Array
) -> tuple[jax.Array, jax.Array, None]:
  x, w, sizes = saved
  dx = _grouped_product(kernel, gradient, w, sizes, transposed=True)
  dw = _grouped_product_of_rows(kernel, x, gradient, sizes)
  return dx, dw.astype(w.dtype), None


_grouped_matmul.defvjp(_forward, _backward)


@functools.partial(jax.jit, static_argnames=("kernel", "transposed"))
def _grouped_product(
  kernel: Kernel,
  x: jax.Array,
  w: jax.Array,
  sizes: jax.Array,
  *,
  transposed: bool,
) -> jax.Array:
  return kernel.multiply(x, w, sizes, transposed=transposed)


@functools.partial(jax.jit, static_argnames=("kernel",))
def _grouped_product_of_rows(
  kernel: Kernel, x: jax.Array, y: jax.Array, sizes: jax.Array
) -> jax.Array:
  return kernel.multiply_transposed(x, y, sizes)


def expected_rows(rows: int, *, of: int) -> contextlib.AbstractContextManager:
  """Names a scope whose products use so many rows if experts are balanced.

  The others are padding, which kernels skip. Plans read the name.

  Args:
    rows: Rows that are used, or a number in proportion.
    of: All rows.
  """
  return jax.named_scope(f"rows_{rows}_of_{of}")


_TILES: Final = target.Support(name="layers.moe.grouped_matmul.Tiles")


@dataclasses.dataclass(frozen=True)
class Tiles:
  """A loop over tiles of rows of one group, for any platform and dtype.

  It runs only the tiles that exist, at most R / tile + E. On CPUs it is several
  times faster than `lax.ragged_dot`; on accelerators the loop leaves most of
  the device idle.

  Attributes:
    tile: Rows of a tile; fewer for few rows in each group.
  """

  tile: int = 64

  def __post_init__(self) -> None:
    checks.check_size(self, "tile")

  @property
  def support(self) -> target.Support:
    """Everything."""
    return _TILES

  def multiply(
    self, x: jax.Array, w: jax.Array, sizes: jax.Array, *, transposed: bool
  ) -> jax.Array:
    """Returns `x[r] @ w[e]`, or `x[r] @ w[e].T`; zero in padding."""
    tile = self._rows(x, sizes)
    columns = w.shape[1] if transposed else w.shape[2]
    contract = 1 if transposed else 0

    def one(i: jax.Array, out: jax.Array) -> jax.Array:
      group, start, is_own = at(i)
      rows = jax.lax.dynamic_slice_in_dim(x, start, tile)
      matrix = jax.lax.dynamic_index_in_dim(w, group, keepdims=False)
      y = jax.lax.dot_general(
        rows,
        matrix,
        (((1,), (contract,)), ((), ())),
        preferred_element_type=precision.at_least_float32(x.dtype),
      )
      # A tile may overlap the next group.
      old = jax.lax.dynamic_slice_in_dim(out, start, tile)
      y = jnp.where(is_own[:, None], y.astype(out.dtype), old)
      return jax.lax.dynamic_update_slice_in_dim(out, y, start, axis=0)

    count, at = _tiles(sizes, rows=x.shape[0], tile=tile)
    out = jnp.zeros((x.shape[0], columns), x.dtype)
    return jax.lax.fori_loop(0, count, one, out)

  def multiply_transposed(
    self, x: jax.Array, y: jax.Array, sizes: jax.Array
  ) -> jax.Array:
    """Returns the sum over the rows of each group of outer products [E,K,N]."""
    tile = self._rows(x, sizes)
    zero = jnp.zeros((), x.dtype)

    def one(i: jax.Array, out: jax.Array) -> jax.Array:
      group, start, is_own = at(i)
      a, b = (
        jnp.where(
          is_own[:, None],
          jax.lax.dynamic_slice_in_dim(rows, start, tile),
          zero,
        )
        for rows in (x, y)
      )
      added = jax.lax.dot_general(
        a, b, (((0,), (0,)), ((), ())), preferred_element_type=out.dtype
      )
      old = jax.lax.dynamic_index_in_dim(out, group)
      return jax.lax.dynamic_update_slice_in_dim(
        out, old + added[None], group, axis=0
      )

    count, at = _tiles(sizes, rows=x.shape[0], tile=tile)
    shape = (sizes.shape[0], x.shape[1], y.shape[1])
    out = jnp.zeros(shape, precision.at_least_float32(x.dtype))
    return jax.lax.fori_loop(0, count, one, out).astype(x.dtype)

  def _rows(self, x: jax.Array, sizes: jax.Array) -> int:
    """Returns the rows of a tile: at least 8, at most all."""
    rows = x.shape[0]
    mean = -(-rows // sizes.shape[0])
    return max(1, min(rows, self.tile, max(8, 1 << (mean - 1).bit_length())))


def _tiles(
  sizes: jax.Array, *, rows: int, tile: int
) -> tuple[jax.Array, Callable[[jax.Array], tuple[jax.Array, ...]]]:
  """Returns the number of tiles, and a function of the index of a tile.

  The function returns the group, the first row to read, and which of the read
  rows are those of the tile.
  """
  tiles = (sizes + tile - 1) // tile
  ends = jnp.cumsum(tiles)
  group_ends = jnp.minimum(jnp.cumsum(sizes), rows)

  def at(i: jax.Array) -> tuple[jax.Array, ...]:
    group = jnp.sum(ends <= i).astype(jnp.int32)
    group = jnp.minimum(group, sizes.shape[0] - 1)
    first = (
      jnp.cumsum(sizes)[group]
      - sizes[group]
      + (i - ends[group] + tiles[group]) * tile
    )
    # The last tile would end after the last row.
    start = jnp.clip(first, 0, rows - tile)
    index = start + jnp.arange(tile, dtype=jnp.int32)
    end = jnp.minimum(first + tile, group_ends[group])
    return group, start, (index >= first) & (index < end)

  return ends[-1], at
