"""Recipes: how the operands of a matmul are quantized.

A product has three operands: `lhs` (activations), `rhs` (the kernel, or the
other activation) and, in the backward pass, `gradient` (of the output). Each
has a `TensorRecipe`, or `None`: it then stays in the dtype of the layer.

Here are descriptions only; `quantized_einsum` says what is computed by them.
"""

import dataclasses
import enum

from paxon.quantization import number_formats


class Granularity(enum.Enum):
  """Which values share a scale.

  TENSOR: all of an operand.
  CHANNEL: those that one sum of the product runs over: a row of activations,
    the input weights of one output.
  BLOCK: tiles of an operand, as `TensorRecipe.block` has them.
  """

  TENSOR = "tensor"
  CHANNEL = "channel"
  BLOCK = "block"


class Rounding(enum.Enum):
  """Which of the two neighbours in the format a value becomes.

  NEAREST: the nearer one, at a tie the even one.
  STOCHASTIC: the upper one with the probability that makes the mean exact.
  """

  NEAREST = "nearest"
  STOCHASTIC = "stochastic"


@dataclasses.dataclass(frozen=True)
class Current:
  """The scale comes from the largest value of the tensor itself.

  Attributes:
    margin: Binary digits kept free above the largest value.
    power_of_two: Whether scales are rounded up to powers of two, which makes
      scaling exact: only casts round, and results of products may be scaled in
      bfloat16. `None` does so for fp8, which loses at most one binary digit of
      range by it, and not for integers, which would lose half of their values.
  """

  margin: int = 0
  power_of_two: bool | None = None


@dataclasses.dataclass(frozen=True)
class Delayed:
  """The scale comes from the largest values of the steps before.

  So it is known before the tensor is, which can be cast while it is written.
  Values beyond it saturate.

  Attributes:
    history_length: Over how many steps the largest value is remembered.
    margin: Binary digits kept free above the largest value.
    power_of_two: As in `Current`.
    initial_scale: The scale until there is a history.
  """

  history_length: int = 1024
  margin: int = 0
  power_of_two: bool | None = None
  initial_scale: float = 1.0

  def __post_init__(self) -> None:
    if self.history_length < 1:
      raise ValueError(
        "Delayed.history_length must be at least 1, got "
        f"{self.history_length}; without a history the scaling is Current()."
      )
    if not self.initial_scale > 0:
      raise ValueError(
        f"Delayed.initial_scale must be positive, got {self.initial_scale}."
      )


@dataclasses.dataclass(frozen=True)
class TensorRecipe:
  """How one operand is quantized.

  Attributes:
    format: The numbers that it is quantized to.
    granularity: Which values share a scale.
    scaling: Where the scale comes from.
    rounding: How values are rounded.
    block: Size of a tile along the innermost contracted dimension, and along
      the innermost one that is not contracted; other dimensions are tiled by
      one. `(128, 1)` gives each row tiles of 128, `(128, 128)` is for kernels.
      Used by `Granularity.BLOCK` only.
  """

  format: number_formats.NumberFormat
  granularity: Granularity = Granularity.TENSOR
  scaling: Current | Delayed = Current()
  rounding: Rounding = Rounding.NEAREST
  block: tuple[int, int] | None = None

  def __post_init__(self) -> None:
    if self.is_delayed and self.granularity is not Granularity.TENSOR:
      raise ValueError(
        "TensorRecipe.scaling may be Delayed with Granularity.TENSOR only, got "
        f"{self.granularity}; use Current()."
      )
    if (self.block is not None) != (self.granularity is Granularity.BLOCK):
      raise ValueError(
        "TensorRecipe.block must be given with Granularity.BLOCK and with no "
        f"other, got {self.block} with {self.granularity}."
      )
    if self.block is not None and min(self.block) < 1:
      raise ValueError(
        f"TensorRecipe.block must have positive sizes, got {self.block}."
      )

  @property
  def is_delayed(self) -> bool:
    """Whether the scale comes from a history."""
    return isinstance(self.scaling, Delayed)

  @property
  def has_power_of_two_scales(self) -> bool:
    """Whether scales are powers of two."""
    chosen = self.scaling.power_of_two
    return not self.format.is_integer if chosen is None else chosen


@dataclasses.dataclass(frozen=True)
class Recipe:
  """How a product and the two products of its backward pass are quantized.

  Attributes:
    lhs: Of the left operand; `None` leaves it in the dtype of the layer.
    rhs: Of the right operand; `None` leaves it.
    gradient: Of the gradient of the output in both backward products; `None`
      leaves it, and these products then run in the dtype of the layer.
    backward_lhs: Of the left operand where it is multiplied with the gradient;
      `None` is as in `lhs`.
    backward_rhs: Of the right operand there; `None` is as in `rhs`.
    search_range: Of weights that are stored quantized (`served_einsum`):
      whether their range is the one that loses least (`clipping`), and not up
      to the largest magnitude. It takes no part in training.
  """

  lhs: TensorRecipe | None
  rhs: TensorRecipe | None
  gradient: TensorRecipe | None
  backward_lhs: TensorRecipe | None = None
  backward_rhs: TensorRecipe | None = None
  search_range: bool = False

  def __post_init__(self) -> None:
    for name in ("backward_lhs", "backward_rhs"):
      backward = getattr(self, name)
      if backward is not None and self.gradient is None:
        raise ValueError(
          f"Recipe.{name} requires Recipe.gradient: an unquantized gradient is "
          "multiplied with the operands of the forward matmul."
        )
      if backward is not None and backward.is_delayed:
        raise ValueError(
          f"Recipe.{name}.scaling must be Current(): only the operands of the "
          "forward matmul and the gradient have histories."
        )

  @property
  def is_delayed(self) -> bool:
    """Whether a product by this recipe has a state."""
    operands = (self.lhs, self.rhs, self.gradient)
    return any(o is not None and o.is_delayed for o in operands)
