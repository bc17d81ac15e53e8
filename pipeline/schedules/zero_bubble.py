"""Zero-bubble schedules: gradients of weights fill what would be bubbles.

Qi et al. 2023, https://arxiv.org/abs/2401.10241 (ZB-H1), and 2024,
https://arxiv.org/abs/2405.15362 (the V placement). The gradient of a piece's
input is computed first and sent; that of its weights can wait until the stage
has nothing else to do.

`make_v` places two half-size chunks on each stage and lets every stage take, at
each tick, the most urgent thing that is ready. That is not the papers' own
heuristic: a small bubble remains, which the simulation shows.
"""

from paxon.pipeline.schedules import dependencies, gpipe, operation, table

_Kind = operation.Kind
_Operation = operation.Operation


def make_h1(*, num_stages: int, num_microbatches: int) -> table.Table:
  """Returns ZB-H1: 1F1B's memory, a third of its bubble at equal costs.

  Args:
    num_stages: P.
    num_microbatches: M; at least P.
  """
  gpipe.check_microbatches(num_microbatches, at_least=num_stages)
  orders = []
  for stage in range(num_stages):
    counts = dict.fromkeys(_Kind, 0)
    order: list[operation.Operation] = []

    def run(
      *kinds: operation.Kind,
      counts: dict[operation.Kind, int] = counts,
      order: list[operation.Operation] = order,
    ) -> None:
      for kind in kinds:
        if counts[kind] < num_microbatches:
          order.append(_Operation(kind, counts[kind]))
          counts[kind] += 1

    run(*[_Kind.FORWARD] * (num_stages - stage))
    for _ in range(stage):
      run(_Kind.INPUT_GRADIENT, _Kind.FORWARD)
    while counts[_Kind.WEIGHT_GRADIENT] < num_microbatches:
      run(_Kind.INPUT_GRADIENT, _Kind.WEIGHT_GRADIENT, _Kind.FORWARD)
    orders.append(order)
  return table.from_orders(
    orders, name="ZB-H1", pieces=dependencies.Pieces(num_stages=num_stages)
  )


def make_v(*, num_stages: int, num_microbatches: int) -> table.Table:
  """Returns ZB-V: at most 2 P half-size chunks in flight on each stage.

  Args:
    num_stages: P.
    num_microbatches: M; at least P.
  """
  gpipe.check_microbatches(num_microbatches, at_least=num_stages)
  scheduler = _VScheduler(num_stages, num_microbatches)
  return scheduler.run()


class _VScheduler:
  """Takes the most urgent ready operation of each stage, tick by tick."""

  def __init__(self, num_stages: int, num_microbatches: int):
    self._pieces = dependencies.Pieces(
      num_stages=num_stages, num_chunks=2, placement=operation.Placement.V
    )
    self._num_microbatches = num_microbatches
    self._cap = 2 * num_stages
    # By (kind, chunk, stage): how many microbatches have begun.
    self._begun: dict[tuple[operation.Kind, int, int], int] = {}
    self._tick_of: dict[tuple[int, operation.Operation], int] = {}

  def run(self) -> table.Table:
    stages = range(self._pieces.num_stages)
    left = self._pieces.num_stages * self._num_microbatches * 2 * 3
    ticks = []
    while left:
      row = [self._choose(stage, tick=len(ticks)) for stage in stages]
      for stage, op in enumerate(row):
        if op is not None:
          key = (op.kind, op.chunk, stage)
          self._begun[key] = self._begun.get(key, 0) + 1
          self._tick_of[stage, op] = len(ticks)
          left -= 1
      ticks.append(tuple(() if op is None else (op,) for op in row))
    return table.Table(
      name="ZB-V",
      pieces=self._pieces,
      num_microbatches=self._num_microbatches,
      ticks=tuple(ticks),
    )

  def _choose(self, stage: int, *, tick: int) -> operation.Operation | None:
    """The gradients others wait for, then forward, then weights."""
    candidates = [
      (_Kind.INPUT_GRADIENT, 1),
      (_Kind.INPUT_GRADIENT, 0),
      (_Kind.FORWARD, 1),
      (_Kind.FORWARD, 0),
      (_Kind.WEIGHT_GRADIENT, 1),
      (_Kind.WEIGHT_GRADIENT, 0),
    ]
    for kind, chunk in candidates:
      i = self._count(kind, chunk, stage)
      op = _Operation(kind, i, chunk)
      if (
        i < self._num_microbatches
        and self._is_ready(op, stage, tick=tick)
        and (kind is not _Kind.FORWARD or self._has_room(chunk, stage))
      ):
        return op
    return None

  def _count(self, kind: operation.Kind, chunk: int, stage: int) -> int:
    return self._begun.get((kind, chunk, stage), 0)

  def _is_ready(
    self, op: operation.Operation, stage: int, *, tick: int
  ) -> bool:
    return all(
      self._tick_of.get(need, tick) < tick
      for need in self._pieces.needed(op, stage=stage, kinds=_SPLIT)
    )

  def _has_room(self, chunk: int, stage: int) -> bool:
    """Whether one more fits, with those that will come back on chunk 1."""
    forward = [self._count(_Kind.FORWARD, c, stage) for c in (0, 1)]
    done = [self._count(_Kind.WEIGHT_GRADIENT, c, stage) for c in (0, 1)]
    in_flight = sum(forward) - sum(done)
    if chunk == 1:
      return in_flight < self._cap
    # Each that runs forward on chunk 0 comes back on chunk 1.
    coming_back = forward[0] - forward[1]
    return in_flight + coming_back + 2 <= self._cap


class _EverywhereSplit(dict[tuple[int, int, int], list[operation.Kind]]):
  """The backward pass of every piece is two operations."""

  def __missing__(self, key: tuple[int, int, int]) -> list[operation.Kind]:
    return [_Kind.FORWARD, _Kind.INPUT_GRADIENT, _Kind.WEIGHT_GRADIENT]


_SPLIT = _EverywhereSplit()
