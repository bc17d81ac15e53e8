"""What must have run before an operation, and where."""

from collections.abc import Collection, Iterator, Mapping
import dataclasses

from paxon.pipeline.schedules import operation

_Operation = operation.Operation
_Kind = operation.Kind


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pieces:
  """How many virtual stages there are, and where they lie.

  Attributes:
    num_stages: Devices, or groups of them, in a row.
    num_chunks: Virtual stages on each.
    placement: Which are on which.
  """

  num_stages: int
  num_chunks: int = 1
  placement: operation.Placement = operation.Placement.LOOP

  def __post_init__(self) -> None:
    for name in ("num_stages", "num_chunks"):
      if getattr(self, name) <= 0:
        raise ValueError(f"{name} must be positive, got {getattr(self, name)}.")

  def virtual_stage(self, stage: int, *, chunk: int) -> int:
    """Returns the number of the virtual stage that a chunk of a stage is."""
    return self.placement.virtual_stage(
      stage, chunk=chunk, num_stages=self.num_stages
    )

  def home(self, virtual_stage: int) -> tuple[int, int]:
    """Returns the stage and the chunk that a virtual stage is."""
    stage = self.placement.stage(virtual_stage, num_stages=self.num_stages)
    return stage, virtual_stage // self.num_stages

  def needed(
    self,
    op: operation.Operation,
    *,
    stage: int,
    kinds: Mapping[tuple[int, int, int], Collection[operation.Kind]],
  ) -> Iterator[tuple[int, operation.Operation]]:
    """Yields the stage and operation of each that must have run before.

    Args:
      op: Runs on `stage`.
      stage: From 0.
      kinds: Which kinds a (stage, microbatch, chunk) has: recomputation is
        optional, and the backward pass is one operation or two.
    """
    i, c = op.microbatch, op.chunk
    k = self.virtual_stage(stage, chunk=c)
    own = kinds[stage, i, c]
    if op.kind is _Kind.FORWARD:
      if k > 0:
        before, chunk = self.home(k - 1)
        yield before, _Operation(_Kind.FORWARD, i, chunk)
      return
    if op.kind is _Kind.WEIGHT_GRADIENT:
      yield stage, _Operation(_Kind.INPUT_GRADIENT, i, c)
      return
    is_recomputed = _Kind.RECOMPUTE in own and op.kind is not _Kind.RECOMPUTE
    yield (
      stage,
      _Operation(_Kind.RECOMPUTE if is_recomputed else _Kind.FORWARD, i, c),
    )
    if op.kind is _Kind.RECOMPUTE:
      return
    if k + 1 < self.num_stages * self.num_chunks:
      after, chunk = self.home(k + 1)
      for kind in operation.INPUT_GRADIENT_KINDS:
        if kind in kinds[after, i, chunk]:
          yield after, _Operation(kind, i, chunk)
