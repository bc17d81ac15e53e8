"""Recipes by name, for the knob `quantization` of experiments.

`docs/quantization.md` has tables of their formats and scales: of training, of
stored weights, and of calibration. `wanda` and `sparsegpt` prune only.

A suffix selects the mode: `int8:train` (the default) quantizes the matmuls of
training, `int8:serve` stores quantized weights, and `int8:convert` converts the
weights of a float checkpoint.
"""

import dataclasses
import enum
from typing import Final

from paxon.quantization import number_formats
from paxon.quantization import recipe as recipe_lib
from paxon.sharding import suggestions


class Mode(enum.Enum):
  """The use of a recipe."""

  # Quantize matmuls of float32 parameters.
  TRAIN = "train"
  # Store quantized weights.
  SERVE = "serve"
  # Quantize the weights of a float checkpoint.
  CONVERT = "convert"


@dataclasses.dataclass(frozen=True)
class Choice:
  """A value of the knob `quantization`.

  Attributes:
    name: Name of the recipe.
    mode: Use of the recipe.
  """

  name: str
  mode: Mode

  @property
  def recipe(self) -> recipe_lib.Recipe:
    """The recipe of this name."""
    return _RECIPES[self.name]


def find_recipe(name: str) -> recipe_lib.Recipe:
  """Returns the recipe of this name.

  Raises:
    ValueError: The recipe does not exist.
  """
  if name not in _RECIPES:
    raise ValueError(_unknown("recipe", name, list(_RECIPES)))
  return _RECIPES[name]


def parse(text: str) -> Choice:
  """Parses `name` or `name:mode`.

  Raises:
    ValueError: The recipe or the mode does not exist, or the recipe cannot
      train.
  """
  name, colon, mode = text.partition(":")
  find_recipe(name)
  modes = {m.value: m for m in Mode}
  if colon and mode not in modes:
    raise ValueError(_unknown("mode", mode, list(modes)))
  choice = Choice(name=name, mode=modes[mode] if colon else Mode.TRAIN)
  if choice.mode is Mode.TRAIN and choice.recipe.has_zero_points:
    raise ValueError(
      f"the recipe {name!r} has zero points, which only stored weights have, so"
      f" it needs {name}:convert or {name}:serve."
    )
  if choice.mode is Mode.TRAIN and choice.recipe.prunes:
    raise ValueError(
      f"the recipe {name!r} prunes trained weights, so it needs {name}:convert"
      f" or {name}:serve; train with learners.optimizers.pruning.Pruned."
    )
  return choice


def _unknown(what: str, name: str, known: list[str]) -> str:
  close = suggestions.find_closest(name, known)
  hint = f" did you mean {close[0]!r}?" if close else ""
  return f"no {what} is named {name!r};{hint} there are {', '.join(known)}."


def _per_channel(
  number_format: number_formats.NumberFormat,
  rounding: recipe_lib.Rounding = recipe_lib.Rounding.NEAREST,
) -> recipe_lib.TensorRecipe:
  return recipe_lib.TensorRecipe(
    number_format,
    granularity=recipe_lib.Granularity.CHANNEL,
    rounding=rounding,
  )


def _per_block(block: tuple[int, int]) -> recipe_lib.TensorRecipe:
  return recipe_lib.TensorRecipe(
    number_formats.FP8_E4M3,
    granularity=recipe_lib.Granularity.BLOCK,
    block=block,
  )


def _microscaling(
  number_format: number_formats.NumberFormat,
  size: int,
  scale_format: recipe_lib.ScaleFormat,
) -> recipe_lib.Recipe:
  weights = recipe_lib.TensorRecipe(
    number_format,
    granularity=recipe_lib.Granularity.BLOCK,
    block=(size, 1),
    scale_format=scale_format,
  )
  return recipe_lib.Recipe(None, weights, None)


