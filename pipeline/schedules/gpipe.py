"""GPipe: all microbatches forward, then all backward.

Huang et al. 2018, https://arxiv.org/abs/1811.06965. Every stage keeps what all
microbatches need for the backward pass.
"""

from paxon.pipeline.schedules import dependencies, operation, table

_Kind = operation.Kind


def make(*, num_stages: int, num_microbatches: int) -> table.Table:
  """Returns the table.

  Args:
    num_stages: P.
    num_microbatches: M.
  """
  check_microbatches(num_microbatches)
  order = [
    operation.Operation(kind, i)
    for kind in (_Kind.FORWARD, _Kind.BACKWARD)
    for i in range(num_microbatches)
  ]
  return table.from_orders(
    [order] * num_stages,
    name="GPipe",
    pieces=dependencies.Pieces(num_stages=num_stages),
  )


def check_microbatches(num_microbatches: int, *, at_least: int = 1) -> None:
  """Raises ValueError where there are too few microbatches.

  Args:
    num_microbatches: M.
    at_least: What the schedule needs.
  """
  if num_microbatches < at_least:
    raise ValueError(
      f"num_microbatches must be at least {at_least}, got {num_microbatches}."
    )
