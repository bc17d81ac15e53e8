"""Study of the optimizers of docs/optimizers.md on the quickstart.

  tools/python -m paxon.tools.sweeps.optimizer_study STUDY tune [OPTIMIZER ...]
  tools/python -m paxon.tools.sweeps.optimizer_study STUDY times
  tools/python -m paxon.tools.sweeps.optimizer_study STUDY write

`tune` changes the learning rate by factors of two until a larger and a smaller
one are worse, and trains two more seeds. `times` compares the time of steps;
nothing else may run. `write` trains three seeds for as long as AdamW trains,
and stores the results for docs/optimizers.md. Parts that are stored in the
folder STUDY, each a study of `tools/sweep`, are not run again; several `tune`
with different optimizers may share it.
"""

import argparse
from collections.abc import Callable, Sequence
import datetime
import json
import math
import os
import pathlib
import platform
import re
import statistics
import sys
from typing import Any

import fiddle as fdl
import jax

from paxon.learners.optimizers import optimizers_page
from paxon.runner import files, user_error
from paxon.sharding import suggestions
from paxon.tasks.lm.params import optimizers
from paxon.tools import command_line
from paxon.tools.benchmarks import decoder_lm_workload, timing
from paxon.tools.sweeps import sweep_main

_EXP = "tasks.lm.params.optimizers.PythonStdlibOptimizer"
_BASELINE = "AdamW"
_STEPS = 150
_ROUNDS = 3
# Times that differ less count as equal: AdamW against itself has 1.02.
_NOISE = 0.1
_METRIC = "validation/bits_per_byte"


def _sweep(
  study: pathlib.Path,
  name: str,
  part: str,
  knob: str,
  **fields: Any,
) -> dict[str, float]:
  """Runs or resumes one sweep.

  Args:
    study: Folder of the whole study.
    name: The optimizer.
    part: Folder of the sweep in that of the optimizer.
    knob: Name and values.
    **fields: Other knobs of all trials.

  Returns:
    Bits per byte of held-out files by the knob's value.
  """
  folder = study / _slug(name) / part
  knobs = {
    "optimizer_name": name,
    "eval_every_steps": fields.get("num_train_steps", _STEPS),
    "num_train_steps": _STEPS,
    "generation": None,
    "baselines": None,
    **fields,
  }
  argv = [f"{folder}", f"--exp={_EXP}", f"--knob={knob}", "--algorithm=grid"]
  argv += [f"--metric={_METRIC}"]
  argv += [f"--fdl.{key}={value}" for key, value in knobs.items()]
  if sweep_main.main(argv):
    raise user_error.UserError(f"{name}: the sweep in {folder} failed.")
  results = {}
  for stored in sorted((folder / "results").glob("*.json")):
    result = json.loads(stored.read_text())
    (value,) = result["point"].values()
    results[value] = result["value"]
  return results


def _check_rates(study: pathlib.Path) -> None:
  """Stores the learning rates of which a study tries factors, or compares.

  Raises:
    UserError: The study began with others.
  """
  rates = {name: choice.rate for name, choice in optimizers.CHOICES.items()}
  stored = study / "rates.json"
  if not stored.exists():
    study.mkdir(parents=True, exist_ok=True)
    files.write_text(os.fspath(stored), json.dumps(rates, indent=1))
  elif changed := json.loads(stored.read_text()).items() ^ rates.items():
    raise user_error.UserError(
      f"{study} has tried factors of other learning rates than those of"
      f" tasks.lm.params.optimizers ({min(changed)[0]}); use a new folder."
    )


def _slug(name: str) -> str:
  return re.sub(r"\W+", "-", name.lower())


def measure_steps(study: pathlib.Path) -> dict[str, float]:
  """Returns the time of each optimizer's step over AdamW's."""
  stored = study / "times.json"
  if stored.exists():
    return json.loads(stored.read_text())
  baseline = _start(_BASELINE)
  found = {}
  for name in optimizers.CHOICES:
    pairs = timing.interleave(_start(name), baseline, rounds=_ROUNDS)
    found[name] = statistics.median(pairs.ratios())
  study.mkdir(parents=True, exist_ok=True)
  files.write_text(os.fspath(stored), json.dumps(found, indent=1))
  return found


