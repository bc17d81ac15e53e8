"""Says what weights of few bits cost a run: bytes, errors, and the loss.

tools/served_weights --job_log_dir=RUN           int8 and int4
tools/served_weights --job_log_dir=RUN --write   and writes the documentation

Nothing is written into the folder of the run.
"""

import argparse
from collections.abc import Mapping, Sequence
import dataclasses
import datetime
import os
import pathlib
import sys
from typing import Final

import jax

from paxon.quantization import recipes
from paxon.runner import run_dir as run_dirs
from paxon.runner import user_error
from paxon.runner.configuration import overrides, resolving
from paxon.runner.training import converting, stored_settings
from paxon.tools import page_sections

_ROOT: Final = pathlib.Path(__file__).parent.parent
_PAGE: Final = "docs/quantization.md"
_SECTION: Final = "tools/served_weights --write"
_HEADINGS: Final = (
  "Weights",
  "Bytes of all variables",
  "Largest error of a weight, of the largest",
  "Root mean square of errors, of that of the weights",
  "Loss",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figures:
  """What one format costs.

  Attributes:
    nbytes: Of all variables, before and after.
    largest: The largest error of a weight, as a share of the largest weight,
      of the worst parameter.
    mean: The root mean square of errors, as a share of that of the weights, of
      the worst parameter.
    losses: Before and after.
  """

  nbytes: tuple[int, int]
  largest: float
  mean: float
  losses: tuple[float, float]


def main(arguments: Sequence[str]) -> int:
  """Runs the command; returns the status of the process."""
  parser = argparse.ArgumentParser(
    prog="tools/served_weights",
    description="Makes weights of few bits of the newest checkpoint of a run,"
    " and compares bytes, values and the loss.",
  )
  parser.add_argument("--job_log_dir", required=True, help="of a trained run")
  parser.add_argument(
    "--weights",
    action="append",
    choices=recipes.NAMES,
    help="the recipe; may be given several times (default int8 and int4)",
  )
  parser.add_argument(
    "--split", default="validation", help="whose loss is shown"
  )
  parser.add_argument(
    "--write", action="store_true", help=f"write the table into {_PAGE}"
  )
  options = parser.parse_args(arguments)
  try:
    words, found = _measured(options)
  except user_error.UserError as error:
    print(user_error.one_line(error), file=sys.stderr)
    return 2
  text = f"{words}\n\n{to_table(found)}"
  print(text)
  if options.write:
    page_sections.write(_ROOT / _PAGE, _SECTION, text)
    print(f"wrote {_PAGE}")
  return 0


def to_table(found: Mapping[str, Figures]) -> str:
  """Returns the figures, by recipe, as a Markdown table."""
  rows = []
  for name, figures in found.items():
    before, after = figures.nbytes
    old, new = figures.losses
    if not rows:
      rows.append(("as trained", f"{before:,}", "-", "-", f"{old:.4f}"))
    rows.append(
      (
        name,
        f"{after:,} ({after / before:.1%})",
        f"{figures.largest:.2%}",
        f"{figures.mean:.2%}",
        f"{new:.4f} ({new / old - 1:+.2%})",
      )
    )
  lines = [_HEADINGS, ("---",) * len(_HEADINGS), *rows]
  return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _measured(
  options: argparse.Namespace,
) -> tuple[str, dict[str, Figures]]:
  """Returns the run in words, and what each format costs."""
  run_dir = run_dirs.existing(run_dirs.resolve(options.job_log_dir, os.environ))
  settings = stored_settings.complete(None, (), run_dir)
  given = [each for each in settings.overrides if each.path != "quantization"]
  found, step, before = {}, 0, None
  for name in options.weights or ["int8", "int4"]:
    argument = f"--{overrides.PREFIX}quantization={name}:convert"
    choice = overrides.parse_argument(argument)
    assert choice is not None
    resolved = resolving.resolve(settings.experiment, [*given, choice])
    job = resolving.build(resolved.config)
    if options.split not in job.eval_inputs:
      raise user_error.UserError(
        f"--split={options.split}: the splits that the run evaluates are"
        f" {', '.join(job.eval_inputs) or 'none'}."
      )
    conversion = converting.convert(job, run_dir)
    step = int(conversion.state.step)
    if before is None:
      before = conversion.losses_as_trained()[options.split]
    after = conversion.losses_served()[options.split]
    found[name] = _figures(conversion, (before, after))
  words = (
    f"{settings.experiment.rpartition('.')[2]} after {step} steps; loss of"
    f" {options.split}; {datetime.date.today()}, jax {jax.__version__} on"
    f" {jax.devices()[0].device_kind}."
  )
  return words, found


def _figures(
  conversion: converting.Conversion, losses: tuple[float, float]
) -> Figures:
  errors = conversion.errors.values()
  return Figures(
    nbytes=conversion.nbytes,
    largest=max(error.largest for error in errors),
    mean=max(error.mean for error in errors),
    losses=losses,
  )


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
