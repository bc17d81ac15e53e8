"""Trains a model in bfloat16 and with each recipe, and compares the losses.

tools/quantization_quality --folder=DIR            trains what is missing there
tools/quantization_quality --folder=DIR --write    and writes the documentation

Every training is a run of its own, `DIR/<recipe>-seed<n>`, in a process of its
own. They are interleaved (all recipes with the first seed, then with the next),
so that what is there after an interruption can be compared. What is finished is
not trained again, and what was interrupted goes on.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
import datetime
import os
import pathlib
import subprocess
import sys
from typing import Final

import jax

from paxon.quantization import recipes as recipes_lib
from paxon.runner.monitoring import metrics_file
from paxon.tools import page_sections, quantization_quality

_ROOT: Final = pathlib.Path(__file__).parent.parent
_PAGE: Final = "docs/quantization.md"
_FIGURES: Final = "docs/quantization_quality.json"
_SECTION: Final = "tools/quantization_quality --write"
_RESULTS: Final = "results.json"
_EXPERIMENT: Final = "tasks.lm.params.quickstart.PythonStdlibLm"
_DEFAULT_RECIPES: Final = (
  "fp8",
  "fp8_current",
  "fp8_channel",
  "fp8_block",
  "int8",
  "int4",
)
# Under a third of the quickstart's own, and long enough to learn.
_STEPS: Final = 300

# Runs the command line of a training and returns its exit status.
Run = Callable[[Sequence[str]], int]


def main(arguments: Sequence[str], run: Run | None = None) -> int:
  """Runs the command.

  Args:
    arguments: Of the command line.
    run: What trains; by default a process of its own.

  Returns:
    The status of the process.
  """
  options = _parse(arguments)
  folder = pathlib.Path(options.folder)
  losses: dict[str, dict[int, float]] = {}
  for seed in options.seeds:
    for recipe in (quantization_quality.BASE, *options.recipes):
      path = folder / f"{recipe}-seed{seed}"
      loss = _finished(path, options)
      if loss is None:
        command = list(_command(options, path, recipe=recipe, seed=seed))
        print(" ".join(command), flush=True)
        if (run or _in_a_process)(command):
          print(f"{path} failed; the others are not trained.", file=sys.stderr)
          return 1
        loss = _finished(path, options)
      if loss is None:
        print(
          f"{path} has no {options.metric} of the split {options.split!r} at"
          f" step {options.steps}.",
          file=sys.stderr,
        )
        return 1
      print(f"{recipe}, seed {seed}: {options.metric} {loss:.4f}", flush=True)
      losses.setdefault(recipe, {})[seed] = loss
  results = quantization_quality.Results(
    experiment=options.exp,
    steps=options.steps,
    date=str(datetime.date.today()),
    hardware=f"jax {jax.__version__} on {_hardware()}",
    losses=losses,
  )
  (folder / _RESULTS).write_text(results.to_json())
  text = quantization_quality.to_markdown(results)
  print(text)
  if options.write:
    (_ROOT / _FIGURES).write_text(results.to_json())
    page_sections.write(_ROOT / _PAGE, _SECTION, text)
    print(f"wrote {_PAGE} and {_FIGURES}")
  return 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
  """Reads the arguments; ends the process where they are wrong."""
  parser = argparse.ArgumentParser(
    prog="tools/quantization_quality",
    description="Trains a model in bfloat16 and with each recipe, and compares"
    " the held-out losses.",
  )
  parser.add_argument("--folder", required=True, help="of the runs")
  parser.add_argument("--exp", default=_EXPERIMENT, help="the experiment")
  parser.add_argument(
    "--steps",
    type=int,
    default=_STEPS,
    help=f"of each training (default {_STEPS}, by which the quickstart has come"
    " to about 1.6 nats, and its learning rate to its end)",
  )
  parser.add_argument("--recipes", default=",".join(_DEFAULT_RECIPES))
  parser.add_argument("--seeds", default="1,2,3")
  parser.add_argument("--split", default="validation")
  parser.add_argument("--metric", default="loss")
  parser.add_argument(
    "--fdl",
    action="append",
    default=[],
    metavar="KNOB=VALUE",
    help="another knob of the experiment, for all trainings",
  )
  parser.add_argument(
    "--write", action="store_true", help=f"write the table into {_PAGE}"
  )
  options = parser.parse_args(arguments)
  if options.steps < 1:
    parser.error(f"--steps must be positive, got {options.steps}.")
  options.recipes = [name for name in options.recipes.split(",") if name]
  for name in options.recipes:
    try:
      recipes_lib.named(name)
    except ValueError as error:
      parser.error(f"--recipes: {error}")
  try:
    options.seeds = [int(seed) for seed in options.seeds.split(",")]
  except ValueError:
    parser.error(f"--seeds must be numbers with commas, got {options.seeds!r}.")
  if len(set(options.seeds)) < len(options.seeds):
    parser.error(f"--seeds has one twice: {options.seeds}.")
  return options


def _command(
  options: argparse.Namespace, path: pathlib.Path, *, recipe: str, seed: int
) -> Iterator[str]:
  """Yields the arguments of a training."""
  yield f"--exp={options.exp}"
  yield f"--job_log_dir={path}"
  yield f"--fdl.num_train_steps={options.steps}"
  yield f"--fdl.seed={seed}"
  # The recipes quantize what bfloat16 would multiply.
  yield "--fdl.dtype=bfloat16"
  if recipe != quantization_quality.BASE:
    yield f"--fdl.quantization={recipe}"
  for knob in options.fdl:
    yield f"--fdl.{knob}"


def _finished(path: pathlib.Path, options: argparse.Namespace) -> float | None:
  """Returns the loss of a run at its end; None if it is not there yet."""
  if not path.exists():
    return None
  for record in metrics_file.read_run(path):
    if (record.step, record.split) == (options.steps, options.split):
      return record.values.get(options.metric)
  return None


def _in_a_process(command: Sequence[str]) -> int:
  program = (sys.executable, "-m", "paxon.runner.main")
  return subprocess.run([*program, *command]).returncode


def _hardware() -> str:
  kind = jax.devices()[0].device_kind
  if jax.default_backend() != "cpu":
    return f"{jax.device_count()} x {kind}"
  # Its cores are what the figures took, not what they are.
  return f"{os.cpu_count()} CPU cores"


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