_DELAYED = recipe_lib.TensorRecipe(
  number_formats.FP8_E4M3, scaling=recipe_lib.Delayed()
)
# Gradients of a mean loss are tiny: with scale 1, those of the first steps
# would be flushed to zero.
_DELAYED_GRADIENT = recipe_lib.TensorRecipe(
  number_formats.FP8_E5M2, scaling=recipe_lib.Delayed(initial_scale=2.0**-26)
)
_E4M3 = _per_channel(number_formats.FP8_E4M3)
_INT8 = _per_channel(number_formats.INT8)
_INT4 = _per_channel(number_formats.INT4)
_FLOAT32 = recipe_lib.TensorRecipe(number_formats.FLOAT32)
_RANDOM = _per_channel(number_formats.INT8, recipe_lib.Rounding.STOCHASTIC)

_INT8_RECIPE = recipe_lib.Recipe(_INT8, _INT8, _RANDOM)
_INT4_GROUP = recipe_lib.Recipe(
  None,
  recipe_lib.TensorRecipe(
    number_formats.INT4,
    granularity=recipe_lib.Granularity.BLOCK,
    block=(128, 1),
  ),
  None,
  search_range=True,
)

_RECIPES: Final = {
  "fp8": recipe_lib.Recipe(_DELAYED, _DELAYED, _DELAYED_GRADIENT),
  "fp8_current": recipe_lib.Recipe(
    recipe_lib.TensorRecipe(number_formats.FP8_E4M3),
    recipe_lib.TensorRecipe(number_formats.FP8_E4M3),
    recipe_lib.TensorRecipe(number_formats.FP8_E5M2),
  ),
  # With finer scales, values need less range.
  "fp8_channel": recipe_lib.Recipe(_E4M3, _E4M3, _E4M3),
  "fp8_block": recipe_lib.Recipe(
    _per_block((128, 1)), _per_block((128, 128)), _per_block((128, 1))
  ),
  "int8": _INT8_RECIPE,
  "int4": recipe_lib.Recipe(
    _INT8,
    _INT4,
    _RANDOM,
    backward_rhs=_INT8,
    # With 15 values, clipping outliers reduces the error.
    search_range=True,
  ),
  "int4_group": _INT4_GROUP,
  "int4_learned": dataclasses.replace(
    _INT4_GROUP, search_range=False, learned_range=True
  ),
  "int4_gptq": dataclasses.replace(_INT4_GROUP, calibration=recipe_lib.Gptq()),
  "int4_awq": dataclasses.replace(_INT4_GROUP, calibration=recipe_lib.Awq()),
  "int4_hqq": recipe_lib.Recipe(
    None,
    recipe_lib.TensorRecipe(
      number_formats.INT4,
      granularity=recipe_lib.Granularity.BLOCK,
      block=(64, 1),
      zero_point=True,
    ),
    None,
    search_range=True,
  ),
  "nf4": recipe_lib.Recipe(
    None,
    recipe_lib.TensorRecipe(
      number_formats.NF4,
      granularity=recipe_lib.Granularity.BLOCK,
      scaling=recipe_lib.Current(power_of_two=False),
      block=(64, 1),
    ),
    None,
  ),
  "int8_smooth": dataclasses.replace(
    _INT8_RECIPE, calibration=recipe_lib.SmoothQuant()
  ),
  "int8_static": dataclasses.replace(
    _INT8_RECIPE, calibration=recipe_lib.StaticRange()
  ),
  "fp8_static": recipe_lib.Recipe(
    _E4M3, _E4M3, _E4M3, calibration=recipe_lib.StaticRange()
  ),
  "mxfp8": _microscaling(
    number_formats.FP8_E4M3, 32, recipe_lib.ScaleFormat.E8M0
  ),
  "mxfp4": _microscaling(
    number_formats.FP4_E2M1, 32, recipe_lib.ScaleFormat.E8M0
  ),
  "nvfp4": _microscaling(
    number_formats.FP4_E2M1, 16, recipe_lib.ScaleFormat.E4M3
  ),
  "wanda": recipe_lib.Recipe(
    None, _FLOAT32, None, calibration=recipe_lib.Wanda()
  ),
  "sparsegpt": recipe_lib.Recipe(
    None, _FLOAT32, None, calibration=recipe_lib.SparseGpt()
  ),
}

NAMES: Final = tuple(_RECIPES)
