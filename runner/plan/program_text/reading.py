"""All that a plan reads from the text of a compiled training step."""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import math
from typing import Final, TypeVar

from paxon.runner.plan.program_text import (
  collectives,
  costs,
  hlo,
  lints,
  movements,
)
from paxon.sharding import axes


@dataclasses.dataclass(frozen=True)
class Reading:
  """Parsed contents of a compiled program.

  Attributes:
    communication: All collectives and kernels.
    hbm_bytes: Read and written by one device.
    compiled_flops: FLOPs of matmuls, of all devices; None if the FLOPs of a
      kernel are not known.
    notes: Unknown facts, one sentence each.
    warnings: Avoidable costs.
    is_communication_known: Whether the collectives could be read.
  """

  communication: collectives.Communication
  hbm_bytes: int | None = None
  compiled_flops: int | None = None
  notes: tuple[str, ...] = ()
  warnings: tuple[str, ...] = ()
  is_communication_known: bool = True


# In the note on a reader that fails.
COULD_NOT_READ: Final = "could not be read"

_T = TypeVar("_T")

NOTHING = Reading(
  collectives.Communication((), {}, ()), is_communication_known=False
)


def read(
  program: hlo.Program,
  *,
  mesh: Mapping[str, int],
  dcn: Sequence[str],
  batch_axes: Sequence[str],
  platform: str,
  traced: Mapping[str, int],
) -> Reading:
  """Reads a compiled training step.

  Args:
    program: The program of one device.
    mesh: Size of each mesh axis, in the order of the mesh.
    dcn: The mesh axes between slices.
    batch_axes: The mesh axes over which the batch is split.
    platform: `cpu`, `cuda` or `tpu`.
    traced: FLOPs of the jaxpr by part of the model, of all devices.

  Returns:
    Its parsed contents.
  """
  notes: list[str] = []
  communication = attempt(
    "Communication",
    lambda: collectives.find(program, mesh=mesh, dcn=dcn),
    NOTHING.communication,
    notes,
  )
  is_known = not notes
  notes += communication.notes
  total = attempt("FLOPs", lambda: costs.read(program), None, notes)
  notes += total.notes if total else ()
  moved = attempt(
    "Data of collectives",
    lambda: movements.find(program, communication),
    (),
    notes,
  )
  # A planned function need not have a batch; then none is split.
  if moved is None and batch_axes:
    notes.append(
      "The data moved by collectives is unknown: no parameter of the program is"
      " named as the batch."
    )
  if total is None:
    return Reading(
      communication,
      notes=tuple(notes),
      is_communication_known=is_known,
    )
  subject = lints.Subject(
    program=program,
    moved=moved or (),
    total=total,
    kernels=communication.kernels,
    batch_axes=batch_axes,
    platform=platform,
  )
  warnings = attempt("Warnings", lambda: lints.check(subject), (), notes)
  compiled_flops = None
  if total.unknown:
    notes.append(
      f"The FLOPs of {', '.join(total.unknown)} are not known, so those of the"
      " compiled program are not compared with what was traced."
    )
  else:
    num_devices = math.prod(mesh.values())
    compiled_flops = num_devices * total.flops
    parts = {p: num_devices * n for p, n in total.count_by_part().items()}
    more = lints.recomputation(
      parts, traced, stages=mesh.get(axes.STAGE, 1), platform=platform
    )
    warnings = (*warnings, *([] if more is None else [more]))
  return Reading(
    communication=communication,
    hbm_bytes=total.hbm_bytes,
    compiled_flops=compiled_flops,
    notes=tuple(notes),
    warnings=warnings,
    is_communication_known=is_known,
  )


def attempt(
  what: str, read: Callable[[], _T], default: _T, notes: list[str]
) -> _T:
  """Returns the result of a reader; if it fails, adds a note instead.

  A new compiler may print what no reader knows. That costs the results of one
  reader, not those of the compilation.

  Args:
    what: Subject of the note, with which it begins.
    read: The reader.
    default: Returned if it fails.
    notes: Where the note goes.
  """
  try:
    return read()
  except Exception as error:
    text = str(error).splitlines() or [""]
    notes.append(
      f"{what} {COULD_NOT_READ}: {type(error).__name__}: {text[0][:200]}"
    )
    return default
