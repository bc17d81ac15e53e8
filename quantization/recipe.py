"""Recipes: how the operands of a matmul are quantized.

A matmul has three operands: `lhs` (activations), `rhs` (the kernel or other
activations) and, in the backward pass, `gradient` (of the output). Each has a
`TensorRecipe`, or `None` to stay in the dtype of the layer. `quantized_einsum`
defines the computation.
"""

import dataclasses
import enum

from paxon.quantization import number_formats
from paxon.sharding import checks


class Granularity(enum.Enum):
  """The groups of values that share a scale.

  TENSOR: the whole operand.
  CHANNEL: the values of one sum of the matmul, such as the activations of one
    token or the weights of one output.
  BLOCK: tiles of size `TensorRecipe.block`.
  """

  TENSOR = "tensor"
  CHANNEL = "channel"
  BLOCK = "block"


class Rounding(enum.Enum):
  """Rounding of a value to one of its two neighbours in the format.

  NEAREST: to the nearer one, ties to even.
  STOCHASTIC: up with the probability that makes the mean exact.
  """

  NEAREST = "nearest"
  STOCHASTIC = "stochastic"


class ScaleFormat(enum.Enum):
  """The values that the scales of a tensor may have.

  FLOAT32: any, or powers of two.
  E8M0: powers of two, of the exponent of the largest magnitude less that of the
    format's largest value, in one byte (OCP Microscaling formats v1.0, section
    6.3). Larger values than the format's saturate.
  E4M3: fp8 values times a float32 scale of the tensor, with which the largest
    is 448 (NVFP4).
  """

  FLOAT32 = "float32"
  E8M0 = "e8m0"
  E4M3 = "e4m3"


@dataclasses.dataclass(frozen=True)
class Current:
  """Scales from the largest value of the tensor itself.

  Attributes:
    margin: Number of unused bits above the largest value.
    power_of_two: Whether scales are rounded up to powers of two, which makes
      scaling exact: only casts round, and results may be scaled in bfloat16.
      `None` is True for fp8, which loses at most one bit of range, and False
      for integers, which would lose up to half of their values.
  """

  margin: int = 0
  power_of_two: bool | None = None


