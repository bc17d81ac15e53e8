"""Tests for validation of recipes."""

import dataclasses

import pytest

from paxon.quantization import number_formats, recipe, recipes

INT8 = recipe.TensorRecipe(number_formats.INT8)


def test_a_history_has_a_length():
  with pytest.raises(
    ValueError, match=r"history_length must be at least 1, .*0"
  ):
    recipe.Delayed(history_length=0)


def test_an_initial_scale_is_positive():
  with pytest.raises(
    ValueError, match=r"initial_scale must be positive, got 0"
  ):
    recipe.Delayed(initial_scale=0.0)


def test_only_whole_tensors_have_histories():
  with pytest.raises(ValueError, match=r"Delayed with Granularity.TENSOR only"):
    recipe.TensorRecipe(
      number_formats.INT8,
      granularity=recipe.Granularity.CHANNEL,
      scaling=recipe.Delayed(),
    )


@pytest.mark.parametrize(
  ("granularity", "block"),
  [
    (recipe.Granularity.BLOCK, None),
    (recipe.Granularity.TENSOR, (128, 1)),
  ],
)
def test_tiles_have_sizes_and_nothing_else_has(granularity, block):
  with pytest.raises(ValueError, match=r"block must be given with"):
    recipe.TensorRecipe(
      number_formats.INT8, granularity=granularity, block=block
    )


def test_tiles_are_not_empty():
  with pytest.raises(ValueError, match=r"positive sizes, got \(128, 0\)"):
    recipe.TensorRecipe(
      number_formats.INT8,
      granularity=recipe.Granularity.BLOCK,
      block=(128, 0),
    )


def test_backward_operands_need_a_quantized_gradient():
  with pytest.raises(
    ValueError, match=r"backward_rhs requires Recipe.gradient"
  ):
    recipe.Recipe(INT8, INT8, None, backward_rhs=INT8)


def test_backward_operands_have_no_history_of_their_own():
  delayed = recipe.TensorRecipe(number_formats.INT8, scaling=recipe.Delayed())
  with pytest.raises(ValueError, match=r"backward_lhs.scaling must be Current"):
    recipe.Recipe(INT8, INT8, INT8, backward_lhs=delayed)


ZEROS = recipe.TensorRecipe(
  number_formats.INT4,
  granularity=recipe.Granularity.CHANNEL,
  zero_point=True,
)


def test_zero_points_are_those_of_rounded_weights():
  for other in (
    {"format": number_formats.FP8_E4M3},
    {"granularity": recipe.Granularity.TENSOR},
  ):
    with pytest.raises(ValueError, match=r"zero_point needs integers and"):
      dataclasses.replace(ZEROS, **other)
  with pytest.raises(ValueError, match=r"Recipe.lhs.zero_point must be False"):
    recipe.Recipe(ZEROS, ZEROS, None)
  with pytest.raises(ValueError, match=r"needs weights that are rounded to ne"):
    recipe.Recipe(None, ZEROS, None, calibration=recipe.Gptq())
  with pytest.raises(ValueError, match=r"StaticRange requires Recipe.lhs"):
    recipe.Recipe(None, INT8, None, calibration=recipe.StaticRange())
  with pytest.raises(ValueError, match=r"int4_hqq' has zero points, .*convert"):
    recipes.parse("int4_hqq")


def test_a_recipe_is_delayed_if_an_operand_is():
  delayed = recipe.TensorRecipe(number_formats.INT8, scaling=recipe.Delayed())
  assert recipe.Recipe(None, INT8, delayed).is_delayed
  assert not recipe.Recipe(None, INT8, None).is_delayed
