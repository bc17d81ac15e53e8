"""Reference quantization in numpy, written from the definitions.

Computes in float32 where the definition rounds and in float64 elsewhere, with
the casts of `ml_dtypes`, which XLA does not use.
"""

import ml_dtypes
import numpy as np

from paxon.quantization import recipe as recipe_lib

_CASTS = {
  "fp8_e4m3": ml_dtypes.float8_e4m3fn,
  "fp8_e5m2": ml_dtypes.float8_e5m2,
  "fp4_e2m1": ml_dtypes.float4_e2m1fn,
}


def tiles(
  x: np.ndarray,
  tensor_recipe: recipe_lib.TensorRecipe,
  contracted: tuple[int, ...],
) -> list[tuple[slice, ...]]:
  """Returns the groups of values that share a scale."""
  sizes = list(x.shape)
  if tensor_recipe.granularity is not recipe_lib.Granularity.TENSOR:
    sizes = [n if i in contracted else 1 for i, n in enumerate(x.shape)]
  if tensor_recipe.block is not None:
    free = [i for i in range(x.ndim) if i not in contracted]
    sizes = [1] * x.ndim
    sizes[contracted[-1]] = tensor_recipe.block[0]
    sizes[free[-1]] = tensor_recipe.block[1]
  counts = [-(-n // size) for n, size in zip(x.shape, sizes, strict=True)]
  return [
    tuple(
      slice(i * size, (i + 1) * size)
      for i, size in zip(index, sizes, strict=True)
    )
    for index in np.ndindex(*counts)
  ]


def make_scale(
  amax: float, tensor_recipe: recipe_lib.TensorRecipe
) -> np.float32:
  """Returns the scale for a largest magnitude."""
  scaling = tensor_recipe.scaling
  if amax == 0:
    return np.float32(getattr(scaling, "initial_scale", 1.0))
  factor = np.float32(2.0**scaling.margin / tensor_recipe.format.largest)
  scale = np.float32(amax) * factor
  if tensor_recipe.has_power_of_two_scales:
    mantissa, exponent = np.frexp(scale)
    scale = np.float32(2.0 ** (exponent - (mantissa == 0.5)))
  return scale


def round_to_format(
  x: np.ndarray, tensor_recipe: recipe_lib.TensorRecipe
) -> np.ndarray:
  """Returns the nearest values of a format, saturated, as float64."""
  largest = tensor_recipe.format.largest
  x = np.clip(x.astype(np.float32), -largest, largest)
  if tensor_recipe.format.is_integer:
    return np.rint(x).astype(np.float64)
  return x.astype(_CASTS[tensor_recipe.format.name]).astype(np.float64)


def quantize(
  x: np.ndarray,
  tensor_recipe: recipe_lib.TensorRecipe | None,
  contracted: tuple[int, ...] = (),
  *,
  scale: np.float32 | None = None,
) -> np.ndarray:
  """Returns `x` quantized and dequantized, float64.

  Args:
    x: Values.
    tensor_recipe: The recipe; `None` does not quantize.
    contracted: Dimensions that the matmul contracts.
    scale: Scale of the whole tensor; `None` uses current scaling.
  """
  if tensor_recipe is None:
    return np.asarray(x, np.float64)
  x = np.asarray(x, np.float32)
  result = np.zeros(x.shape, np.float64)
  for tile in tiles(x, tensor_recipe, contracted):
    of_tile = scale
    if of_tile is None:
      amax = float(np.max(np.abs(x[tile]), initial=0))
      of_tile = make_scale(amax, tensor_recipe)
    values = round_to_format(x[tile] * (np.float32(1) / of_tile), tensor_recipe)
    result[tile] = values * np.float64(of_tile)
  return result


class Delayed:
  """The history of one operand with delayed scaling, step by step."""

  def __init__(self, tensor_recipe: recipe_lib.TensorRecipe) -> None:
    assert isinstance(tensor_recipe.scaling, recipe_lib.Delayed)
    self._recipe = tensor_recipe
    self._length = tensor_recipe.scaling.history_length
    self._largest: list[float] = []

  @property
  def scale(self) -> np.float32:
    """The scale of this step, from previous steps only."""
    window = self._largest[-self._length :]
    return make_scale(max(window, default=0.0), self._recipe)

  @property
  def history(self) -> np.ndarray:
    """The last largest magnitudes, newest first, zeros at the end."""
    newest = self._largest[::-1][: self._length]
    missing = self._length - len(newest)
    return np.array(newest + [0.0] * missing, np.float32)

  def end_step(self, x: np.ndarray) -> None:
    """Ends a step with this value of the operand."""
    self._largest.append(float(np.max(np.abs(x))))
