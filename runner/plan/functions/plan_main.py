"""`paxon-plan`: plans functions and compares plans, on the command line."""

import argparse
from collections.abc import Callable, Mapping, Sequence
import importlib
import inspect
import os
import pathlib
import sys
from typing import Any, Final, NoReturn

import jax

from paxon.runner import interrupts, user_error
from paxon.runner.plan import plan_page, report, result
from paxon.runner.plan import target as targets
from paxon.runner.plan.functions import function_plan, plan_comparison

_EXCEEDED: Final = 1
# Of the trainer, which the wheel paxon-plan lacks.
_HUGGING_FACE: Final = "paxon.tools.hugging_face.hf_plan"


class _Parser(argparse.ArgumentParser):
  """A parser that raises `UserError`."""

  def error(self, message: str) -> NoReturn:
    raise user_error.UserError(f"{message} (see {self.prog} --help)")


def main(argv: Sequence[str]) -> int:
  """Runs a command.

  Returns:
    The exit status: 1 if the function fits on none of the targets or a limit is
    exceeded, 2 for a usage error.
  """
  if argv and argv[0] in ("hf", "--hf"):
    return _plan_hugging_face(argv[1:])
  try:
    given = _make_parser().parse_args(argv)
    command: Callable[[argparse.Namespace], int] = given.command
    return command(given)
  except (user_error.UserError, OSError) as error:
    print(user_error.one_line(error), file=sys.stderr)
    return user_error.UserError.status


def _plan_hugging_face(argv: Sequence[str]) -> int:
  """Plans the training of a model of Hugging Face, if the trainer is here."""
  try:
    module = importlib.import_module(_HUGGING_FACE)
  except ModuleNotFoundError as error:
    print(
      f"paxon-plan hf needs the trainer ({error}): pip install 'paxon[plan]'"
      " instead of paxon-plan.",
      file=sys.stderr,
    )
    return user_error.UserError.status
  jax.config.update("jax_platforms", "cpu")
  return module.main(argv)


def _make_parser() -> argparse.ArgumentParser:
  parser = _Parser(
    prog="paxon-plan",
    description="Plans of JAX functions for hardware you don't have."
    " `paxon-plan hf CONFIG.json --target=...` plans the training of a"
    " Hugging Face model.",
    allow_abbrev=False,
  )
  commands = parser.add_subparsers(required=True, metavar="COMMAND")
  run = commands.add_parser(
    "run",
    help="plan a function",
    description="Plans a function: memory, communication and time.",
    allow_abbrev=False,
  )
  run.add_argument(
    "factory",
    metavar="MODULE:FACTORY",
    help="function without arguments that returns (function, *arguments), or"
    " a dict of 'function', 'arguments' and keywords of paxon.plan",
  )
  run.add_argument(
    "--target", required=True, help="such as h200:1x8, or several: h200:1x8,cpu"
  )
  run.add_argument(
    "--mesh", help="size of each axis, such as fsdp=8,dcn.data=2"
  )
  run.add_argument("--donate", help="indices or names of donated arguments")
  run.add_argument("--json", type=pathlib.Path, help="file for the plans")
  run.add_argument("--html", type=pathlib.Path, help="file for a page")
  run.set_defaults(command=_run)
  diff = commands.add_parser(
    "diff",
    help="compare two plans",
    description="Prints what changed between two files of `run --json`.",
    allow_abbrev=False,
  )
  diff.add_argument("base", type=pathlib.Path, metavar="BASE.json")
  diff.add_argument("head", type=pathlib.Path, metavar="HEAD.json")
  diff.add_argument(
    "--fail_if",
    metavar="LIMITS",
    help="exit with status 1 if a value grows by more, such as"
    " 'peak>+5%%,all-gather>+1GiB'",
  )
  diff.add_argument("--markdown", action="store_true", help="print Markdown")
  diff.set_defaults(command=_diff)
  return parser


