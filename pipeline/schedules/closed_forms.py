"""The bubbles and memories that papers give for schedules.

All at any costs F, B and W of a whole stage's forward pass, gradient of its
input and gradient of its weights, without time for messages; P stages, M
microbatches, v chunks. A bubble is the time in which a stage does nothing,
memory the microbatches in flight on a stage, in whole stages.
"""

from collections.abc import Callable
import dataclasses

from paxon.pipeline.schedules import costs as costs_lib
from paxon.pipeline.schedules import (
  gpipe,
  interleaved,
  one_f_one_b,
  table,
  zero_bubble,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClosedForm:
  """A schedule and what is known of it.

  Attributes:
    make: Makes the table, from `num_stages` and `num_microbatches`.
    bubble: From the number of stages and costs, on the asynchronous clock.
    formula: The bubble, to be printed.
    in_flight: From stages, microbatches and the stage: at most at once.
    is_bound: Whether the bubble is what a paper claims for its own heuristic,
      which ours stays above.
    source: Where both are from.
  """

  make: Callable[..., table.Table]
  bubble: Callable[[int, costs_lib.Costs], float]
  formula: str
  in_flight: Callable[[int, int, int], float]
  source: str
  is_bound: bool = False


_GPIPE = "https://arxiv.org/abs/1811.06965"
_MEGATRON = "https://arxiv.org/abs/2104.04473"
_ZERO_BUBBLE = "https://arxiv.org/abs/2401.10241"
_V = "https://arxiv.org/abs/2405.15362"


def _whole(c: costs_lib.Costs) -> float:
  return c.forward + c.input_gradient + c.weight_gradient


# Interleaved schedules with two chunks.
CLOSED_FORMS = (
  ClosedForm(
    make=gpipe.make,
    bubble=lambda p, c: (p - 1) * _whole(c),
    formula="(P-1)(F+B+W)",
    in_flight=lambda p, m, s: m,
    source=_GPIPE,
  ),
  ClosedForm(
    make=one_f_one_b.make,
    bubble=lambda p, c: (p - 1) * _whole(c),
    formula="(P-1)(F+B+W)",
    in_flight=lambda p, m, s: min(m, p - s),
    source=_MEGATRON,
  ),
  ClosedForm(
    make=one_f_one_b.split,
    bubble=lambda p, c: (p - 1) * (c.forward + c.input_gradient),
    formula="(P-1)(F+B)",
    in_flight=lambda p, m, s: min(m, p - s),
    source=f"{_MEGATRON}, the gradient of the input sent first",
  ),
  ClosedForm(
    make=one_f_one_b.two_slots,
    bubble=lambda p, c: (p - 1) * _whole(c),
    formula="(P-1)(F+B+W)",
    in_flight=lambda p, m, s: min(m, 2 * (p - s) - 1),
    source="counted: forward at tick i+s, backward at i+2(P-1)-s",
  ),
  ClosedForm(
    make=interleaved.make,
    bubble=lambda p, c: (p - 1) * _whole(c) / 2,
    formula="(P-1)(F+B+W)/v",
    in_flight=lambda p, m, s: min(2 * m, 2 * (p - 1 - s) + p + 1) / 2,
    source=_MEGATRON,
  ),
  ClosedForm(
    make=interleaved.two_slots,
    bubble=lambda p, c: (p - 1) * _whole(c) / 2,
    formula="(P-1)(F+B+W)/v",
    in_flight=lambda p, m, s: min(2 * m, 2 * (p - 1 - s) + p + 1) / 2,
    source="counted: as interleaved 1F1B, on both clocks",
  ),
  ClosedForm(
    make=zero_bubble.make_h1,
    bubble=lambda p, c: (
      (p - 1) * (c.forward + c.input_gradient - c.weight_gradient)
    ),
    formula="(P-1)(F+B-W)",
    in_flight=lambda p, m, s: min(m, p),
    source=_ZERO_BUBBLE,
  ),
  ClosedForm(
    make=zero_bubble.make_v,
    bubble=lambda p, c: 0.0,
    formula="0 at F=B=W",
    in_flight=lambda p, m, s: min(m, p),
    source=_V,
    is_bound=True,
  ),
)
