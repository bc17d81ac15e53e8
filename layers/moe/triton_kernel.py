"""Grouped matmuls of NVIDIA GPUs, as Pallas kernels by Triton.

A program of `multiply` computes one tile of outputs of one group. A tile of
consecutive rows that two groups share is computed twice, and each program
stores its own rows. A program of `multiply_transposed` sums one tile of a
group's matrix over the rows of the group. Each multiplies what exists, and at
most one tile for each group more.
"""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any, Final

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
import jax.numpy as jnp

from paxon.layers.moe import grouped_matmul
from paxon.sharding import checks, target

_TRITON: Final = target.Support(
  name="layers.moe.triton_kernel.Triton",
  platforms=(target.CUDA,),
  dtypes=("bfloat16", "float16", "float32"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Triton:
  """A Pallas kernel for NVIDIA GPUs.

  Tiles are powers of two of at least 16.

  Attributes:
    rows: Rows of a tile.
    columns: Columns of a tile.
    contracting: Elements of the contracting dimension that are multiplied at
      once.
    warps: Warps of a program.
    stages: Stages of the software pipeline.
    interpret: Whether Pallas interprets the kernel, on any device, for tests.
  """

  rows: int = 128
  columns: int = 128
  contracting: int = 32
  warps: int = 8
  stages: int = 3
  interpret: bool = False

  def __post_init__(self) -> None:
    names = ("rows", "columns", "contracting")
    for field, size in checks.get_values(self, *names):
      if size < 16 or size & (size - 1):
        raise ValueError(
          f"Triton.{field} must be a power of two of at least 16, got {size}."
        )
    checks.check_positive(self, "warps", "stages")

  @property
  def support(self) -> target.Support:
    """Features that the kernel supports."""
    if self.interpret:
      return dataclasses.replace(_TRITON, platforms=())
    return _TRITON

  def multiply(
    self, x: jax.Array, w: jax.Array, sizes: jax.Array, *, transposed: bool
  ) -> jax.Array:
    """Returns `x[r] @ w[e]`, or `x[r] @ w[e].T`; zero in padding."""
    R = x.shape[0]
    N = w.shape[1] if transposed else w.shape[2]
    body = functools.partial(_multiply, tiles=self, transposed=transposed)

    def kernel(x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
      groups, firsts, ends = _row_tiles(sizes, R, self.rows)
      grid = (groups.shape[0], pl.cdiv(N, self.columns))
      y = self._call(body, grid, jax.ShapeDtypeStruct((R, N), x.dtype))(
        x, w, groups, firsts, ends
      )
      # Programs do not store rows after the last group.
      used = jnp.arange(R, dtype=jnp.int32) < jnp.sum(sizes)
      return jnp.where(used[:, None], y, jnp.zeros((), y.dtype))

    return grouped_matmul.on_supported_platforms(
      self.support, kernel, x, w, sizes
    )

  def multiply_transposed(
    self, x: jax.Array, y: jax.Array, sizes: jax.Array
  ) -> jax.Array:
    """Returns the sum over the rows of each group of outer products [E,K,N]."""
    E, K, N = sizes.shape[0], x.shape[1], y.shape[1]
    body = functools.partial(_multiply_transposed, tiles=self)

    def kernel(x: jax.Array, y: jax.Array, sizes: jax.Array) -> jax.Array:
      ends = jnp.minimum(jnp.cumsum(sizes), x.shape[0]).astype(jnp.int32)
      starts = jnp.concatenate([jnp.zeros(1, jnp.int32), ends[:-1]])
      grid = (E, pl.cdiv(K, self.rows), pl.cdiv(N, self.columns))
      out = jax.ShapeDtypeStruct((E, K, N), x.dtype)
      return self._call(body, grid, out)(x, y, starts, ends)

    return grouped_matmul.on_supported_platforms(
      self.support, kernel, x, y, sizes
    )

  def _call(
    self, body: Any, grid: tuple[int, ...], out: jax.ShapeDtypeStruct
  ) -> Callable[..., jax.Array]:
    return pl.pallas_call(
      body,
      grid=grid,
      out_shape=out,
      interpret=self.interpret,
      compiler_params=plgpu.CompilerParams(
        num_warps=self.warps, num_stages=self.stages
      ),
      name="grouped_matmul",
    )


def _row_tiles(
  sizes: jax.Array, rows: int, tile: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Returns group, first row and end of each tile; empty tiles end at 0.

  Tiles of a group begin at its first row. There are at most R / tile + E.
  """
  counts = (sizes + tile - 1) // tile
  lasts = jnp.cumsum(counts)
  index = jnp.arange(rows // tile + sizes.shape[0], dtype=jnp.int32)
  group = jnp.searchsorted(lasts, index, side="right").astype(jnp.int32)
  exists = group < sizes.shape[0]
  group = jnp.minimum(group, sizes.shape[0] - 1)
  ends = jnp.cumsum(sizes)
  starts = ends - sizes
  ends = jnp.minimum(ends, rows)
  within = index - lasts[group] + counts[group]
  first = starts[group] + within * tile
  end = jnp.where(exists, jnp.minimum(first + tile, ends[group]), 0)
  return group, first.astype(jnp.int32), end.astype(jnp.int32)


def _multiply(
  x_ref: Any,
  w_ref: Any,
  groups_ref: Any,
  firsts_ref: Any,
  ends_ref: Any,
  y_ref: Any,
  *,
  tiles: Triton,
  transposed: bool,
) -> None:
  i, j = pl.program_id(0), pl.program_id(1)
  group, first, end = groups_ref[i], firsts_ref[i], ends_ref[i]
  N = y_ref.shape[1]
  K = x_ref.shape[1]
  rows = pl.ds(first, tiles.rows)
  columns = pl.ds(j * tiles.columns, tiles.columns)
  is_row = first + jnp.arange(tiles.rows) < end
  is_column = j * tiles.columns + jnp.arange(tiles.columns) < N

  @pl.when(first < end)
  def _() -> None:
    def add(step: jax.Array, total: jax.Array) -> jax.Array:
      at = pl.ds(step * tiles.contracting, tiles.contracting)
      is_inner = step * tiles.contracting + jnp.arange(tiles.contracting) < K
      a = plgpu.load(
        x_ref.at[rows, at], mask=is_row[:, None] & is_inner[None, :], other=0
      )
      if transposed:
        b = plgpu.load(
          w_ref.at[group, columns, at],
          mask=is_column[:, None] & is_inner[None, :],
          other=0,
        ).T
      else:
        b = plgpu.load(
          w_ref.at[group, at, columns],
          mask=is_inner[:, None] & is_column[None, :],
          other=0,
        )
      return total + plgpu.dot(a, b).astype(jnp.float32)

    total = jnp.zeros((tiles.rows, tiles.columns), jnp.float32)
    total = jax.lax.fori_loop(0, pl.cdiv(K, tiles.contracting), add, total)
    plgpu.store(
      y_ref.at[rows, columns],
      total.astype(y_ref.dtype),
      mask=is_row[:, None] & is_column[None, :],
    )


def _multiply_transposed(
  x_ref: Any,
  y_ref: Any,
  starts_ref: Any,
  ends_ref: Any,
  out_ref: Any,
  *,
  tiles: Triton,
) -> None:
  group, i, j = (pl.program_id(axis) for axis in range(3))
  start, end = starts_ref[group], ends_ref[group]
  K, N = x_ref.shape[1], y_ref.shape[1]
  left = pl.ds(i * tiles.rows, tiles.rows)
  right = pl.ds(j * tiles.columns, tiles.columns)
  is_left = i * tiles.rows + jnp.arange(tiles.rows) < K
  is_right = j * tiles.columns + jnp.arange(tiles.columns) < N

  def add(step: jax.Array, total: jax.Array) -> jax.Array:
    first = start + step * tiles.contracting
    is_row = first + jnp.arange(tiles.contracting) < end
    rows = pl.ds(first, tiles.contracting)
    a = plgpu.load(
      x_ref.at[rows, left], mask=is_row[:, None] & is_left[None, :], other=0
    )
    b = plgpu.load(
      y_ref.at[rows, right], mask=is_row[:, None] & is_right[None, :], other=0
    )
    return total + plgpu.dot(a.T, b).astype(jnp.float32)

  steps = (end - start + tiles.contracting - 1) // tiles.contracting
  total = jnp.zeros((tiles.rows, tiles.columns), jnp.float32)
  total = jax.lax.fori_loop(0, steps, add, total)
  plgpu.store(
    out_ref.at[group, left, right],
    total.astype(out_ref.dtype),
    mask=is_left[:, None] & is_right[None, :],
  )
