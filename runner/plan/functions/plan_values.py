"""Values of a plan by name, and limits in text such as `<70GiB`.

Tests of plans and comparisons of plans name the same values: the fields of
`FIELDS`, and the payload of collectives, `all-gather` or `all-gather over
fsdp`, of one device in a step.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import operator
import re
from typing import Final

from paxon.runner import units, user_error
from paxon.runner.plan import result, sections

# HLO opcodes.
KINDS: Final = (
  *("all-gather", "all-reduce", "reduce-scatter", "all-to-all"),
  *("collective-permute", "ragged-all-to-all", "collective-broadcast"),
)
_OVER: Final = " over "

COMPARISONS: Final[Mapping[str, Callable[[float, float], bool]]] = {
  "<=": operator.le,
  ">=": operator.ge,
  "<": operator.lt,
  ">": operator.gt,
}


@dataclasses.dataclass(frozen=True)
class Unit:
  """A unit of values.

  Attributes:
    scales: Factor of each unit in text.
    format: Text of a value.
  """

  scales: Mapping[str, float | int]
  format: Callable[[float], str]


_BYTES: Final = Unit(
  {"B": 1} | {f"{p}iB": 1024**n for n, p in enumerate("KMGTP", start=1)},
  units.size,
)
_SECONDS: Final = Unit({"s": 1, "ms": 1e-3, "us": 1e-6}, units.seconds)
_FLOPS: Final = Unit(
  {f"{p}FLOP": 1000**n for n, p in enumerate(("", *"KMGTPE"))}, units.flops
)


@dataclasses.dataclass(frozen=True)
class Value:
  """A value of a plan.

  Attributes:
    unit: Its unit.
    amount: None if it is unknown.
    causes: Contributions by name, as far as they are known.
  """

  unit: Unit
  amount: float | int | None
  causes: Mapping[str, float | int] = dataclasses.field(default_factory=dict)

  def __str__(self) -> str:
    if self.amount is None:
      return "unknown"
    return self.unit.format(self.amount)

  def explain(self, most: int = 6) -> list[str]:
    """Returns a line for each of the largest causes.

    Args:
      most: Number of lines.
    """
    ordered = sorted(self.causes.items(), key=lambda item: -item[1])
    known = [(name, size) for name, size in ordered if size]
    return [f"{self.unit.format(size)}  {name}" for name, size in known[:most]]


def _find_peak(plan: result.Plan) -> Value:
  return Value(
    _BYTES,
    plan.memory.peak,
    _list_arguments(plan) | _list_temporaries(plan),
  )


def _find_arguments(plan: result.Plan) -> Value:
  memory = plan.memory
  found = memory.arguments
  if found is None:
    found = memory.state_and_batch
  return Value(_BYTES, found, _list_arguments(plan))


def _find_temporaries(plan: result.Plan) -> Value:
  return Value(_BYTES, plan.memory.temporaries, _list_temporaries(plan))


def _list_arguments(plan: result.Plan) -> dict[str, float | int]:
  memory = plan.memory
  return {
    **{f"argument {name}": size for name, size in memory.inputs.items()},
    "parameters": memory.parameters,
    "other variables": memory.other_variables,
    "optimizer state": memory.optimizer,
    "batch": memory.batch,
  }


def _list_temporaries(plan: result.Plan) -> dict[str, float | int]:
  return {
    f"{each.count} x {each.type}, {each.module or 'no module'}:"
    f" {each.reason}": each.num_bytes
    for each in plan.memory.at_peak
  }


def _find_step(plan: result.Plan) -> Value:
  found = plan.estimate
  if found is None:
    return Value(_SECONDS, None)
  exposed = {
    f"exposed collectives over {axes or 'nothing'}": seconds
    for axes, seconds in found.exposed.items()
  }
  causes = {
    "matmuls": found.compute,
    "memory": found.memory,
    "kernel launch gaps": found.overhead,
  }
  return Value(_SECONDS, found.step, causes | exposed)


def _find_flops(plan: result.Plan) -> Value:
  # A loop whose trips the jaxpr does not have counts once there.
  executed = max(plan.flops.hardware, plan.compiled_flops or 0)
  by_module = {m or "no module": n for m, n in plan.flops.by_module.items()}
  return Value(_FLOPS, executed, by_module)


def _find_collectives(plan: result.Plan) -> Value:
  return sum_collectives(plan, plan.collectives)


FIELDS: Final[Mapping[str, tuple[Unit, Callable[[result.Plan], Value]]]] = {
  "peak": (_BYTES, _find_peak),
  "arguments": (_BYTES, _find_arguments),
  "temporaries": (_BYTES, _find_temporaries),
  "step": (_SECONDS, _find_step),
  "flops": (_FLOPS, _find_flops),
  "collectives": (_BYTES, _find_collectives),
}


def get_unit(name: str) -> Unit:
  """Returns the unit of a value.

  Args:
    name: A name of `FIELDS`, or `KIND` or `KIND over AXES` of collectives.

  Raises:
    UserError: There is no such value.
  """
  if name in FIELDS:
    return FIELDS[name][0]
  kind, over, axes = name.partition(_OVER)
  if kind not in KINDS or (over and not all(axes.split(","))):
    raise user_error.UserError(
      f"{name!r} is not a value of a plan; choose from {', '.join(FIELDS)}, or"
      f" a kind of collective ({', '.join(KINDS)}), alone or with mesh axes,"
      " such as 'all-gather over fsdp'."
    )
  return _BYTES


def find(name: str, plan: result.Plan) -> Value:
  """Returns a value of a plan.

  Args:
    name: As in `get_unit`. Collectives over `fsdp` include those over `fsdp`
      and further axes.
    plan: The plan.

  Raises:
    UserError: There is no such value.
  """
  get_unit(name)
  if name in FIELDS:
    return FIELDS[name][1](plan)
  kind, axes = _split(name)
  return sum_collectives(
    plan,
    [c for c in plan.collectives if c.kind == kind and axes <= set(c.axes)],
  )


def check_axes(name: str, plans: Sequence[result.Plan]) -> None:
  """Checks the axes of the name of a value.

  Args:
    name: As in `get_unit`.
    plans: Plans; each axis is one of a mesh of them.

  Raises:
    UserError: None of the meshes has such an axis.
  """
  known = dict.fromkeys(axis for plan in plans for axis in plan.mesh)
  if unknown := _split(name)[1] - set(known):
    raise user_error.UserError(
      f"{name!r}: no mesh axis {', '.join(sorted(unknown))} has more than one"
      f" device; the axes are {', '.join(known) or 'none'}."
    )


def _split(name: str) -> tuple[str, set[str]]:
  """Returns the kind and the axes of collectives."""
  kind, _, axes = name.partition(_OVER)
  return kind, set(filter(None, axes.split(",")))


def describe(each: result.Collectives) -> str:
  """Returns the kind and axes of collectives: `all-gather over fsdp`."""
  axes = ",".join(each.axes)
  return f"{each.kind}{_OVER}{axes}" if axes else each.kind


def sum_collectives(
  plan: result.Plan, found: Sequence[result.Collectives]
) -> Value:
  """Returns the payload of collectives, and that of each module.

  Args:
    plan: The plan.
    found: Some of its collectives.
  """
  causes: dict[str, float | int] = {}
  names = {describe(each) for each in found}
  for each in found:
    modules = each.module_bytes or {"": each.payload_bytes}
    for module, size in modules.items():
      name = module or "no module"
      if len(names) > 1:
        name = f"{describe(each)}, {name}"
      causes[name] = causes.get(name, 0) + size
  if not plan.compiled or sections.find_unread(plan):
    return Value(_BYTES, None)
  return Value(_BYTES, sum(each.payload_bytes for each in found), causes)


def parse_amount(text: str, unit: Unit) -> float | None:
  """Returns the amount of a text such as `1.5GiB`; None if it is none."""
  match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*", text)
  if match is None or match[2] not in unit.scales:
    return None
  return float(match[1]) * unit.scales[match[2]]
