"""Compares plans of an experiment for H200 in bfloat16 and in fp8.

tools/fp8_plans           the table; some minutes of compilation
tools/fp8_plans --write   and writes it into the documentation
"""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
import datetime
import pathlib
import subprocess
import sys
import tempfile
from typing import Final, NamedTuple

from paxon.runner.plan import result, units
from paxon.tools import page_sections

_ROOT: Final = pathlib.Path(__file__).parent.parent
_PAGE: Final = "docs/quantization.md"
_SECTION: Final = "tools/fp8_plans --write"
_EXPERIMENT: Final = "tasks.lm.params.lm_cloud.LmCloudSpmd2B"
_FP8, _CURRENT = "fp8", "fp8_current"


class Case(NamedTuple):
  """What is planned; `quantization` is a recipe, None for bfloat16."""

  target: str
  quantization: str | None


ONE: Final = "h200:1x1"
EIGHT: Final = "h200:1x8"
CASES: Final = (
  Case(ONE, None),
  Case(ONE, _FP8),
  Case(ONE, _CURRENT),
  Case(EIGHT, None),
  Case(EIGHT, _FP8),
)

Plans = Mapping[Case, result.Plan]


def main(arguments: Sequence[str]) -> int:
  """Plans and writes; returns the status of the process."""
  parser = argparse.ArgumentParser(
    prog="tools/fp8_plans",
    description="Compares plans for H200 in bfloat16 and in fp8.",
  )
  parser.add_argument("--exp", default=_EXPERIMENT, help="the experiment")
  parser.add_argument(
    "--write", action="store_true", help=f"write the table into {_PAGE}"
  )
  options = parser.parse_args(arguments)
  plans = {}
  for case in CASES:
    print(f"{case.target}, {case.quantization or 'bfloat16'} ...", flush=True)
    plans[case] = _planned(options.exp, case)
  text = to_markdown(plans, date=datetime.date.today())
  print(text)
  if options.write:
    page_sections.write(_ROOT / _PAGE, _SECTION, text)
    print(f"wrote {_PAGE}")
  return 0


def to_markdown(plans: Plans, *, date: datetime.date) -> str:
  """Returns the table of plans, and what it is.

  Args:
    plans: Of all `CASES`, each with a bound and an estimate.
    date: When they were made.
  """
  one = plans[Case(ONE, _FP8)]
  rows, length = one.batch["inputs"]
  lines: list[Sequence[str]] = [
    (
      "",
      *("One H200, bfloat16", "fp8", "Ratio"),
      *("Eight, `fsdp=8`, bfloat16", "fp8", "Ratio"),
    ),
    ("---",) * 7,
    *_rows(plans),
  ]
  table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
  by_dtype = one.flops.by_dtype
  narrow = sum(n for name, n in by_dtype.items() if name.startswith("float8"))
  current = _estimate(plans[Case(ONE, _CURRENT)]).step
  return (
    f"{one.experiment.rpartition('.')[2]}, {rows} rows of {length:,} tokens;"
    f" {date}, jax {one.versions['jax']}.\n\n{table}\n\n"
    f"{units.share(narrow / sum(by_dtype.values()))} of the FLOPs are in fp8."
    f" With `{_CURRENT}` the estimate of a step on one GPU is"
    f" {units.seconds(current)}."
  )


def _rows(plans: Plans) -> Iterator[Sequence[str]]:
  def row(
    words: str,
    figure: Callable[[result.Plan], float | int],
    unit: Callable[[float | int], str],
    *,
    ratio: bool = False,
  ) -> list[str]:
    cells = [words]
    for target in (ONE, EIGHT):
      before, after = (
        figure(plans[Case(target, name)]) for name in (None, _FP8)
      )
      cells += [unit(before), unit(after)]
      cells.append(f"{before / after:.2f}" if ratio else "")
    return cells

  yield row("Bound by the data sheet", _bound, units.seconds, ratio=True)
  step = row(
    "Estimate of a step", lambda p: _estimate(p).step, units.seconds, ratio=True
  )
  yield step
  yield row(
    "of that, in products", lambda p: _estimate(p).compute, units.seconds
  )
  yield row("in memory", lambda p: _estimate(p).memory, units.seconds)
  yield row(
    "waiting for links",
    lambda p: sum(_estimate(p).exposed.values()),
    units.seconds,
  )
  yield row("Gathered by a device", _gathered, _size)
  yield row("Peak of memory", lambda p: p.memory.peak or 0, _size)


def _bound(plan: result.Plan) -> float:
  assert plan.bound is not None
  return plan.bound.step


def _estimate(plan: result.Plan) -> result.Estimate:
  assert plan.estimate is not None
  return plan.estimate


def _gathered(plan: result.Plan) -> int:
  return sum(
    c.payload_bytes
    for c in plan.collectives
    if c.kind == "all-gather" or c.gathers
  )


def _size(number: float | int) -> str:
  return units.size(number) if number else "-"


def _planned(experiment: str, case: Case) -> result.Plan:
  """Plans in a process of its own; a plan that fails ends this one."""
  knobs = [f"--fdl.mesh=fsdp={8 if case.target == EIGHT else -1}"]
  if case.quantization is not None:
    knobs.append(f"--fdl.quantization={case.quantization}")
  with tempfile.TemporaryDirectory() as folder:
    subprocess.run(
      [
        *(sys.executable, "-m", "paxon.runner.main", f"--exp={experiment}"),
        *("--mode=plan", f"--target={case.target}", *knobs),
        f"--job_log_dir={folder}",
      ],
      stdout=subprocess.DEVNULL,
      check=True,
    )
    text = (pathlib.Path(folder) / "plan.json").read_text()
  (plan,) = result.from_json(text)
  return plan


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
