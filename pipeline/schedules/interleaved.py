"""Interleaved 1F1B: several smaller pieces on each stage, a smaller bubble.

Narayanan et al. 2021, https://arxiv.org/abs/2104.04473, section 2.2: with v
chunks on a stage the bubble is 1/v of 1F1B's, for v times the messages.

With one operation a tick neighbours run opposite ones and lose that gain in
lock-step; `two_slots` keeps it.
"""

from paxon.pipeline.schedules import dependencies, gpipe, operation, table

_Kind = operation.Kind


def make(
  *, num_stages: int, num_microbatches: int, num_chunks: int = 2
) -> table.Table:
  """Returns the table.

  Args:
    num_stages: P.
    num_microbatches: M; a multiple of P, because microbatches go round in
      groups of P.
    num_chunks: v.

  Raises:
    ValueError: `num_microbatches` is no multiple of `num_stages`.
  """
  pieces = _pieces(num_stages, num_microbatches, num_chunks)
  total = num_microbatches * num_chunks
  orders = []
  for stage in range(num_stages):
    warm_up = 2 * (num_stages - 1 - stage) + (num_chunks - 1) * num_stages
    warm_up = min(total, warm_up)
    order = [_forward(pieces, n) for n in range(warm_up)]
    for n in range(total):
      if warm_up + n < total:
        order.append(_forward(pieces, warm_up + n))
      order.append(_backward(pieces, n))
    orders.append(order)
  return table.from_orders(
    orders, name=f"interleaved 1F1B, {num_chunks} chunks", pieces=pieces
  )


def two_slots(
  *, num_stages: int, num_microbatches: int, num_chunks: int = 2
) -> table.Table:
  """Returns the table with a forward and a backward slot in every tick.

  Stage s runs the n-th forward operation at tick `n + s` and the n-th backward
  one at tick `n + v P - 1 + (P - 1 - s)`, the first at which that of the last
  virtual stage is possible. In every tick between the first backward and the
  last forward operation a stage has both, so the bubble is `make`'s on the
  lock-step clock too.

  Args:
    num_stages: P.
    num_microbatches: M; a multiple of P.
    num_chunks: v.

  Raises:
    ValueError: `num_microbatches` is no multiple of `num_stages`.
  """
  pieces = _pieces(num_stages, num_microbatches, num_chunks)
  total = num_microbatches * num_chunks
  begin = num_chunks * num_stages - 1
  ticks = []
  for tick in range(total + begin + num_stages - 1):
    row = []
    for stage in range(num_stages):
      forward = tick - stage
      backward = tick - begin - (num_stages - 1 - stage)
      row.append(
        (
          _forward(pieces, forward) if 0 <= forward < total else None,
          _backward(pieces, backward) if 0 <= backward < total else None,
        )
      )
    ticks.append(tuple(row))
  return table.Table(
    name=f"interleaved two-slot, {num_chunks} chunks",
    pieces=pieces,
    num_microbatches=num_microbatches,
    ticks=tuple(ticks),
  )


def _pieces(
  num_stages: int, num_microbatches: int, num_chunks: int
) -> dependencies.Pieces:
  gpipe.check_microbatches(num_microbatches)
  pieces = dependencies.Pieces(num_stages=num_stages, num_chunks=num_chunks)
  if num_microbatches % num_stages:
    raise ValueError(
      f"num_microbatches ({num_microbatches}) must be a multiple of num_stages"
      f" ({num_stages}) in an interleaved schedule."
    )
  return pieces


def _forward(pieces: dependencies.Pieces, n: int) -> operation.Operation:
  """Returns the n-th forward operation of any stage."""
  rounds, rest = divmod(n, pieces.num_stages * pieces.num_chunks)
  chunk, place = divmod(rest, pieces.num_stages)
  return operation.Operation(
    _Kind.FORWARD, rounds * pieces.num_stages + place, chunk
  )


def _backward(pieces: dependencies.Pieces, n: int) -> operation.Operation:
  """Returns the n-th backward operation: the same, the last chunk first."""
  op = _forward(pieces, n)
  return operation.Operation(
    _Kind.BACKWARD, op.microbatch, pieces.num_chunks - 1 - op.chunk
  )