def _run(given: argparse.Namespace) -> int:
  try:
    parsed = targets.parse_all(given.target)
  except ValueError as error:
    raise user_error.UserError(str(error)) from error
  names = [target.text for target in parsed]
  keywords: dict[str, Any] = {}
  if given.mesh is not None:
    keywords["mesh"] = _parse_mesh(given.mesh)
  if given.donate is not None:
    keywords["donate"] = [
      int(each) if each.isdecimal() else each
      for each in given.donate.split(",")
    ]
  _use_cpu(max(target.num_devices for target in parsed))
  function, arguments, own = _call_factory(given.factory)
  plans: list[function_plan.FunctionPlan] = []
  failures: list[result.Failure] = []
  for name in names:
    try:
      found = function_plan.plan(
        function, *arguments, **own | keywords | {"target": name}
      )
    except user_error.UserError as error:
      message = user_error.one_line(error)
      failures.append(result.Failure(target=name, message=message))
      continue
    plans.append(found)
    print(found, flush=True)
  if not plans:
    texts = dict.fromkeys(failure.message for failure in failures)
    raise user_error.UserError("; ".join(texts))
  if len(names) > 1:
    print(report.to_table(plans, failures))
  if given.json is not None:
    given.json.write_text(result.to_json(plans, failures))
  if given.html is not None:
    given.html.write_text(plan_page.to_html(plans, failures))
  fits = [plan.memory.fit is not result.Fit.DOES_NOT_FIT for plan in plans]
  return 0 if any(fits) else 1


def _use_cpu(num_devices: int) -> None:
  """Lets JAX show CPU devices, as many as the largest target has.

  Functions may build their mesh of all devices. Accelerators of this machine
  are not needed, and those that others use are slow to start.
  """
  if "JAX_PLATFORMS" not in os.environ:
    jax.config.update("jax_platforms", "cpu")
  if "JAX_NUM_CPU_DEVICES" not in os.environ:
    jax.config.update("jax_num_cpu_devices", num_devices)


def _parse_mesh(text: str) -> dict[str, int]:
  sizes = {}
  for part in text.split(","):
    axis, _, size = part.partition("=")
    if not axis or not size.removeprefix("-").isdecimal():
      raise user_error.UserError(
        f"--mesh={text!r}: write the size of each axis, such as"
        " fsdp=8,dcn.data=2."
      )
    sizes[axis] = int(size)
  return sizes


def _call_factory(
  text: str,
) -> tuple[Callable[..., Any], Sequence[Any], dict[str, Any]]:
  """Returns a function, its arguments and keywords of `plan`."""
  module, _, name = text.partition(":")
  if not module or not name:
    raise user_error.UserError(
      f"{text!r} is not MODULE:FACTORY, such as train:make_step."
    )
  try:
    factory = getattr(importlib.import_module(module), name)
  except (ModuleNotFoundError, AttributeError) as error:
    raise user_error.UserError(f"{text}: {error}") from error
  try:
    made = factory()
  except TypeError as error:
    raise user_error.UserError(
      f"{text} must be callable without arguments: {error}"
    ) from error
  if isinstance(made, Mapping) and callable(made.get("function")):
    keywords = dict(made)
    function = keywords.pop("function")
    arguments = keywords.pop("arguments", ())
    known = inspect.signature(function_plan.plan).parameters
    wrong = [key for key in keywords if key not in known]
    if wrong or not isinstance(arguments, tuple | list):
      raise user_error.UserError(
        f"{text}: {wrong[0]!r} is not a keyword of paxon.plan."
        if wrong
        else f"{text}: 'arguments' must be a tuple or list."
      )
    return function, arguments, keywords
  if isinstance(made, Sequence) and made and callable(made[0]):
    return made[0], made[1:], {}
  raise user_error.UserError(
    f"{text} must return (function, *arguments), or a dict with 'function' and"
    f" 'arguments', but returned {type(made).__name__}."
  )


def _diff(given: argparse.Namespace) -> int:
  limits = []
  if given.fail_if is not None:
    limits = plan_comparison.parse_limits(given.fail_if)
  base, head = (_read(path) for path in (given.base, given.head))
  compared = plan_comparison.compare(base, head, limits)
  for each in compared:
    print(each.to_markdown() if given.markdown else each.to_text())
  return _EXCEEDED if any(each.excesses for each in compared) else 0


def _read(path: pathlib.Path) -> tuple[result.Plan, ...]:
  try:
    return result.from_json(path.read_text())
  except (ValueError, KeyError, TypeError, AttributeError) as error:
    raise user_error.UserError(
      f"{path} is not a file of plans: {error}"
    ) from error


if __name__ == "__main__":
  interrupts.run_program(main)
