"""Recipes by name, as the knob `quantization` of experiments takes them.

  fp8          e4m3 forward, e5m2 gradients; a scale for each tensor, from the
               largest values of the steps before (delayed scaling)
  fp8_current  the same, with scales of the tensors themselves
  fp8_channel  e4m3 everywhere, a scale for each row that a sum runs over
  fp8_block    e4m3 everywhere, a scale for tiles of 128 (kernels: 128 x 128)
  int8         int8 everywhere, a scale for each row; gradients are rounded at
               random (AQT)
  int4         weights in int4, and all else as int8 has it, so that training
               sees what is served: activations of four bits would cost much and
               gain nothing where products are of int8. Weights that are served
               have the range that loses least

A mode may follow after a colon, as in `int8:serve`: `train` (what is left out)
quantizes the products of training.
"""

import dataclasses
import difflib
import enum
from typing import Final

from paxon.quantization import number_formats
from paxon.quantization import recipe as recipe_lib


class Mode(enum.Enum):
  """What is quantized, and when."""

  # Products, from float32 parameters.
  TRAIN = "train"
  # Weights, which are stored in few bits.
  SERVE = "serve"
  # Weights, which are made of a float checkpoint.
  CONVERT = "convert"


@dataclasses.dataclass(frozen=True)
class Choice:
  """What the knob `quantization` says.

  Attributes:
    name: Of the recipe.
    mode: Its use.
  """

  name: str
  mode: Mode

  @property
  def recipe(self) -> recipe_lib.Recipe:
    """The recipe of products."""
    return _RECIPES[self.name]


def named(name: str) -> recipe_lib.Recipe:
  """Returns a recipe.

  Raises:
    ValueError: There is no such recipe.
  """
  if name not in _RECIPES:
    raise ValueError(_unknown("recipe", name, list(_RECIPES)))
  return _RECIPES[name]


def parse(text: str) -> Choice:
  """Returns what `name` or `name:mode` says.

  Raises:
    ValueError: There is no such recipe or mode.
  """
  name, colon, mode = text.partition(":")
  named(name)
  modes = {m.value: m for m in Mode}
  if colon and mode not in modes:
    raise ValueError(_unknown("mode", mode, list(modes)))
  return Choice(name=name, mode=modes[mode] if colon else Mode.TRAIN)


def _unknown(what: str, name: str, known: list[str]) -> str:
  close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
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


_DELAYED = recipe_lib.TensorRecipe(
  number_formats.FP8_E4M3, scaling=recipe_lib.Delayed()
)
# Gradients of a mean loss are tiny: with the scale 1, all of the first steps'
# would be flushed to zero.
_DELAYED_GRADIENT = recipe_lib.TensorRecipe(
  number_formats.FP8_E5M2, scaling=recipe_lib.Delayed(initial_scale=2.0**-26)
)
_E4M3 = _per_channel(number_formats.FP8_E4M3)
_INT8 = _per_channel(number_formats.INT8)
_INT4 = _per_channel(number_formats.INT4)
_RANDOM = _per_channel(number_formats.INT8, recipe_lib.Rounding.STOCHASTIC)

_RECIPES: Final = {
  "fp8": recipe_lib.Recipe(_DELAYED, _DELAYED, _DELAYED_GRADIENT),
  "fp8_current": recipe_lib.Recipe(
    recipe_lib.TensorRecipe(number_formats.FP8_E4M3),
    recipe_lib.TensorRecipe(number_formats.FP8_E4M3),
    recipe_lib.TensorRecipe(number_formats.FP8_E5M2),
  ),
  # The finer the scales, the less range a value needs of its own.
  "fp8_channel": recipe_lib.Recipe(_E4M3, _E4M3, _E4M3),
  "fp8_block": recipe_lib.Recipe(
    _per_block((128, 1)), _per_block((128, 128)), _per_block((128, 1))
  ),
  "int8": recipe_lib.Recipe(_INT8, _INT8, _RANDOM),
  "int4": recipe_lib.Recipe(
    _INT8,
    _INT4,
    _RANDOM,
    backward_rhs=_INT8,
    # With so few steps, outliers cost more than they are worth.
    search_range=True,
  ),
}

NAMES: Final = tuple(_RECIPES)
