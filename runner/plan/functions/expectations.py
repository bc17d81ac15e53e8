"""Expectations of plans, for tests.

def test_train_step_fits():
paxon.assert_plan(
step, state, batch, target="h200:1x8", mesh={"fsdp": 8},
peak="<70GiB", collectives={"all-gather over fsdp": "<12GiB"},
)
"""

from collections.abc import Callable, Mapping
import re
from typing import Any, Final

from paxon.runner import units, user_error
from paxon.runner.plan import result
from paxon.runner.plan.functions import function_plan, plan_values

NONE: Final = "none"


def assert_plan(
  function_or_plan: Callable[..., Any] | result.Plan,
  *args: Any,
  peak: str | None = None,
  arguments: str | None = None,
  temporaries: str | None = None,
  step: str | None = None,
  flops: str | None = None,
  collectives: Mapping[str, str] | str | None = None,
  fits: bool | None = None,
  **planning: Any,
) -> result.Plan:
  """Checks a plan; without expectations, only that it can be compiled.

  An expectation is a comparison and an amount, such as `<70GiB`, `>=1.5TiB`,
  `<250ms` or `<=3.2PFLOP`.

  Args:
    function_or_plan: A plan, or a function that is planned.
    *args: Arguments of the function.
    peak: Largest memory in use on one device.
    arguments: Memory of the arguments on one device.
    temporaries: Memory of a device that is in use only during the step.
    step: Estimated time.
    flops: Executed FLOPs on all devices.
    collectives: Payload on one device by kind, or by kind and mesh axes, such
      as `{"all-gather": "<12GiB", "all-reduce over data": "none"}`; or a text
      for all collectives together.
    fits: Whether the program must fit, or must not.
    **planning: Keywords of `plan`, such as `target`, `mesh` and `donate`.

  Returns:
    The plan.

  Raises:
    AssertionError: A value is not as expected, or nothing could be compiled.
    UserError: An expectation cannot be read, or the function not planned.
  """
  given = {
    "peak": peak,
    "arguments": arguments,
    "temporaries": temporaries,
    "step": step,
    "flops": flops,
  }
  expected = {name: text for name, text in given.items() if text is not None}
  if isinstance(collectives, Mapping):
    for name in collectives:
      if name in plan_values.FIELDS:
        raise user_error.UserError(
          f"collectives: {name!r} is not a kind of collective; write"
          f" {name}=... instead."
        )
    expected |= collectives
  elif collectives is not None:
    expected["collectives"] = collectives
  limits = {name: _parse(name, text) for name, text in expected.items()}
  plan = _get_plan(function_or_plan, args, planning)
  problems = _check_compiled(plan)
  if not problems:
    problems = [
      line
      for name, limit in limits.items()
      for line in _check(name, expected[name], limit, plan)
    ]
    problems += _check_fit(plan, fits)
  if problems:
    lines = [f"{plan.experiment} on {plan.target}:", *problems]
    raise AssertionError("\n  ".join(lines))
  return plan


def _get_plan(
  function_or_plan: Callable[..., Any] | result.Plan,
  args: tuple[Any, ...],
  planning: Mapping[str, Any],
) -> result.Plan:
  if not isinstance(function_or_plan, result.Plan):
    return function_plan.plan(function_or_plan, *args, **planning)
  if args or planning:
    raise user_error.UserError(
      "assert_plan of a plan takes only expectations, but got"
      f" {', '.join(planning) or 'arguments'}; give the function instead."
    )
  return function_or_plan


def _parse(name: str, text: str) -> Callable[[float], bool]:
  """Returns the test of a value."""
  unit = plan_values.get_unit(name)
  if not isinstance(text, str):
    raise user_error.UserError(
      f"{name}={text!r} must be text, such as '<70{list(unit.scales)[-3]}'."
    )
  if text == NONE:
    return lambda value: value == 0
  match = re.fullmatch(r"\s*([<>]=?)(.*)", text)
  amount = plan_values.parse_amount(match[2], unit) if match else None
  if match is None or amount is None:
    raise user_error.UserError(
      f"{name}={text!r}: write <, <=, > or >= and an amount in"
      f" {', '.join(unit.scales)}, such as '<70{list(unit.scales)[-3]}', or"
      " 'none'."
    )
  compare = plan_values.COMPARISONS[match[1]]
  limit: float = amount
  return lambda value: compare(value, limit)


def _check_compiled(plan: result.Plan) -> list[str]:
  """Returns why nothing was compiled; a program that does not fit was."""
  if plan.compiled or plan.memory.compiler_error is not None:
    return []
  return list(plan.notes[:1]) or ["Nothing was compiled."]


def _check(
  name: str,
  expected: str,
  is_met: Callable[[float], bool],
  plan: result.Plan,
) -> list[str]:
  """Returns the lines of a value that is not as expected."""
  plan_values.check_axes(name, [plan])
  value = plan_values.find(name, plan)
  if value.amount is not None and is_met(value.amount):
    return []
  causes = value.explain()
  if value.amount is None:
    error = plan.memory.compiler_error
    causes = [error] if error else list(plan.notes)
  return [f"{name}: {value}, expected {expected}", *(f"  {c}" for c in causes)]


def _check_fit(plan: result.Plan, fits: bool | None) -> list[str]:
  found = plan.memory.fit
  wanted = (result.Fit.FITS, result.Fit.TIGHT) if fits else ()
  if not fits:
    wanted = (result.Fit.DOES_NOT_FIT,)
  if fits is None or found in wanted:
    return []
  peak = plan_values.find("peak", plan)
  usable = plan.memory.usable
  limit = "unknown" if usable is None else units.size(usable)
  return [
    f"fits: {found.value}, expected {fits}; peak {peak}, usable {limit}",
    *(f"  {cause}" for cause in peak.explain()),
  ]
