r"""What a warm start would do, without training and without reading arrays.

The model comes from an experiment or from another checkpoint:

  preview SOURCE --exp=a.b.C --pattern='params/encoder/(.*)=>params/decoder/\1'
  preview SOURCE --to=RUN[@STEP] --pattern='params/head/.*=>'
  preview --exp=a.b.C            the warm start that the experiment itself has
"""

import argparse
from collections.abc import Iterable, Sequence
import dataclasses
import os
from typing import Any

from paxon.runner import run_dir, user_error
from paxon.runner.checkpoints import (
  stored_checkpoint,
  warm_start_plan,
  warm_start_preview,
)
from paxon.runner.configuration import overrides, resolving
from paxon.runner.settings import training
from paxon.tools import ckpt_arguments

_ARROW = "=>"
# Fields of `WarmStart` that are true or false.
_SWITCHES = {
  "averaged": "read what the source evaluates with",
  "cast": "allow another floating-point dtype",
  "training_state": "read the step and the optimizer's state too",
}


def main(argv: Sequence[str]) -> int:
  """Prints a preview and returns the exit status.

  Args:
    argv: The arguments of the command.

  Raises:
    user_error.UserError: Something in them is wrong, or the source does not
      fit the model.
  """
  given, rest = [], []
  for argument in argv:
    override = overrides.parse_argument(argument)
    if override is None:
      rest.append(argument)
    else:
      given.append(override)
  arguments = _parser().parse_args(rest)
  if (arguments.exp is None) == (arguments.to is None):
    raise user_error.UserError(
      "preview needs the model that would be started: either --exp=a.b.C or"
      " --to=RUN."
    )
  if given and arguments.exp is None:
    raise user_error.UserError(f"{given[0]} is for --exp, which is not given.")
  start = None
  if arguments.to is not None:
    targets = list(ckpt_arguments.find(arguments.to).arrays.values())
  else:
    targets, start = _of_experiment(arguments.exp, given)
  plan = _plan(arguments, targets, start)
  lines = warm_start_preview.summary(plan)
  if arguments.all:
    lines += ["", *warm_start_preview.table(plan)]
  print("\n".join(lines))
  return 0


def _parser() -> ckpt_arguments.Parser:
  parser = ckpt_arguments.Parser(
    "preview", "Prints what a warm start would read; see docs/design/0007."
  )
  parser.add_argument(
    "source",
    metavar="SOURCE[@STEP]",
    nargs="?",
    help="where values come from; default: what the experiment says",
  )
  parser.add_argument(
    "--exp", help="the experiment; --fdl.NAME=VALUE sets more"
  )
  parser.add_argument("--to", metavar="RUN[@STEP]", help="names as in this one")
  parser.add_argument(
    "--pattern",
    action="append",
    metavar="REGEX=>TEMPLATE",
    help="in order; without a template initial values are left",
  )
  parser.add_argument(
    "--may_be_missing",
    action="append",
    metavar="REGEX",
    help="names that keep initial values where the source lacks them",
  )
  for name, help_text in _SWITCHES.items():
    parser.add_argument(f"--{name}", action="store_true", help=help_text)
  parser.add_argument("--all", action="store_true", help="a line for each name")
  return parser


def _of_experiment(
  name: str, given: Sequence[overrides.Override]
) -> tuple[list[Any], training.WarmStart | None]:
  """Returns the specs of a state, and the warm start of the experiment."""
  resolved = resolving.resolve(name, given, packages=("paxon.tasks",))
  # Names and shapes do not depend on the mesh, and this machine has no other.
  resolved.config.mesh = "data=-1"
  job = resolving.build(resolved.config)
  import jax

  from paxon.runner.training import session

  opened = session.open_session(job, devices=jax.devices()[:1])
  return jax.tree.leaves(opened.state_specs), job.warm_start


def _plan(
  arguments: argparse.Namespace,
  targets: Iterable[Any],
  start: training.WarmStart | None,
) -> warm_start_plan.Plan:
  """Returns the plan of the flags; what they leave out, `start` says."""
  fields: dict[str, Any] = {}
  if arguments.pattern is not None:
    fields["patterns"] = tuple(map(_pattern, arguments.pattern))
  if arguments.may_be_missing is not None:
    fields["may_be_missing"] = tuple(arguments.may_be_missing)
  for name in _SWITCHES:
    if getattr(arguments, name):
      fields[name] = True
  try:
    if arguments.source is not None:
      path, step = ckpt_arguments.parse_place(arguments.source)
      fields |= {"checkpoint": os.fspath(path), "step": step}
    if start is not None:
      start = dataclasses.replace(start, **fields)
    elif "checkpoint" in fields:
      start = training.WarmStart(**fields)
    else:
      raise user_error.UserError(
        "preview needs the SOURCE; the experiment has no warm start of its own."
      )
  except ValueError as error:
    raise user_error.UserError(str(error)) from error
  checkpoint = stored_checkpoint.find(
    run_dir.resolve(start.checkpoint, os.environ), step=start.step
  )
  return warm_start_plan.make(start, checkpoint=checkpoint, targets=targets)


def _pattern(text: str) -> tuple[str, str | None]:
  expression, arrow, template = text.partition(_ARROW)
  if not arrow:
    raise user_error.UserError(
      f"--pattern={text} has no {_ARROW}; write REGEX{_ARROW}TEMPLATE, or"
      f" REGEX{_ARROW} to leave initial values."
    )
  return expression.strip(), template.strip() or None
