"""The command line of the bench; `tools/bench` calls it.

  tools/bench                        # the default cases, under six minutes
  tools/bench loop --rounds=9
  tools/bench layers                 # each layer, generation, compilation
  tools/bench gpt2_124m --global_batch_size=32
  tools/bench inputs                 # each source of data, without a model
  tools/bench --json=out.json --markdown=docs/benchmarks.md

Cases are timed one after another, each with both of its contenders in turn. Run
it on a machine that does nothing else: intervals widen with every disturbance.
"""

import argparse
from collections.abc import Sequence
import datetime
import json
import pathlib
import sys

from paxon.tools.benchmarks import (
  cases,
  comparison,
  environment,
  input_speeds,
  report,
)

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
  """Returns what reads the command line."""
  known = "\n".join(
    f"  {name:23} {case.summary}{'' if case.is_default else ' (not default)'}"
    for name, case in cases.CASES.items()
  )
  parser = argparse.ArgumentParser(
    prog="tools/bench",
    description=f"Times pairs of contenders in turn.\n\ncases:\n{known}",
    formatter_class=argparse.RawDescriptionHelpFormatter,
    allow_abbrev=False,
  )
  parser.add_argument(
    "case", nargs="*", help="which, the group layers, or inputs alone"
  )
  parser.add_argument("--rounds", type=_positive, help="of every case")
  parser.add_argument("--json", type=pathlib.Path, help="write all figures")
  parser.add_argument("--markdown", type=pathlib.Path, help="write a page")
  for size in _SIZES:
    parser.add_argument(f"--{size}", type=_positive, help="of every case")
  parser.add_argument("--dtype", choices=_DTYPES, help="of every case")
  return parser


def run(argv: Sequence[str]) -> int:
  """Measures what the arguments ask for; returns the exit status."""
  parser = make_parser()
  options = parser.parse_args(argv)
  for path in filter(None, (options.json, options.markdown)):
    if not path.absolute().parent.is_dir():
      parser.error(f"the folder of {path} does not exist")
  if options.case == [_INPUTS]:
    for name in ("rounds", "json", *_SIZES, "dtype"):
      if getattr(options, name) is not None:
        parser.error(f"{_INPUTS} has no use for --{name}")
    return _measure_inputs(options.markdown, argv)
  chosen = [n for name in options.case for n in cases.named(name)]
  for name in options.case:
    if not cases.named(name):
      parser.error(
        f"there is no case {name!r}; there are {', '.join(cases.CASES)}, and "
        f"the group {cases.LAYERS}; {_INPUTS} stands alone"
      )
  facts = environment.describe(datetime.datetime.now())
  sizes = {name: getattr(options, name) for name in (*_SIZES, "dtype")}
  for name in chosen:
    for size in cases.CASES[name].unused:
      if sizes[size] is not None:
        parser.error(f"the case {name} has no use for --{size}")
  results: list[comparison.Comparison] = []
  for name in chosen or cases.defaults():
    case = cases.CASES[name]
    rounds = options.rounds or case.rounds
    print(f"{name}: {case.summary}, {rounds} rounds", file=sys.stderr)
    workload = cases.resized(case.workload, sizes)
    results.append(case.run(workload, name, rounds))
  print(report.to_text(results))
  command = " ".join(["tools/bench", *argv])
  if options.json:
    data = {
      "command": command,
      "environment": facts,
      "comparisons": [one.to_json() for one in results],
    }
    options.json.write_text(json.dumps(data, indent=1) + "\n")
  if options.markdown:
    page = report.to_markdown(results, environment=facts, command=command)
    options.markdown.write_text(page)
  return 0


def _measure_inputs(page: pathlib.Path | None, argv: Sequence[str]) -> int:
  """Measures sources of data, which are compared with nothing."""
  facts = environment.describe(datetime.datetime.now())
  text = input_speeds.to_markdown(
    input_speeds.measure(),
    environment=facts,
    command=" ".join(["tools/bench", *argv]),
  )
  print(text)
  if page:
    page.write_text(text)
  return 0


def _positive(text: str) -> int:
  if not text.isdigit() or int(text) <= 0:
    raise argparse.ArgumentTypeError(f"must be a positive integer, got {text}")
  return int(text)


if __name__ == "__main__":
  sys.exit(run(sys.argv[1:]))
