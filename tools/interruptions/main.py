"""Interrupts training runs at random and compares their results.

  tools/chaos                  # 50 runs, about a quarter of an hour
  tools/chaos --runs=6 --seed=1
  tools/chaos --markdown=docs/interruptions.md

Each run is disturbed one to three times: by SIGKILL, SIGTERM, SIGINT, a newest
checkpoint that is truncated or has one bit flipped, or a full disk. The disk is
a tmpfs if mounting is permitted; otherwise large files are forbidden. The exit
status is 1 if a run lost a checkpoint or ended with other results.
"""

import argparse
from collections.abc import Sequence
from concurrent import futures
import datetime
import pathlib
import random
import sys
import tempfile

from paxon.tools.interruptions import disturbed_run, tiny_run


def make_parser() -> argparse.ArgumentParser:
  """Returns the parser of the command line."""
  parser = argparse.ArgumentParser(
    prog="tools/chaos",
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
    allow_abbrev=False,
  )
  parser.add_argument(
    "--runs", type=_positive, default=50, help="number of runs; default 50"
  )
  parser.add_argument("--seed", type=int, default=0, help="random seed")
  parser.add_argument(
    "--jobs", type=_positive, default=2, help="parallel runs; default 2"
  )
  parser.add_argument(
    "--markdown", type=pathlib.Path, help="write a page with the table"
  )
  return parser


def run(argv: Sequence[str]) -> int:
  """Runs the command; returns the exit status."""
  parser = make_parser()
  options = parser.parse_args(argv)
  if options.markdown and not options.markdown.absolute().parent.is_dir():
    parser.error(f"the folder of {options.markdown} does not exist")
  with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
    results = _runs(pathlib.Path(folder), options)
  command = " ".join(["tools/chaos", *argv])
  text = to_markdown(
    results, command=command, date=datetime.date.today().isoformat()
  )
  print(text)
  if options.markdown:
    options.markdown.write_text(text)
  return 1 if any(struck.problems for each in results for struck in each) else 0


def plan(runs: int, seed: int) -> list[list[str]]:
  """Returns the disturbances of each run; the first ones take turns.

  Args:
    runs: Number of runs.
    seed: Decides the others.
  """
  choice, kinds = random.Random(seed), list(disturbed_run.KINDS)
  return [
    [
      kinds[number % len(kinds)],
      *choice.choices(kinds, k=choice.randrange(3)),
    ]
    for number in range(runs)
  ]


def to_markdown(
  runs: Sequence[Sequence[disturbed_run.Struck]], *, command: str, date: str
) -> str:
  """Returns a page with a table by kind of disturbance, and all problems.

  Args:
    runs: The disturbances of each run.
    command: The command that made them.
    date: Its date.
  """
  struck = [each for run in runs for each in run]
  failed = sum(any(each.problems for each in run) for run in runs)
  lines = [
    "# Interrupted runs",
    "",
    f"`{command}`, {date}: {len(runs)} runs of {tiny_run.NUM_STEPS} steps,"
    f" disturbed {len(struck)} times. {len(runs) - failed} resumed each time"
    " from the newest undamaged checkpoint and ended with the arrays and"
    f" metrics of an undisturbed run, bit by bit; {failed} did not.",
    "",
    "| Disturbance | Times | Before the first checkpoint | Later | Exit status"
    " | Problems |",
    "| --- | --- | --- | --- | --- | --- |",
  ]
  for kind in disturbed_run.KINDS:
    of_kind = [each for each in struck if each.kind == kind]
    early = sum(each.newest is None for each in of_kind)
    statuses = sorted({each.status for each in of_kind})
    problems = sum(bool(each.problems) for each in of_kind)
    lines.append(
      f"| {kind} | {len(of_kind)} | {early} | {len(of_kind) - early} |"
      f" {', '.join(map(str, statuses))} | {problems} |"
    )
  for number, run in enumerate(runs):
    for each in run:
      lines += [
        f"\nRun {number}, {each.kind} after {each.moment:.2f} s: {problem}."
        for problem in each.problems
      ]
  return "\n".join(lines) + "\n"


def _runs(
  folder: pathlib.Path, options: argparse.Namespace
) -> list[list[disturbed_run.Struck]]:
  expected = disturbed_run.undisturbed(_new(folder, "undisturbed"))

  def one(number: int, kinds: list[str]) -> list[disturbed_run.Struck]:
    struck = disturbed_run.disturbed(
      _new(folder, f"run_{number}"),
      kinds,
      expected=expected,
      choice=random.Random(f"{options.seed} {number}"),
    )
    problems = [problem for each in struck for problem in each.problems]
    verdict = "; ".join(problems) or "equal"
    print(f"run {number}: {', '.join(kinds)}: {verdict}", file=sys.stderr)
    return struck

  plans = plan(options.runs, options.seed)
  with futures.ThreadPoolExecutor(options.jobs) as pool:
    return list(pool.map(one, range(len(plans)), plans))


def _new(folder: pathlib.Path, name: str) -> pathlib.Path:
  path = folder / name
  path.mkdir()
  return path


def _positive(text: str) -> int:
  value = int(text)
  if value <= 0:
    raise argparse.ArgumentTypeError(f"must be positive, got {value}")
  return value


if __name__ == "__main__":
  sys.exit(run(sys.argv[1:]))
