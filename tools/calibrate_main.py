"""The command line that fills a calibration for the plan's estimates.

  tools/calibrate --out=FILE [--small]
      measures products, memory, links and kernels on the devices of this
      machine, which take seconds of theirs; --small is for CPUs
  tools/calibrate --job_log_dir=RUN --plan=PLAN --out=FILE
      corrects the calibration that PLAN (a plan.json) was made with, so that
      its estimate is the time that a step of RUN took

A plan takes the file with PAXON_PLAN_CALIBRATION=FILE. For cpu:8, set
JAX_NUM_CPU_DEVICES=8 for the first form: the devices share the machine.

Wrong use is one line on stderr and status 2.
"""

from collections.abc import Mapping, Sequence
import datetime
import importlib.metadata
import os
import pathlib
import sys
from typing import Final

from paxon.runner import user_error
from paxon.runner.monitoring import metrics_file
from paxon.runner.plan import hardware, result
from paxon.runner.plan.estimate import calibration as calibrations
from paxon.runner.plan.estimate import fitting

_WRONG_USE: Final = 2
_VALUES: Final = ("job_log_dir", "plan", "out")
_DISTRIBUTIONS: Final = ("jax", "jaxlib")


def main(argv: Sequence[str]) -> int:
  """Runs the command and returns its exit status.

  Args:
    argv: Its arguments.
  """
  if not argv or argv[0] in ("-h", "--help", "help"):
    print(__doc__)
    return 0 if argv else _WRONG_USE
  try:
    given = _parse(argv)
    if "job_log_dir" in given:
      found = _of_run(given["job_log_dir"], given["plan"])
    else:
      found = _of_machine(is_small="small" in given)
    path = pathlib.Path(given["out"])
    path.write_text(calibrations.to_json(found))
  except user_error.UserError as error:
    print(user_error.one_line(error), file=sys.stderr)
    return _WRONG_USE
  except OSError as error:
    print(f"--out cannot be written: {error}", file=sys.stderr)
    return _WRONG_USE
  print(f"{found.summary}\nwritten: {path}")
  print(f"to plan with it: {calibrations.VARIABLE}={path}")
  return 0


def _parse(argv: Sequence[str]) -> dict[str, str]:
  """Values by flag.

  Raises:
    UserError: A flag is unknown or missing.
  """
  given = {}
  for argument in argv:
    name, equals, value = argument.removeprefix("--").partition("=")
    is_known = name in _VALUES and equals and value
    if not argument.startswith("--") or not (is_known or argument == "--small"):
      raise user_error.UserError(
        f"There is an argument {argument!r}, but known are --small and"
        f" {', '.join(f'--{v}=...' for v in _VALUES)} (see --help)."
      )
    given[name] = value
  if "out" not in given:
    raise user_error.UserError("--out=FILE is required: the file to write.")
  if ("job_log_dir" in given) != ("plan" in given):
    raise user_error.UserError(
      "--job_log_dir=RUN and --plan=PLAN go together: a run, and the plan.json"
      " of the same configuration on the same devices."
    )
  return given


def _of_machine(*, is_small: bool) -> calibrations.Calibration:
  # Here, because this starts the devices.
  import jax

  from paxon.runner.plan.estimate import microbenchmarks

  devices = jax.devices()
  kind = microbenchmarks.kind_of(devices)
  if kind is None:
    raise user_error.UserError(
      f"The device kind {devices[0].device_kind!r} is not in the table of"
      f" hardware; known are {', '.join(hardware.names())}."
    )
  is_small = is_small or kind.platform is hardware.Platform.CPU
  sizes = microbenchmarks.SMALL if is_small else microbenchmarks.LARGE
  found = microbenchmarks.measure(devices, sizes=sizes)
  return fitting.from_microbenchmarks(
    found,
    kind=kind,
    where=f"{len(devices)} {devices[0].device_kind}",
    versions=_versions(),
    today=_today(),
  )


def _of_run(folder: str, plan_file: str) -> calibrations.Calibration:
  plan = _plan(plan_file)
  path = pathlib.Path(folder, "metrics.jsonl")
  if not path.exists():
    raise user_error.UserError(
      f"--job_log_dir={folder} has no metrics: {path} does not exist."
    )
  reports = [
    record.values
    for record in metrics_file.read(path)
    if record.split == "train"
  ]
  time = fitting.time_of_run(reports, plan, name=folder)
  kind = hardware.named(plan.device_kind)
  before = calibrations.chosen(kind, os.environ)
  if before is None:
    raise user_error.UserError(
      f"There is no calibration for {kind.name} to correct: make one with"
      f" tools/calibrate --out=FILE, and set {calibrations.VARIABLE}=FILE."
    )
  return fitting.from_run(
    time,
    plan,
    before,
    name=pathlib.Path(folder).name,
    versions=_versions(),
    today=_today(),
  )


def _plan(file: str) -> result.Plan:
  try:
    plans = result.from_json(pathlib.Path(file).read_text())
  except (OSError, ValueError, KeyError, TypeError) as error:
    raise user_error.UserError(
      f"--plan={file} is no plan.json: {error}"
    ) from error
  if len(plans) != 1:
    raise user_error.UserError(
      f"--plan={file} has {len(plans)} plans; give one of a single target."
    )
  return plans[0]


def _versions() -> Mapping[str, str]:
  return {name: importlib.metadata.version(name) for name in _DISTRIBUTIONS}


def _today() -> datetime.date:
  return datetime.datetime.now(tz=datetime.UTC).date()


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
