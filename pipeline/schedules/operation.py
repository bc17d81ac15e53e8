"""What a stage does at one tick, and which chunk of the model it does it to.

A model of `num_stages * num_chunks` equal pieces, its virtual stages, lies on
`num_stages` stages, `num_chunks` pieces on each. A microbatch runs forward
through the virtual stages in order, and backward in the opposite order.

The backward pass of a piece has two parts: the gradient of its input, which the
piece before it waits for, and that of its weights, which nobody waits for. They
run as one operation or as two (Qi et al. 2023,
https://arxiv.org/abs/2401.10241).
"""

import dataclasses
import enum


class Kind(enum.Enum):
  """The kinds of operations; the values are how tables print them."""

  FORWARD = "F"
  # Makes what FORWARD did not keep again, for the backward pass.
  RECOMPUTE = "R"
  # Both gradients at once.
  BACKWARD = "X"
  INPUT_GRADIENT = "B"
  WEIGHT_GRADIENT = "W"


# Those that a gradient for the piece before comes from.
INPUT_GRADIENT_KINDS = (Kind.BACKWARD, Kind.INPUT_GRADIENT)


@dataclasses.dataclass(frozen=True, order=False)
class Operation:
  """One kind of work on one microbatch and one chunk of its stage.

  Attributes:
    kind: What is done.
    microbatch: From 0.
    chunk: Which of the pieces on the stage, from 0.
  """

  kind: Kind
  microbatch: int
  chunk: int = 0

  def __str__(self) -> str:
    return (
      f"{self.kind.value}(microbatch {self.microbatch}, chunk {self.chunk})"
    )


class Placement(enum.Enum):
  """How virtual stages lie on stages.

  LOOP goes round: chunk c of stage s is virtual stage `c * num_stages + s`.
  V goes back and forth: odd chunks are mirrored, so that the piece after the
  last stage's first is on the last stage too.
  """

  LOOP = "loop"
  V = "v"

  def virtual_stage(self, stage: int, *, chunk: int, num_stages: int) -> int:
    """Returns the number of the virtual stage that a chunk of a stage is."""
    is_mirrored = self is Placement.V and chunk % 2
    place = num_stages - 1 - stage if is_mirrored else stage
    return chunk * num_stages + place

  def stage(self, virtual_stage: int, *, num_stages: int) -> int:
    """Returns the stage on which a virtual stage lies."""
    chunk, place = divmod(virtual_stage, num_stages)
    is_mirrored = self is Placement.V and chunk % 2
    return num_stages - 1 - place if is_mirrored else place
