"""Golden plans: a plan's values in a file, compared with later plans.

A file holds what follows from the program and not from the day: memory, FLOPs,
collectives by kind, axes and link, kernels, and whether it fits; and beside it,
not compared, when and with what it was made and how long that took. Figures may
differ by 2 %, so that a rounding of the compiler's does not matter and a weight
that is gathered once more does.
"""

from collections.abc import Iterator, Mapping
import dataclasses
import json
from typing import Any, Final

from paxon.runner.plan import result

# Relative; of counts as well.
TOLERANCE: Final = 0.02

_COMPILERS: Final = {
  "cpu": ("jaxlib",),
  "cuda": ("jaxlib", "jax-cuda13-plugin"),
  "tpu": ("jaxlib", "libtpu"),
}
_ABSENT: Final = "nothing"


@dataclasses.dataclass(frozen=True, kw_only=True)
class GoldenPlan:
  """The contents of a file.

  Attributes:
    experiment: Its name.
    target: The hardware.
    overrides: The assignments of the command line.
    figures: Compared numbers and texts, in mappings of mappings.
    versions: Of what decides the figures: jax and the compiler.
    date: When it was made, YYYY-MM-DD.
    compile_seconds: How long the compiler took.
    seconds: How long all took that `--mode=plan` does.
  """

  experiment: str
  target: str
  overrides: tuple[str, ...]
  figures: Mapping[str, Any]
  versions: Mapping[str, str]
  date: str
  compile_seconds: int | None
  seconds: int


def get_golden_values(
  plan: result.Plan, *, platform: str, date: str, seconds: float
) -> GoldenPlan:
  """Returns the values that golden tests compare.

  Args:
    plan: A compiled one.
    platform: Of its target: cpu, cuda or tpu.
    date: Today, YYYY-MM-DD.
    seconds: How long the whole plan took.

  Raises:
    ValueError: Nothing was compiled, so most figures are missing.
  """
  if not plan.compiled and plan.memory.compiler_error is None:
    raise ValueError(
      f"{plan.experiment} on {plan.target} was not compiled; golden plans are."
    )
  names = ("jax", *_COMPILERS[platform])
  compile_seconds = plan.compile_seconds
  return GoldenPlan(
    experiment=plan.experiment,
    target=plan.target,
    overrides=plan.overrides,
    figures=figures(plan),
    versions={name: plan.versions[name] for name in names},
    date=date,
    compile_seconds=None if compile_seconds is None else round(compile_seconds),
    seconds=round(seconds),
  )


def figures(plan: result.Plan) -> dict[str, Any]:
  """Returns the compared numbers and texts."""
  memory, flops = plan.memory, plan.flops
  found: dict[str, Any] = {
    "devices": plan.num_devices,
    "chips": plan.num_chips,
    "mesh": dict(plan.mesh),
    "memory": {
      "arguments": memory.arguments,
      "temporaries": memory.temporaries,
      "peak": memory.peak,
    },
    "fit": plan.fit,
    "flops": {
      "model": flops.model,
      "causal_model": None
      if flops.causal_model is None
      else round(flops.causal_model),
      "recomputed": flops.recomputed,
      "hardware": flops.hardware,
    },
    "collectives": {},
    "kernels": dict(plan.kernels),
  }
  for entry in plan.collectives:
    # Gathers that are written as all-reduces cost like these.
    kind = f"{entry.kind} (a gather)" if entry.gathers else entry.kind
    name = f"{kind} over {','.join(entry.axes) or 'nothing'}, {entry.link}"
    sums = found["collectives"].setdefault(name, {"count": 0, "bytes": 0})
    sums["count"] += entry.count
    sums["bytes"] += entry.payload_bytes
  return found


def differences(
  expected: Mapping[str, Any], found: Mapping[str, Any]
) -> list[str]:
  """Returns a line for each figure that has moved by more than 2 %.

  Args:
    expected: The figures of a file.
    found: The figures of a plan made today.
  """
  left, right = dict(_flat(expected)), dict(_flat(found))
  names = [*left, *(name for name in right if name not in left)]
  lines = []
  for name in names:
    old, new = left.get(name), right.get(name)
    if not _is_close(old, new):
      lines.append(
        f"{name}: {_format(old)} -> {_format(new)}{_change(old, new)}"
      )
  return lines


def to_json(plan: GoldenPlan) -> str:
  """Returns the text of a file."""
  text = json.dumps(dataclasses.asdict(plan), indent=1, sort_keys=True)
  return text + "\n"


def from_json(text: str) -> GoldenPlan:
  """Reads the text of a file."""
  fields = json.loads(text)
  return GoldenPlan(**fields | {"overrides": tuple(fields["overrides"])})


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[Any]:
  for name, value in tree.items():
    if isinstance(value, Mapping):
      yield from _flat(value, f"{prefix}{name} / ")
    else:
      yield prefix + name, value


def _is_close(old: Any, new: Any) -> bool:
  if isinstance(old, str) or isinstance(new, str) or None in (old, new):
    return old == new
  return abs(new - old) <= TOLERANCE * abs(old)


def _format(value: Any) -> str:
  if value is None:
    return _ABSENT
  return value if isinstance(value, str) else f"{value:,}"


def _change(old: Any, new: Any) -> str:
  if isinstance(old, str) or isinstance(new, str) or not old or new is None:
    return ""
  return f" ({100 * (new / old - 1):+.1f} %)"