def _start(name: str) -> Callable[[], object]:
  """Returns a call of ten steps, in which what is not in each happens once."""
  experiment = optimizers.PythonStdlibOptimizer().replace(optimizer_name=name)
  job = fdl.build(experiment.job())
  steps = decoder_lm_workload.compile_ours(job, devices=jax.devices()[:1])
  return steps.start(count=10)


def tune(study: pathlib.Path, name: str) -> tuple[float, float]:
  """Returns the best factor of the rate and its bits per byte, with seed 0."""
  found = {
    float(factor): value
    for factor, value in _sweep(
      study, name, "rates", "rate_factor=0.5,1.0,2.0"
    ).items()
  }
  while True:
    best = min(found, key=found.__getitem__)
    edge = {min(found): best / 2, max(found): best * 2}.get(best)
    if edge is None:
      return best, found[best]
    (found[edge],) = _sweep(
      study, name, f"rates-{edge:g}", f"rate_factor={edge:g}"
    ).values()


def train_seeds(study: pathlib.Path, name: str) -> tuple[float, list[float]]:
  """Returns the best factor of the rate, and bits per byte of three seeds."""
  factor, value = tune(study, name)
  others = _sweep(study, name, "seeds", "seed=1,2", rate_factor=factor)
  return factor, [value, *others.values()]


def run(study: pathlib.Path, name: str) -> dict[str, Any]:
  """Runs what is missing; returns the optimizer's row of the table."""
  factor, bits = train_seeds(study, name)
  ratio = measure_steps(study)[name]
  steps, same_time = _STEPS, bits
  if abs(ratio - 1) > _NOISE:
    steps = round(_STEPS / ratio)
    same_time = list(
      _sweep(
        study,
        name,
        "same-time",
        "seed=0,1,2",
        rate_factor=factor,
        num_train_steps=steps,
      ).values()
    )
  return {
    "rate": float(f"{factor * optimizers.CHOICES[name].rate:.3g}"),
    "bits_per_byte": [_round(each) for each in bits],
    "step_over_adamw": round(ratio, 3),
    "same_time_steps": steps,
    "same_time_bits_per_byte": [_round(each) for each in same_time],
  }


def _round(value: float) -> float | None:
  return round(value, 4) if math.isfinite(value) else None


def _write(study: pathlib.Path) -> None:
  rows = {name: run(study, name) for name in optimizers.CHOICES}
  found = {
    "steps": _STEPS,
    "date": f"{datetime.date.today():%Y-%m-%d}",
    "versions": f"jax {jax.__version__}, Python {platform.python_version()}",
    "optimizers": rows,
  }
  files.write_text(
    os.fspath(optimizers_page.STUDY), json.dumps(found, indent=1) + "\n"
  )


def main(argv: Sequence[str]) -> int:
  """Runs a part of the study; returns the exit status."""
  parser = command_line.Parser("optimizer_study", __doc__ or "")
  parser.prog = "optimizer_study"
  parser.formatter_class = argparse.RawDescriptionHelpFormatter
  parser.add_argument("study", type=pathlib.Path, metavar="STUDY")
  parser.add_argument("part", choices=("tune", "times", "write"))
  parser.add_argument("names", nargs="*", metavar="OPTIMIZER")
  try:
    given = parser.parse_args(list(argv))
    if unknown := set(given.names) - set(optimizers.CHOICES):
      raise user_error.UserError(
        f"OPTIMIZER must be one of docs/optimizers.md, got {min(unknown)!r}"
        f"{suggestions.suggest(min(unknown), optimizers.CHOICES)}"
      )
    _check_rates(given.study)
    if given.part == "times":
      print(measure_steps(given.study))
    elif given.part == "write":
      _write(given.study)
    else:
      for name in given.names or optimizers.CHOICES:
        print(f"{name}: {train_seeds(given.study, name)}", flush=True)
  except user_error.UserError as error:
    print(user_error.one_line(error), file=sys.stderr)
    return command_line.WRONG_USE
  return 0


if __name__ == "__main__":
  command_line.run(main)
