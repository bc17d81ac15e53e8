"""Settings of differential privacy; `private_gradients` has the algorithm."""

from collections.abc import Sequence
import dataclasses
import enum
from typing import Final

from paxon.sharding import checks

# Name of the random key of the noise.
STREAM: Final = "privacy_noise"


class Clipping(enum.Enum):
  """How the gradients of examples are clipped."""

  PER_EXAMPLE = "per_example"
  PER_LAYER = "per_layer"
  PER_LAYER_SCALED = "per_layer_scaled"
  GHOST = "ghost"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Privacy:
  """Differential privacy of a training run.

  Attributes:
    clip_norm: Largest norm C of the gradient of an example.
    noise_multiplier: Standard deviation of the noise, divided by C.
    num_examples: Number of examples of the training set (of groups, with
      `examples_per_clip`), each of which is in a batch with the same
      probability. `None` if epsilon is not to be computed.
    delta: Probability with which epsilon may not hold; less than
      1 / `num_examples`.
    clipping: How gradients are clipped.
    examples_per_clip: Number of successive examples of a batch that are clipped
      as one.
    materialized: Regular expressions of whole names of variables that have no
      ghost norm, and whose gradients `GHOST` computes for each example.
    max_materialized_size: The same for all variables of at most this size in
      each layer, such as biases and scales.
  """

  clip_norm: float
  noise_multiplier: float
  num_examples: int | None = None
  delta: float = 1e-5
  clipping: Clipping = Clipping.PER_EXAMPLE
  examples_per_clip: int = 1
  materialized: Sequence[str] = ()
  max_materialized_size: int = 2**16

  def __post_init__(self) -> None:
    checks.check_positive(
      self, "clip_norm", "num_examples", "examples_per_clip"
    )
    checks.check_non_negative(self, "noise_multiplier", "max_materialized_size")
    checks.check_interval(self, "(0, 1)", "delta")
    if self.num_examples is not None and self.delta >= 1 / self.num_examples:
      raise ValueError(
        f"Privacy.delta must be less than 1 / num_examples ="
        f" {1 / self.num_examples:.3g}, got {self.delta}: a run that publishes"
        " one example would satisfy it."
      )
    for pattern in self.materialized:
      checks.check_pattern("Privacy.materialized", pattern)
