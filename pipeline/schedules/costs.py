"""What operations cost, in any unit of time."""

import dataclasses
import math

from paxon.pipeline.schedules import operation

_Kind = operation.Kind


@dataclasses.dataclass(frozen=True, kw_only=True)
class Costs:
  """The time that a whole stage takes for one microbatch.

  A chunk takes its share of it. The forward pass of a stage and the two parts
  of its backward pass have about equal numbers of products, hence the defaults.

  Attributes:
    forward: Of the forward pass.
    input_gradient: Of the backward pass up to the stage's input.
    weight_gradient: Of the rest of the backward pass.
    recompute: Of making again what the forward pass did not keep: about
      `forward` where only the input is kept. Without an operation of its own
      it comes on top of `input_gradient`.
    message: Of sending an activation to a neighbour; 0 is none.
  """

  forward: float = 1.0
  input_gradient: float = 1.0
  weight_gradient: float = 1.0
  recompute: float = 0.0
  message: float = 0.0

  def __post_init__(self) -> None:
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if not (math.isfinite(value) and value >= 0):
        raise ValueError(
          f"Costs.{field.name} must be finite and not negative, got {value}."
        )

  def of(
    self, kind: operation.Kind, *, num_chunks: int, has_recompute: bool
  ) -> float:
    """Returns the time of one operation.

    Args:
      kind: What is done.
      num_chunks: Pieces on a stage.
      has_recompute: Whether the piece has a RECOMPUTE operation of its own.
    """
    again = 0.0 if has_recompute else self.recompute
    whole = {
      _Kind.FORWARD: self.forward,
      _Kind.RECOMPUTE: self.recompute,
      _Kind.BACKWARD: self.input_gradient + self.weight_gradient + again,
      _Kind.INPUT_GRADIENT: self.input_gradient + again,
      _Kind.WEIGHT_GRADIENT: self.weight_gradient,
    }
    return whole[kind] / num_chunks
