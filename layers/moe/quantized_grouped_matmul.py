"""Grouped matmul of quantized operands, with scales for each expert.

  y[r]  = x[r] @ w[e]          x has a scale for each row, w for each expert
  dx[r] = dy[r] @ w[e].T       likewise
  dw[e] = sum_r x[r]^T dy[r]   both have a scale for each expert

with a scale for each channel of an expert too, if the recipe has `CHANNEL`
granularity. Scales are current ones: a history of an expert would be stale
while no token reaches it. This is what `quantized_einsum` computes for a
dispatch by capacity with scales per channel.

No kernel multiplies 8-bit values: they are exact in bfloat16, in which they are
multiplied, with sums in float32. Under expert parallelism each device scales
its own shard of a kernel.

Letters: R rows, E experts, K and N the dimensions of a matrix.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from paxon.layers.moe import grouped_matmul
from paxon.quantization import quantized_array, scaling
from paxon.quantization import recipe as recipe_lib

# Values, and their scales; None is 1.
_Quantized = tuple[jax.Array, jax.Array | None]


def grouped_matmul_by(
  recipe: recipe_lib.Recipe,
  x: Float[Array, "rows k"],
  w: Float[Array, "experts k n"],
  sizes: Int[Array, " experts"],
  *,
  kernel: grouped_matmul.Kernel,
  key: jax.Array | None = None,
) -> Float[Array, "rows n"]:
  """Returns each row times the matrix of its group, in the dtype of `x`.

  Args:
    recipe: How operands and gradients are quantized; without blocks.
    x: Rows, sorted by group; those after the last group give zeros.
    w: Matrices.
    sizes: Rows of each group.
    kernel: Multiplies the quantized values.
    key: Random key for stochastic rounding; with `None` the forward matmul
      rounds to nearest.
  """
  if x.dtype not in (jnp.float32, jnp.bfloat16):
    # The products of 8-bit values exceed the range of float16.
    wide = grouped_matmul_by(
      recipe, x.astype(jnp.float32), w, sizes, kernel=kernel, key=key
    )
    return wide.astype(x.dtype)
  grouped_matmul.check(kernel.support, x.dtype.name)
  made = _Matmul(recipe=recipe, kernel=kernel)
  return _multiply_quantized(made, x, w, sizes.astype(jnp.int32), key)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Matmul:
  """The static properties of a matmul."""

  recipe: recipe_lib.Recipe
  kernel: grouped_matmul.Kernel


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _multiply_quantized(
  matmul: _Matmul,
  x: jax.Array,
  w: jax.Array,
  sizes: jax.Array,
  key: jax.Array | None,
) -> jax.Array:
  rows = _Rows(x.shape[0], sizes)
  left = _quantize_by_row(x, matmul.recipe.lhs, key, 0)
  right = _quantize_by_channel(w, matmul.recipe.rhs, key, 1, contracted=1)
  y = _product(matmul, left[0], right[0].astype(x.dtype), sizes)
  return rows.scale(y, left[1], right[1], contracted=1).astype(x.dtype)


def _forward(
  matmul: _Matmul,
  x: jax.Array,
  w: jax.Array,
  sizes: jax.Array,
  key: jax.Array | None,
) -> tuple[jax.Array, Any]:
  return _multiply_quantized(matmul, x, w, sizes, key), (x, w, sizes, key)


def _backward(
  matmul: _Matmul, saved: Any, dy: jax.Array
) -> tuple[jax.Array, jax.Array, None, None]:
  x, w, sizes, key = saved
  recipe, dtype = matmul.recipe, x.dtype
  rows = _Rows(x.shape[0], sizes)
  rhs = recipe.backward_rhs or recipe.rhs
  dy = dy.astype(dtype)
  left = _quantize_by_row(dy, recipe.gradient, key, 2)
  right = _quantize_by_channel(w, rhs, key, 3, contracted=2)
  dx = _product(matmul, left[0], right[0].astype(dtype), sizes, True)
  dx = rows.scale(dx, left[1], right[1], contracted=2).astype(dtype)
  lhs = recipe.backward_lhs or recipe.lhs
  of_x, of_dy = (
    rows.quantize_by_group(x, lhs, key, 4),
    rows.quantize_by_group(dy, recipe.gradient, key, 5),
  )
  dw = grouped_matmul.multiply_rows(matmul.kernel, of_x[0], of_dy[0], sizes)
  dw = dw.astype(jnp.float32)
  if of_x[1] is not None:
    dw = dw * of_x[1][:, :, None]
  if of_dy[1] is not None:
    dw = dw * of_dy[1][:, None, :]
  return dx, dw.astype(w.dtype), None, None


_multiply_quantized.defvjp(_forward, _backward)


def _product(
  matmul: _Matmul,
  x: jax.Array,
  w: jax.Array,
  sizes: jax.Array,
  transposed: bool = False,
) -> jax.Array:
  return grouped_matmul.multiply(
    matmul.kernel, x, w, sizes, transposed=transposed
  )


@dataclasses.dataclass(frozen=True)
class _Rows:
  """R rows in groups of these sizes."""

  count: int
  sizes: jax.Array

  @property
  def ids(self) -> jax.Array:
    """The group of each row; E for those after the last group."""
    index = jnp.arange(self.count, dtype=self.sizes.dtype)
    return jnp.searchsorted(jnp.cumsum(self.sizes), index, side="right")

  def scale(
    self,
    y: jax.Array,
    of_row: jax.Array | None,
    of_group: jax.Array | None,
    *,
    contracted: int,
  ) -> jax.Array:
    """Returns outputs [R,N] times scales [R,1] and [E,1,N] or [E,N,1]."""
    ids = self.ids
    y = y.astype(jnp.float32)
    if of_row is not None:
      y = y * of_row
    if of_group is not None:
      factor = jnp.squeeze(of_group, contracted)
      y = y * factor.at[ids].get(mode="fill", fill_value=0)
    # The scale of a row that is padding may be NaN.
    used = ids < self.sizes.shape[0]
    return jnp.where(used[:, None], y, jnp.zeros((), y.dtype))

  def quantize_by_group(
    self,
    x: jax.Array,
    recipe: recipe_lib.TensorRecipe | None,
    key: jax.Array | None,
    part: int,
  ) -> _Quantized:
    """Quantizes rows with scales [E,K], or [E,1], of their groups."""
    if recipe is None:
      return x, None
    count, ids = self.sizes.shape[0], self.ids
    amax = jnp.abs(x.astype(jnp.float32))
    if recipe.granularity is recipe_lib.Granularity.TENSOR:
      amax = jnp.max(amax, axis=1, keepdims=True)
    amax = jax.ops.segment_max(
      amax, ids, num_segments=count, indices_are_sorted=True
    )
    # Of a group without rows the maximum is -inf.
    scale = _make_scale(jnp.maximum(amax, 0), recipe)
    of_row = scale.at[ids].get(mode="fill", fill_value=1)
    return _round(x, of_row, recipe, key, part), scale


def _quantize_by_row(
  x: jax.Array,
  recipe: recipe_lib.TensorRecipe | None,
  key: jax.Array | None,
  part: int,
) -> _Quantized:
  """Quantizes rows [R,K] with a scale for each [R,1]."""
  if recipe is None:
    return x, None
  scale = _make_scale(scaling.find_amax(x, (1,), keepdims=True), recipe)
  return _round(x, scale, recipe, key, part), scale


def _quantize_by_channel(
  w: jax.Array,
  recipe: recipe_lib.TensorRecipe | None,
  key: jax.Array | None,
  part: int,
  *,
  contracted: int,
) -> _Quantized:
  """Quantizes matrices with scales of size 1 in the contracted dimension."""
  if recipe is None:
    return w, None
  scale = scaling.find_amax(w, (contracted,), keepdims=True)
  if recipe.granularity is recipe_lib.Granularity.TENSOR:
    scale = jnp.max(scale, axis=3 - contracted, keepdims=True)
  scale = _make_scale(scale, recipe)
  return _round(w, scale, recipe, key, part), scale


def _make_scale(amax: jax.Array, recipe: recipe_lib.TensorRecipe) -> jax.Array:
  given = recipe.scaling
  current = recipe_lib.Current(
    margin=given.margin, power_of_two=given.power_of_two
  )
  return scaling.make_scale(amax, dataclasses.replace(recipe, scaling=current))


def _round(
  x: jax.Array,
  scale: jax.Array,
  recipe: recipe_lib.TensorRecipe,
  key: jax.Array | None,
  part: int,
) -> jax.Array:
  """Returns the values in the format, in the dtype of `x`."""
  rounding = recipe.rounding
  is_forward = part < 2
  if key is None and is_forward:
    rounding = recipe_lib.Rounding.NEAREST
  if key is not None:
    key = jax.random.fold_in(key, part)
  values = quantized_array.to_format(
    x.astype(jnp.float32) * (1 / scale),
    recipe.format,
    rounding=rounding,
    key=key if rounding is recipe_lib.Rounding.STOCHASTIC else None,
  )
  return values.astype(x.dtype)
