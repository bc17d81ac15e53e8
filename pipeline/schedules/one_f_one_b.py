"""1F1B: as soon as a microbatch can run backward it does, so memory is freed.

Narayanan et al. 2019 (PipeDream), 2021 (Megatron, non-interleaved),
https://arxiv.org/abs/2104.04473. As many microbatches as there are stages
after a stage run forward there first, then forward and backward alternate.

One operation a tick has neighbours that run opposite ones, so that in lock-step
every tick costs the dearer of both. `two_slots` has a forward and a backward
operation in every tick: GPipe's time in lock-step, with more microbatches in
flight than `make` and fewer than GPipe.
"""

from collections.abc import Callable

from paxon.pipeline.schedules import dependencies, gpipe, operation, table

_Kind = operation.Kind
_Operation = operation.Operation


def make(*, num_stages: int, num_microbatches: int) -> table.Table:
  """Returns the table with one operation a tick.

  Args:
    num_stages: P.
    num_microbatches: M.
  """
  return _make(
    "1F1B",
    lambda i: [_Operation(_Kind.BACKWARD, i)],
    num_stages=num_stages,
    num_microbatches=num_microbatches,
  )


def split(*, num_stages: int, num_microbatches: int) -> table.Table:
  """Returns the table in which the gradient of weights follows by itself.

  The stage before then waits for the gradient of the input only.

  Args:
    num_stages: P.
    num_microbatches: M.
  """
  return _make(
    "1F1B split",
    lambda i: [
      _Operation(_Kind.INPUT_GRADIENT, i),
      _Operation(_Kind.WEIGHT_GRADIENT, i),
    ],
    num_stages=num_stages,
    num_microbatches=num_microbatches,
  )


def two_slots(*, num_stages: int, num_microbatches: int) -> table.Table:
  """Returns the table with a forward and a backward slot in every tick.

  Microbatch i runs forward on stage s at tick `i + s` and backward at tick
  `i + 2 (P - 1) - s`.

  Args:
    num_stages: P.
    num_microbatches: M.
  """
  gpipe.check_microbatches(num_microbatches)
  pieces = dependencies.Pieces(num_stages=num_stages)

  def at(kind: operation.Kind, i: int) -> operation.Operation | None:
    return _Operation(kind, i) if 0 <= i < num_microbatches else None

  ticks = tuple(
    tuple(
      (
        at(_Kind.FORWARD, tick - stage),
        at(_Kind.BACKWARD, tick - 2 * (num_stages - 1) + stage),
      )
      for stage in range(num_stages)
    )
    for tick in range(num_microbatches + 2 * (num_stages - 1))
  )
  return table.Table(
    name="1F1B two-slot",
    pieces=pieces,
    num_microbatches=num_microbatches,
    ticks=ticks,
  )


def _make(
  name: str,
  backward: Callable[[int], list[operation.Operation]],
  *,
  num_stages: int,
  num_microbatches: int,
) -> table.Table:
  gpipe.check_microbatches(num_microbatches)
  orders = []
  for stage in range(num_stages):
    warm_up = min(num_microbatches, num_stages - 1 - stage)
    order = [_Operation(_Kind.FORWARD, i) for i in range(warm_up)]
    for i in range(num_microbatches):
      if warm_up + i < num_microbatches:
        order.append(_Operation(_Kind.FORWARD, warm_up + i))
      order += backward(i)
    orders.append(order)
  return table.from_orders(
    orders, name=name, pieces=dependencies.Pieces(num_stages=num_stages)
  )
