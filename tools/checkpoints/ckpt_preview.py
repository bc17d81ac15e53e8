r"""Preview of a warm start, without training and without reading arrays.

The model comes from an experiment or from another checkpoint:

  preview SOURCE --exp=a.b.C --pattern='params/encoder/(.*)=>params/decoder/\1'
  preview SOURCE --to=RUN[@STEP] --pattern='params/head/.*=>'
  preview --exp=a.b.C            the warm start that the experiment defines
"""

import argparse
from collections.abc import Iterable, Sequence
import dataclasses
import os
from typing import Any

import jax

from paxon.runner import run_dir, user_error
from paxon.runner.checkpoints import (
  stored_checkpoint,
  warm_start,
  warm_start_plan,
)
from paxon.runner.configuration import overrides, resolving
from paxon.runner.session import session
from paxon.runner.settings import training
from paxon.tools import command_line

_ARROW = "=>"
# Boolean fields of `WarmStart`.
_SWITCHES = {
  "averaged": "load the averaged (EMA) variables of the source",
  "cast": "allow a change of the floating-point dtype",
  "training_state": "load the step and the optimizer state, too",
}


def main(argv: Sequence[str]) -> int:
  """Prints a preview and returns the exit status.

  Raises:
    user_error.UserError: An argument is wrong, or the source does not match
      the model.
  """
  given, rest = overrides.split_arguments(argv)
  arguments = _parser().parse_args(rest)
  if (arguments.exp is None) == (arguments.to is None):
    raise user_error.UserError(
      "preview needs a model: pass either --exp=a.b.C or --to=RUN."
    )
  if given and arguments.exp is None:
    raise user_error.UserError(f"{given[0]} requires --exp.")
  start = None
  if arguments.to is not None:
    targets = list(command_line.find_checkpoint(arguments.to).arrays.values())
  else:
    targets, start = _read_experiment(arguments.exp, given)
  plan = _plan(arguments, targets, start)
  lines = warm_start.summarize(plan)
  if arguments.all:
    lines += ["", *warm_start.format_table(plan)]
  print("\n".join(lines))
  return 0


def _parser() -> command_line.Parser:
  parser = command_line.Parser(
    "preview", "Shows what a warm start would load; see docs/design/0007."
  )
  parser.add_argument(
    "source",
    metavar="SOURCE[@STEP]",
    nargs="?",
    help="checkpoint to load from; default: that of the experiment",
  )
  parser.add_argument(
    "--exp", help="experiment; --fdl.NAME=VALUE overrides its fields"
  )
  parser.add_argument(
    "--to", metavar="RUN[@STEP]", help="use the names of this checkpoint"
  )
  parser.add_argument(
    "--pattern",
    action="append",
    metavar="REGEX=>TEMPLATE",
    help="rename; the first match wins; an empty template keeps initial values",
  )
  parser.add_argument(
    "--may_be_missing",
    action="append",
    metavar="REGEX",
    help="names that keep initial values if the source lacks them",
  )
  for name, help_text in _SWITCHES.items():
    parser.add_argument(f"--{name}", action="store_true", help=help_text)
  parser.add_argument(
    "--all", action="store_true", help="print a line for each name"
  )
  return parser


def _read_experiment(
  name: str, given: Sequence[overrides.Override]
) -> tuple[list[Any], training.WarmStart | None]:
  """Returns the specs of a state, and the warm start of the experiment."""
  resolved = resolving.resolve(name, given, packages=("paxon.tasks",))
  # Names and shapes do not depend on the mesh, and this machine has no other.
  resolved.config.mesh = "data=-1"
  job = resolving.build(resolved.config)
  opened = session.open_session(job, devices=jax.devices()[:1])
  return jax.tree.leaves(opened.state_specs), job.warm_start


def _plan(
  arguments: argparse.Namespace,
  targets: Iterable[Any],
  start: training.WarmStart | None,
) -> warm_start_plan.Plan:
  """Returns the plan of the flags; `start` holds the defaults."""
  fields: dict[str, Any] = {}
  if arguments.pattern is not None:
    fields["patterns"] = tuple(map(_pattern, arguments.pattern))
  if arguments.may_be_missing is not None:
    fields["may_be_missing"] = tuple(arguments.may_be_missing)
  for name in _SWITCHES:
    if vars(arguments)[name]:
      fields[name] = True
  try:
    if arguments.source is not None:
      path, step = command_line.parse_place(arguments.source)
      fields |= {"checkpoint": os.fspath(path), "step": step}
    if start is not None:
      start = dataclasses.replace(start, **fields)
    elif "checkpoint" in fields:
      start = training.WarmStart(**fields)
    else:
      raise user_error.UserError(
        "preview needs a SOURCE, because the experiment defines no warm start."
      )
  except ValueError as error:
    raise user_error.UserError(str(error)) from error
  checkpoint = stored_checkpoint.find_checkpoint(
    run_dir.resolve(start.checkpoint, os.environ), step=start.step
  )
  (_, targets), *_ = warm_start_plan.split(start, targets)
  return warm_start_plan.make(start, checkpoint=checkpoint, targets=targets)


def _pattern(text: str) -> tuple[str, str | None]:
  expression, arrow, template = text.partition(_ARROW)
  if not arrow:
    raise user_error.UserError(
      f"--pattern={text} has no {_ARROW}; write REGEX{_ARROW}TEMPLATE, or"
      f" REGEX{_ARROW} to keep initial values."
    )
  return expression.strip(), template.strip() or None
