"""The command line that checks the devices of this machine.

  tools/gpu_check                     all checks, in at most nine minutes
  tools/gpu_check --dry_run           the same at toy size, on any device
  tools/gpu_check --only=attention,fp8.fp8_block
  tools/gpu_check --page=docs/plan_accuracy.md

Checks run in child processes, each with a time limit, in order of worth.
`results.json` in the folder is written after every check; `calibration.sh` has
the measured efficiency factors of plans, `profile/` traces of train steps.
The exit status is 1 if a check failed.
"""

import argparse
from collections.abc import Sequence
import functools
import os
import pathlib
import sys
from typing import Final

from paxon.runner import user_error
from paxon.tasks.gpu_check import (
  correctness,
  isolation,
  plan_comparison,
  rates,
  speed,
)

RESULTS: Final = "results.json"
_DEVICES: Final = "devices"
_RECIPES: Final = ("fp8", "fp8_current", "fp8_channel", "fp8_block", "int8")


def make_checks() -> list[isolation.Check]:
  """Returns all checks in order of worth."""
  check = isolation.Check
  attention = correctness.check_attention
  found = [
    check(
      name=_DEVICES,
      process=_DEVICES,
      limit=30.0,
      run=rates.describe_devices,
    )
  ]
  for name, run in {
    "attention.packed": functools.partial(attention, packed=True),
    "attention.one_document": functools.partial(attention, packed=False),
    "attention.window": functools.partial(attention, packed=False, window=7),
    **{
      f"fp8.{recipe}": functools.partial(
        correctness.check_quantized_matmul, recipe=recipe
      )
      for recipe in _RECIPES
    },
    "grouped_matmul": correctness.check_grouped_matmul,
    "offload": correctness.check_offload,
    "collectives": correctness.check_collectives,
    "checkpoint": correctness.check_checkpoint,
  }.items():
    found.append(check(name=name, process="correctness", limit=40.0, run=run))
  dense = speed.check_dense
  found += [
    check(name="gpt2.speed", process="gpt2", limit=90.0, run=speed.check_gpt2),
    check(
      name="dense.bf16",
      process="dense.bf16",
      limit=90.0,
      run=functools.partial(dense, is_fp8=False),
    ),
    check(
      name="dense.fp8",
      # Devices report the peak memory since their process started.
      process="dense.fp8",
      # Compiling takes most of it.
      limit=150.0,
      run=functools.partial(dense, is_fp8=True),
    ),
  ]
  found.append(
    check(name="rates", process="rates", limit=60.0, run=rates.calibrate)
  )
  found += [
    check(
      name=f"plan.{name}",
      process=f"plan.{name}",
      limit=100.0,
      run=functools.partial(plan_comparison.check, name=name),
    )
    for name in plan_comparison.CASES
  ]
  return found


def main(arguments: Sequence[str]) -> int:
  """Runs the command; returns the exit status."""
  try:
    return _run(_parse(arguments))
  except user_error.UserError as error:
    print(f"gpu_check: {user_error.one_line(error)}", file=sys.stderr)
    return error.status


def _run(options: argparse.Namespace) -> int:
  checks = _select(options.only)
  if options.list:
    print("\n".join(check.name for check in checks))
    return 0
  options.out.mkdir(parents=True, exist_ok=True)
  path = options.out / RESULTS
  header = {"dry_run": options.dry_run, "only": list(options.only)}
  results = isolation.Results(path, header)
  settings = isolation.Settings(
    folder=options.out.absolute(), is_dry=options.dry_run
  )
  run = functools.partial(
    isolation.run,
    settings=settings,
    results=results,
    total=60 * options.minutes,
  )
  # Toy or not, nothing else is worth running without a device.
  first = [check for check in checks if check.name == _DEVICES]
  run(first)
  if results.count(isolation.Status.PASSED) < len(first):
    return 1
  run([check for check in checks if check not in first])
  _summarize(results)
  if options.page is not None:
    _write_page(options.page, results)
  print(f"{path}: {results.measure_elapsed():.0f} s")
  return int(results.count(*isolation.Status) != _count_good(results))


def _count_good(results: isolation.Results) -> int:
  return results.count(isolation.Status.PASSED, isolation.Status.SKIPPED)


def _summarize(results: isolation.Results) -> None:
  """Prints how many checks passed, and fp8 compared with bfloat16."""
  low, high = (results.checks.get(f"dense.{x}", {}) for x in ("fp8", "bf16"))
  if "tokens_per_second" in low and "tokens_per_second" in high:
    ratio = speed.compare_dense(low, high)
    results.set_summary(ratio)
    print(f"fp8 over bf16: {ratio['fp8_over_bf16']:.2f}")
  counts = {s.value: results.count(s) for s in isolation.Status}
  print(", ".join(f"{n} {name}" for name, n in counts.items() if n))


def _write_page(page: pathlib.Path, results: isolation.Results) -> None:
  found = [
    one
    for name, one in results.checks.items()
    if name.startswith("plan.") and one["status"] == "passed"
  ]
  devices = results.checks.get("devices", {})
  conditions = (
    f"{devices.get('count')} x {devices.get('device')},"
    f" {results.header['started'][:10]},"
    f" jax {devices.get('versions', {}).get('jax')}"
  )
  table = plan_comparison.to_markdown(found, conditions=conditions)
  plan_comparison.write_page(page, table)
  print(f"wrote {page}")


def _select(only: Sequence[str]) -> list[isolation.Check]:
  """Returns the checks with these names or topics; all without any."""
  checks = make_checks()
  if not only:
    return checks
  known = {c.name for c in checks} | {c.name.partition(".")[0] for c in checks}
  for name in only:
    if name not in known:
      raise user_error.UserError(
        f"--only={','.join(only)}: there is no check {name!r}; choose from"
        f" {', '.join(sorted(known))}."
      )
  return [
    check
    for check in checks
    if {check.name, check.name.partition(".")[0]} & set(only)
  ]


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
  parser = argparse.ArgumentParser(
    prog="tools/gpu_check",
    description=__doc__,
    usage="%(prog)s [OPTIONS]",
    formatter_class=argparse.RawDescriptionHelpFormatter,
    allow_abbrev=False,
  )
  add = parser.add_argument
  add("--dry_run", action="store_true", help="use toy sizes")
  add(
    "--only",
    metavar="A,B",
    type=lambda text: tuple(text.split(",")),
    default=(),
    help="run only these checks: names, or topics (before the dot)",
  )
  add(
    "--out",
    type=pathlib.Path,
    default=pathlib.Path("gpu_check"),
    help="folder of the results; default: gpu_check",
  )
  add(
    "--minutes",
    type=_parse_minutes,
    default=9.0,
    help="time limit of the command (9); checks without time are skipped",
  )
  add(
    "--page",
    type=pathlib.Path,
    help="also write plans compared with runs into this page",
  )
  add("--list", action="store_true", help="print the names of the checks")
  return parser.parse_args(arguments)


def _parse_minutes(text: str) -> float:
  try:
    minutes = float(text)
  except ValueError:
    minutes = 0.0
  if not 0 < minutes < 1000:
    raise argparse.ArgumentTypeError(
      f"{text} must be a number above 0 and below 1000"
    )
  return minutes


if __name__ == "__main__":
  # Peaks of memory are those of the programs, and processes share a device.
  os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
  platforms = os.environ.get("JAX_PLATFORMS", "")
  if platforms and "cpu" not in platforms.split(","):
    # The reference is computed there.
    os.environ["JAX_PLATFORMS"] = f"{platforms},cpu"
  sys.exit(main(sys.argv[1:]))
