"""Disturbs runs at random moments and compares how they end.

  tools/chaos                  # 50 runs, about a quarter of an hour
  tools/chaos --runs=6 --seed=1
  tools/chaos --markdown=docs/interruptions.md

Each run is struck once to three times: by SIGKILL, SIGTERM, SIGINT, a newest
checkpoint that is truncated or has one bit flipped, or a full disk. With the
right to mount, the disk is a real one in memory; without, the process may not
write large files. Exit status 1 if anything did not hold.
"""

import argparse
from collections.abc import Sequence
from concurrent import futures
import datetime
import pathlib
import random
import sys
import tempfile

from paxon.tools.interruptions import disturbances, disturbed_run, table


def make_parser() -> argparse.ArgumentParser:
  """Returns what reads the command line."""
  parser = argparse.ArgumentParser(
    prog="tools/chaos",
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
    allow_abbrev=False,
  )
  parser.add_argument("--runs", type=_positive, default=50)
  parser.add_argument("--seed", type=int, default=0, help="of what is done")
  parser.add_argument(
    "--jobs", type=_positive, default=2, help="runs at a time"
  )
  parser.add_argument("--markdown", type=pathlib.Path, help="write the table")
  return parser


def run(argv: Sequence[str]) -> int:
  """Makes the runs that the arguments ask for; returns the exit status."""
  parser = make_parser()
  options = parser.parse_args(argv)
  if options.markdown and not options.markdown.absolute().parent.is_dir():
    parser.error(f"the folder of {options.markdown} does not exist")
  with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
    results = _runs(pathlib.Path(folder), options)
  command = " ".join(["tools/chaos", *argv])
  text = table.to_markdown(
    results, command=command, date=datetime.date.today().isoformat()
  )
  print(text)
  if options.markdown:
    options.markdown.write_text(text)
  return 1 if any(struck.problems for each in results for struck in each) else 0


def plan(runs: int, seed: int) -> list[list[str]]:
  """Returns the kinds of disturbances of each run; every kind comes in turn.

  Args:
    runs: How many.
    seed: Of the order and of how many strike one run.
  """
  choice, kinds = random.Random(seed), list(disturbances.KINDS)
  return [
    [
      kinds[number % len(kinds)],
      *choice.choices(kinds, k=choice.randrange(3)),
    ]
    for number in range(runs)
  ]


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
