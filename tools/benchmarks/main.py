"""Command line of the bench; `tools/bench` calls it.

  tools/bench                        # the default cases, under six minutes
  tools/bench loop --rounds=9
  tools/bench train_step loop generation
  tools/bench gpt2_124m --global_batch_size=32
  tools/bench tuned torch --dtype=bfloat16 --unroll
  tools/bench inputs                 # each data source, without a model
  tools/bench --json=out.json

Each case times its two contenders in turn. Run it on an idle machine: every
disturbance widens the intervals.
"""

import argparse
from collections.abc import Sequence
import datetime
import json
import pathlib
import sys

from paxon.tools.benchmarks import cases, input_speeds, report, timing

_INPUTS = "inputs"
_SIZES = (
  "global_batch_size",
  "length",
  "vocab_size",
  "num_layers",
  "embed_dim",
  "mlp_dim",
  "num_heads",
  "num_kv_heads",
  "head_dim",
)
_DTYPES = ("float32", "bfloat16")


def make_parser() -> argparse.ArgumentParser:
  """Returns the parser of the command line."""
  known = "\n".join(
    f"  {name:19}{case.summary}{' (default)' if case.is_default else ''}"
    for name, case in cases.CASES.items()
  )
  parser = argparse.ArgumentParser(
    prog="tools/bench",
    description=(
      "Compares the speed of Paxon with hand-written JAX, side by side.\n\n"
      f"cases:\n{known}\n  {_INPUTS:19}throughput of each data source"
    ),
    formatter_class=argparse.RawDescriptionHelpFormatter,
    allow_abbrev=False,
  )
  parser.add_argument("case", nargs="*", help="cases to run, in this order")
  parser.add_argument("--rounds", type=_positive, help="rounds of every case")
  parser.add_argument("--json", type=pathlib.Path, help="write all times here")
  for size in _SIZES:
    parser.add_argument(f"--{size}", type=_positive, help=f"override {size}")
  parser.add_argument("--dtype", choices=_DTYPES, help="override the dtype")
  parser.add_argument(
    "--unroll",
    dest="scan",
    action="store_const",
    const=False,
    help="unroll the loop over our layers",
  )
  return parser


def run(argv: Sequence[str]) -> int:
  """Runs the command; returns the exit status."""
  parser = make_parser()
  options = parser.parse_args(argv)
  if options.json and not options.json.absolute().parent.is_dir():
    parser.error(f"the folder of {options.json} does not exist")
  if options.case == [_INPUTS]:
    for name in ("rounds", "json", *_SIZES, "dtype", "scan"):
      if vars(options)[name] is not None:
        flag = "unroll" if name == "scan" else name
        parser.error(f"--{flag} does not apply to {_INPUTS}")
    for name, value in report.environment(datetime.datetime.now()).items():
      print(f"{name}: {value}")
    print("\n".join(input_speeds.to_lines(input_speeds.measure())))
    return 0
  for name in options.case:
    if name not in cases.CASES:
      parser.error(
        f"unknown case {name!r}; choose from {', '.join(cases.CASES)}, or"
        f" {_INPUTS} alone"
      )
  sizes = {name: vars(options)[name] for name in (*_SIZES, "dtype", "scan")}
  facts = report.environment(datetime.datetime.now())
  results: list[timing.Comparison] = []
  for name in options.case or [
    n for n, c in cases.CASES.items() if c.is_default
  ]:
    case = cases.CASES[name]
    rounds = options.rounds or case.rounds
    print(f"{name}: {case.summary}, {rounds} rounds", file=sys.stderr)
    workload = cases.resize(case.workload, sizes)
    try:
      results.append(case.run(workload, name=name, rounds=rounds))
    except ImportError as error:
      print(f"{name} is left out: {error}", file=sys.stderr)
  print(report.to_text(results))
  if options.json:
    data = {
      "command": " ".join(["tools/bench", *argv]),
      "environment": facts,
      "comparisons": [one.to_json() for one in results],
    }
    options.json.write_text(json.dumps(data, indent=1) + "\n")
  return 0


def _positive(text: str) -> int:
  if not text.isdigit() or int(text) <= 0:
    raise argparse.ArgumentTypeError(f"must be a positive integer, got {text}")
  return int(text)


if __name__ == "__main__":
  sys.exit(run(sys.argv[1:]))
