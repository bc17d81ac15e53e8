"""Pipeline schedules: 1F1B and interleaved 1F1B.

A stage that runs one operation a tick often runs a forward pass while its
neighbors run a backward pass, and in lock-step every such tick takes as long as
the slower one. Two-slot schedules have a forward and a backward slot in every
tick, which avoids that. GPipe needs no schedule: it is what autodiff makes of
`PipelinedStack`. docs/pipeline_schedules.md has times and memory, and the
schedules that are not implemented.
"""

from collections.abc import Callable, Mapping

from paxon.pipeline.schedules import table
from paxon.sharding import suggestions

_FORWARD, _BACKWARD = table.Kind.FORWARD, table.Kind.BACKWARD

# `(*, num_stages, num_microbatches) -> table`.
Schedule = Callable[..., table.Table]


def one_f_one_b(*, num_stages: int, num_microbatches: int) -> table.Table:
  """Returns 1F1B: a microbatch runs backward as soon as it can.

  Narayanan et al. 2021, https://arxiv.org/abs/2104.04473 (non-interleaved). It
  keeps at most as many microbatches as there are stages, and is slower than
  `one_f_one_b_two_slots` in lock-step.
  """
  orders = []
  for stage in range(num_stages):
    warm_up = min(num_microbatches, num_stages - 1 - stage)
    order = [table.Operation(_FORWARD, i) for i in range(warm_up)]
    for i in range(num_microbatches):
      if warm_up + i < num_microbatches:
        order.append(table.Operation(_FORWARD, warm_up + i))
      order.append(table.Operation(_BACKWARD, i))
    orders.append(order)
  return table.from_orders(orders, name="1F1B")


def one_f_one_b_two_slots(
  *, num_stages: int, num_microbatches: int
) -> table.Table:
  """Returns 1F1B with a forward and a backward slot in every tick.

  On P stages microbatch i runs forward on stage s at tick `i + s`, backward at
  `i + 2 (P - 1) - s`: GPipe's time in lock-step, with `2 P - 1` microbatches in
  memory at most.
  """

  def cell(tick: int, stage: int) -> table.Cell:
    forward, backward = tick - stage, tick - 2 * (num_stages - 1) + stage
    return tuple(
      table.Operation(kind, i) if 0 <= i < num_microbatches else None
      for kind, i in ((_FORWARD, forward), (_BACKWARD, backward))
    )

  num_ticks = num_microbatches + 2 * (num_stages - 1)
  return table.Table(
    name="1F1B two-slot",
    num_stages=num_stages,
    num_microbatches=num_microbatches,
    ticks=tuple(
      tuple(cell(tick, stage) for stage in range(num_stages))
      for tick in range(num_ticks)
    ),
  )


def interleaved_two_slots(
  *, num_stages: int, num_microbatches: int, num_chunks: int = 2
) -> table.Table:
  """Returns interleaved 1F1B with a forward and a backward slot in every tick.

  With v chunks on a stage the bubble is 1/v of GPipe's, for v times the
  messages (https://arxiv.org/abs/2104.04473, section 2.2).

  Stage s runs the n-th forward operation at tick `n + s` and the n-th backward
  operation at tick `n + v P - 1 + (P - 1 - s)`, the first at which the last
  virtual stage can. Between the first backward and the last forward operation
  every tick has both, so the bubble is the paper's in lock-step too.

  Args:
    num_stages: P.
    num_microbatches: M, a multiple of P.
    num_chunks: v.

  Raises:
    ValueError: `num_microbatches` is not a multiple of `num_stages`.
  """
  if num_stages > 0 and num_microbatches % num_stages:
    raise ValueError(
      f"num_microbatches ({num_microbatches}) must be a multiple of num_stages"
      f" ({num_stages}) in an interleaved schedule."
    )
  total = num_microbatches * num_chunks
  begin = num_chunks * num_stages - 1

  def operation(kind: table.Kind, n: int) -> table.Operation | None:
    """Returns the n-th operation of a kind, on any stage."""
    if not 0 <= n < total:
      return None
    group, rest = divmod(n, num_stages * num_chunks)
    chunk, microbatch = divmod(rest, num_stages)
    if kind is _BACKWARD:
      chunk = num_chunks - 1 - chunk
    return table.Operation(kind, group * num_stages + microbatch, chunk)

  def cell(tick: int, stage: int) -> table.Cell:
    return (
      operation(_FORWARD, tick - stage),
      operation(_BACKWARD, tick - begin - (num_stages - 1 - stage)),
    )

  return table.Table(
    name=f"interleaved two-slot, {num_chunks} chunks",
    num_stages=num_stages,
    num_chunks=num_chunks,
    num_microbatches=num_microbatches,
    ticks=tuple(
      tuple(cell(tick, stage) for stage in range(num_stages))
      for tick in range(total + begin + num_stages - 1)
    ),
  )


SCHEDULES: Mapping[str, Schedule] = {
  "1f1b": one_f_one_b,
  "1f1b_two_slots": one_f_one_b_two_slots,
  "interleaved_two_slots": interleaved_two_slots,
}


def find(name: str) -> Schedule:
  """Returns the function that makes the table of a schedule.

  Raises:
    ValueError: The name does not exist.
  """
  if name not in SCHEDULES:
    close = suggestions.find_closest(name, SCHEDULES)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise ValueError(
      f"{name!r} is not a schedule; use one of {', '.join(SCHEDULES)}, or unset"
      f" it for GPipe.{hint}"
    )
  return SCHEDULES[name]