@dataclasses.dataclass(frozen=True)
class Delayed:
  """Scales from the largest values of previous steps.

  The tensor can be cast while it is written, because its scale is available
  before. Values beyond the scale saturate.

  Attributes:
    history_length: Number of previous steps.
    margin: Number of unused bits above the largest value.
    power_of_two: As in `Current`.
    initial_scale: The scale while the history is zero.
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
    checks.check_positive(self, "initial_scale")


@dataclasses.dataclass(frozen=True)
class TensorRecipe:
  """How one operand is quantized.

  Attributes:
    format: Number format.
    granularity: Groups of values that share a scale.
    scaling: Source of the scale.
    rounding: Rounding to the format.
    block: Size of a tile along the last contracted and the last other
      dimension; tiles have size one along all others. `(128, 1)` is for
      activations, `(128, 128)` for kernels. Only for `Granularity.BLOCK`.
    scale_format: Format of the scales; other than FLOAT32 only for
      `Granularity.BLOCK`.
    zero_point: Whether integers have a zero point for each group
      (`zero_points`); only stored weights may.
  """

  format: number_formats.NumberFormat
  granularity: Granularity = Granularity.TENSOR
  scaling: Current | Delayed = Current()
  rounding: Rounding = Rounding.NEAREST
  block: tuple[int, int] | None = None
  scale_format: ScaleFormat = ScaleFormat.FLOAT32
  zero_point: bool = False

  def __post_init__(self) -> None:
    if self.scale_format is not ScaleFormat.FLOAT32 and (
      self.granularity is not Granularity.BLOCK or self.format.is_integer
    ):
      raise ValueError(
        f"TensorRecipe.scale_format {self.scale_format} needs Granularity.BLOCK"
        f" and a floating-point format, got {self.granularity} and"
        f" {self.format.name}."
      )
    if self.zero_point and (
      not self.format.is_integer or self.granularity is Granularity.TENSOR
    ):
      raise ValueError(
        "TensorRecipe.zero_point needs integers and Granularity.CHANNEL or"
        f" BLOCK, got {self.format.name} and {self.granularity}."
      )
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
    """Whether the scale comes from previous steps."""
    return isinstance(self.scaling, Delayed)

  @property
  def has_power_of_two_scales(self) -> bool:
    """Whether scales are powers of two."""
    if self.scale_format is not ScaleFormat.FLOAT32:
      return self.scale_format is ScaleFormat.E8M0
    chosen = self.scaling.power_of_two
    return not self.format.is_integer if chosen is None else chosen


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Calibrated:
  """Base of the methods that quantize stored weights by their inputs.

  Attributes:
    batches: Number of training batches from which inputs are taken.
  """

  batches: int = 8

  def __post_init__(self) -> None:
    checks.check_positive(self, "batches")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gptq(_Calibrated):
  """GPTQ; see `calibration`.

  Attributes:
    damping: Added to the diagonal of the Hessian, relative to its mean.
  """

  damping: float = 0.01

  def __post_init__(self) -> None:
    super().__post_init__()
    checks.check_positive(self, "damping")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Awq(_Calibrated):
  """AWQ; see `calibration`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SmoothQuant(_Calibrated):
  """SmoothQuant; see `calibration`.

  Attributes:
    strength: Exponent of the magnitudes of inputs; one less it, that of the
      weights.
  """

  strength: float = 0.5

  def __post_init__(self) -> None:
    super().__post_init__()
    checks.check_interval(self, "[0, 1]", "strength")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StaticRange(_Calibrated):
  """Stores the largest magnitude of the inputs of a matmul.

  Serving then scales activations without reading them twice; larger ones
  saturate. Weights are rounded to nearest.
  """


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pruning(_Calibrated):
  """Base of the methods that prune stored weights by their inputs.

  Attributes:
    keep: Inputs that are kept in a group, for each output.
    of: Size of a group of consecutive inputs; it divides their number.
  """

  keep: int = 2
  of: int = 4

  def __post_init__(self) -> None:
    super().__post_init__()
    if not 0 < self.keep < self.of:
      raise ValueError(
        f"{type(self).__name__}.keep must be between 1 and of - 1, got"
        f" keep={self.keep}, of={self.of}."
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wanda(Pruning):
  """Wanda; see `calibration`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SparseGpt(Pruning):
  """SparseGPT; see `calibration`.

  Attributes:
    damping: Added to the diagonal of the Hessian, relative to its mean.
  """

  damping: float = 0.01

  def __post_init__(self) -> None:
    super().__post_init__()
    checks.check_positive(self, "damping")


Calibration = Gptq | Awq | SmoothQuant | StaticRange | Wanda | SparseGpt


@dataclasses.dataclass(frozen=True)
class Recipe:
  """How a matmul and its two backward matmuls are quantized.

  Attributes:
    lhs: Recipe of the left operand; `None` does not quantize it.
    rhs: Recipe of the right operand; `None` does not quantize it.
    gradient: Recipe of the gradient of the output in both backward matmuls;
      `None` runs them in the dtype of the layer.
    backward_lhs: Recipe of the left operand in the backward matmul; `None` uses
      `lhs`.
    backward_rhs: Recipe of the right operand in the backward matmul; `None`
      uses `rhs`.
    search_range: Whether to search the range of stored weights with the
      smallest error (`served_einsum.search_scale`) instead of using the largest
      magnitude; zero points are searched by HQQ. Not used in training.
    learned_range: Whether training learns the ranges of weights that are
      parameters, of integers in CHANNELs or BLOCKs (`learned_range`). Stored
      weights have these.
    calibration: Method that quantizes stored weights, or scales activations, by
      statistics of the inputs; None rounds each weight to nearest. Not used in
      training.
  """

  lhs: TensorRecipe | None
  rhs: TensorRecipe | None
  gradient: TensorRecipe | None
  backward_lhs: TensorRecipe | None = None
  backward_rhs: TensorRecipe | None = None
  search_range: bool = False
  learned_range: bool = False
  calibration: Calibration | None = None

  def __post_init__(self) -> None:
    backward_operands = {
      "backward_lhs": self.backward_lhs,
      "backward_rhs": self.backward_rhs,
    }
    for name, backward in backward_operands.items():
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
    if self.calibration is not None and self.rhs is None:
      raise ValueError(
        "Recipe.calibration requires Recipe.rhs: it quantizes weights."
      )
    has_range = isinstance(self.calibration, StaticRange)
    if has_range and self.lhs is None:
      raise ValueError(
        "Recipe.calibration StaticRange requires Recipe.lhs: it scales"
        " activations."
      )
    others = {"lhs": self.lhs, "gradient": self.gradient, **backward_operands}
    for name, operand in others.items():
      if operand is not None and operand.zero_point:
        raise ValueError(
          f"Recipe.{name}.zero_point must be False: only weights have zero"
          " points."
        )
    if self.has_zero_points and not (self.calibration is None or has_range):
      raise ValueError(
        "Recipe.rhs.zero_point needs weights that are rounded to nearest, got"
        f" the calibration {self.calibration}."
      )
    self._check_learned_range()
    is_float = self.rhs is not None and self.rhs.format.bits == 32
    if self.prunes != is_float:
      raise ValueError(
        "Recipe.calibration must be Wanda or SparseGpt with float32 weights,"
        f" and with no others, got {self.calibration}."
      )

  def _check_learned_range(self) -> None:
    if not self.learned_range:
      return
    if self.search_range or self.calibration is not None:
      raise ValueError(
        "Recipe.learned_range excludes search_range and calibration, which"
        " choose ranges after training."
      )
    rhs = self.rhs
    if (
      rhs is None
      or not rhs.format.is_integer
      or rhs.granularity is Granularity.TENSOR
      or rhs.zero_point
      or rhs.has_power_of_two_scales
      or rhs.rounding is not Rounding.NEAREST
    ):
      raise ValueError(
        "Recipe.learned_range needs a Recipe.rhs of integers without zero"
        " points, rounded to nearest, with Granularity.CHANNEL or BLOCK and"
        f" scales of any value, got {rhs}."
      )

  @property
  def has_zero_points(self) -> bool:
    """Whether stored weights have zero points."""
    return self.rhs is not None and self.rhs.zero_point

  @property
  def prunes(self) -> bool:
    """Whether stored weights are pruned, not quantized."""
    return isinstance(self.calibration, Pruning)

  @property
  def is_delayed(self) -> bool:
    """Whether a matmul with this recipe has state."""
    operands = (self.lhs, self.rhs, self.gradient)
    return any(o is not None and o.is_delayed for o in operands)
