"""The grouped matmul of TPUs, and the choice of a kernel by platform."""

from collections.abc import Callable
import dataclasses
from typing import Any, Final

import jax
from jax.experimental.pallas.ops.tpu import megablox
import jax.numpy as jnp

from paxon.layers.moe import grouped_matmul, triton_kernel
from paxon.sharding import checks, target

_MEGABLOX: Final = target.Support(
  name="layers.moe.platform_kernels.Megablox",
  platforms=(target.TPU,),
  dtypes=("bfloat16", "float32"),
)

# Of the last dimension of a TPU's registers.
_LANES = 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class Megablox:
  """JAX's Pallas kernel for TPUs.

  Attributes:
    rows: Rows of a tile; `None` chooses 512, 256 or 128 by the number of rows
      and experts, see `choose_rows`. Rows are padded to a multiple.
    contracting: Largest tile of the contracting dimension.
    columns: Largest tile of the other dimension.
    interpret: Whether Pallas interprets the kernel, on any device, for tests.
  """

  rows: int | None = None
  contracting: int = 1024
  columns: int = 1024
  interpret: bool = False

  def __post_init__(self) -> None:
    checks.check_positive(self, "rows")
    checks.check_size(self, "contracting", "columns")

  def choose_rows(
    self, rows: int, *, num_experts: int, contracting: int
  ) -> int:
    """Returns the rows of a tile.

    A tile with rows of several experts is computed for each of them, so E
    experts cost up to E - 1 tiles more than their rows. The largest tile is
    chosen that adds at most a sixteenth, else the smallest. That is 256 if the
    contracting dimension is not one tile: the matrix is then read again for
    each tile of rows, and the memory of TPUs feeds 240 operations a byte.

    Args:
      rows: All rows.
      num_experts: Number of experts on the device.
      contracting: Contracting dimension of the matrices; 0 for the product of
        rows, which reads no matrix.
    """
    smallest = 128 if contracting <= self.contracting else 256
    sizes = [self.rows] if self.rows else [512, 256, 128]
    fitting = [
      tile
      for tile in sizes
      if 16 * (num_experts - 1) * tile <= rows or tile <= smallest
    ]
    # Fewer for few rows.
    return min((fitting or sizes)[0], -(-rows // _LANES) * _LANES)

  @property
  def support(self) -> target.Support:
    """Features that the kernel supports."""
    if self.interpret:
      return dataclasses.replace(_MEGABLOX, platforms=())
    return _MEGABLOX

  def multiply(
    self, x: jax.Array, w: jax.Array, sizes: jax.Array, *, transposed: bool
  ) -> jax.Array:
    """Returns `x[r] @ w[e]`, or `x[r] @ w[e].T`; zero in padding."""

    def kernel(x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
      tile = self.choose_rows(
        x.shape[0], num_experts=sizes.shape[0], contracting=x.shape[1]
      )
      y = self._gmm(_pad(x, tile), w, sizes, transposed, tile)
      # The kernel does not write rows after the last group.
      used = jnp.arange(x.shape[0], dtype=jnp.int32) < jnp.sum(sizes)
      y = jnp.where(used[:, None], y[: x.shape[0]], jnp.zeros((), y.dtype))
      return y.astype(x.dtype)

    return grouped_matmul.on_supported_platforms(
      self.support, kernel, x, w, sizes
    )

  def multiply_transposed(
    self, x: jax.Array, y: jax.Array, sizes: jax.Array
  ) -> jax.Array:
    """Returns the sum over the rows of each group of outer products [E,K,N]."""

    def kernel(x: jax.Array, y: jax.Array, sizes: jax.Array) -> jax.Array:
      tile = self.choose_rows(
        x.shape[0], num_experts=sizes.shape[0], contracting=0
      )
      x, y = (_pad(v, tile) for v in (x, y))
      # JAX exports the transposed kernel only as the gradient of the other; its
      # operands are unused, and so are the results.
      w = jnp.zeros((sizes.shape[0], x.shape[1], y.shape[1]), x.dtype)
      _, transpose = jax.vjp(lambda w: self._gmm(x, w, sizes, False, tile), w)
      with jax.numpy_dtype_promotion("standard"):
        return transpose(y.astype(x.dtype))[0]

    return grouped_matmul.on_supported_platforms(
      self.support, kernel, x, y, sizes
    )

  def _gmm(
    self,
    x: jax.Array,
    w: jax.Array,
    sizes: jax.Array,
    transposed: bool,
    tile: int,
  ) -> jax.Array:
    inner, outer = w.shape[1:][:: -1 if transposed else 1]
    tiling = (
      tile,
      min(self.contracting, -(-inner // _LANES) * _LANES),
      min(self.columns, -(-outer // _LANES) * _LANES),
    )
    # JAX's code relies on promotion. Positional, because the function has a
    # derivative of its own.
    with jax.numpy_dtype_promotion("standard"):
      return megablox.gmm(
        x, w, sizes, x.dtype, tiling, None, None, transposed, self.interpret
      )


def _pad(x: jax.Array, multiple: int) -> jax.Array:
  """Returns rows with zeros behind."""
  return jnp.pad(x, ((0, -x.shape[0] % multiple), (0, 0)))


# Constants, which compare by value.
_TILES: Final = grouped_matmul.Tiles()
_MEGABLOX_KERNEL: Final = Megablox()
_TRITON: Final = triton_kernel.Triton()


@dataclasses.dataclass(frozen=True, kw_only=True)
class ByPlatform:
  """The kernel of the platform that a program is compiled for.

  Attributes:
    cpu: On CPUs.
    cuda: On NVIDIA GPUs.
    tpu: On TPUs.
  """

  cpu: grouped_matmul.Kernel = _TILES
  cuda: grouped_matmul.Kernel = _TRITON
  tpu: grouped_matmul.Kernel = _MEGABLOX_KERNEL

  @property
  def support(self) -> target.Support:
    """Whatever the kernels support."""
    return target.Support(
      name="layers.moe.platform_kernels.ByPlatform",
      platforms=(
        target.CPU,
        target.CUDA,
        target.TPU,
      ),
    )

  def multiply(
    self, x: jax.Array, w: jax.Array, sizes: jax.Array, *, transposed: bool
  ) -> jax.Array:
    """Returns `x[r] @ w[e]`, or `x[r] @ w[e].T`; zero in padding."""

    def bind(kernel: grouped_matmul.Kernel) -> Callable[..., jax.Array]:
      return lambda *xs: kernel.multiply(*xs, transposed=transposed)

    return self._choose(bind, x, w, sizes)

  def multiply_transposed(
    self, x: jax.Array, y: jax.Array, sizes: jax.Array
  ) -> jax.Array:
    """Returns the sum over the rows of each group of outer products [E,K,N]."""
    return self._choose(lambda kernel: kernel.multiply_transposed, x, y, sizes)

  def _choose(
    self,
    of: Callable[[grouped_matmul.Kernel], Callable[..., jax.Array]],
    *operands: jax.Array,
  ) -> jax.Array:
    kernels = {"cpu": self.cpu, "cuda": self.cuda, "tpu": self.tpu}
    name = operands[0].dtype.name
    branches: dict[str, Any] = {
      platform: of(kernel)
      for platform, kernel in kernels.items()
      # A program for another platform does not need it.
      if not any(
        kernel.support.problems(target.Request(dtype=name, platform=platform))
      )
    }
    return jax.lax.platform_dependent(*operands, **branches)
