"""The command line that compares predictions with published speeds.

  tools/plan_accuracy
      plans what docs/plan_accuracy.json lacks, and writes it and the page
  tools/plan_accuracy --again[=NAME]
      plans one row, or all, again
  tools/plan_accuracy --plan=NAME=FILE
      takes a row from a plan.json instead of compiling

A row takes from half a minute to five minutes, and up to 3 GB. One that cannot
be planned here is named, and the page is written without it.
"""

from collections.abc import Sequence
import datetime
import pathlib
import sys
from typing import Final

from paxon.runner import user_error
from paxon.runner.configuration import overrides
from paxon.runner.plan import result, topology
from paxon.runner.plan import target as targets
from paxon.runner.planning import child
from paxon.tools import plan_accuracy_page as page
from paxon.tools import published_speeds

_ROOT: Final = pathlib.Path(__file__).parents[1]
DATA: Final = _ROOT / "docs" / "plan_accuracy.json"
PAGE: Final = _ROOT / "docs" / "plan_accuracy.md"
_WRONG_USE: Final = 2
_TIME_LIMIT: Final = 1800.0


def main(argv: Sequence[str]) -> int:
  """Runs the command and returns its exit status: 1 if a row is missing.

  Args:
    argv: Its arguments.
  """
  if argv and argv[0] in ("-h", "--help", "help"):
    print(__doc__)
    return 0
  try:
    again, given = _parse(argv)
    known = page.from_json(DATA.read_text()) if DATA.exists() else {}
    for name, file in given.items():
      known[name] = _of_file(name, file)
  except user_error.UserError as error:
    print(user_error.one_line(error), file=sys.stderr)
    return _WRONG_USE
  status = 0
  for speed in published_speeds.ALL:
    if speed.name in known and speed.name not in again:
      continue
    print(f"planning {speed.name} for {speed.target} ...", flush=True)
    try:
      known[speed.name] = _plan(speed)
    except (ValueError, RuntimeError) as error:
      print(f"{speed.name}: {error}", file=sys.stderr)
      status = 1
    _write(known)
  _write(known)
  print(f"written: {PAGE} and {DATA.name}")
  return status


def _parse(argv: Sequence[str]) -> tuple[set[str], dict[str, str]]:
  """Names of rows to plan again, and files of plans by name.

  Raises:
    UserError: An argument is unknown, or names no row.
  """
  names = [speed.name for speed in published_speeds.ALL]
  again: set[str] = set()
  given: dict[str, str] = {}
  for argument in argv:
    flag, _, value = argument.partition("=")
    name, _, file = value.partition("=")
    if flag == "--again" and not value:
      again |= set(names)
      continue
    is_known = (flag == "--again" and not file) or (flag == "--plan" and file)
    if not is_known:
      raise user_error.UserError(
        f"Unknown argument {argument!r}; choose from --again,"
        " --again=NAME and --plan=NAME=FILE (see --help)."
      )
    if name not in names:
      raise user_error.UserError(
        f"{argument}: unknown program {name!r}; choose from {', '.join(names)}."
      )
    if file:
      given[name] = file
    else:
      again.add(name)
  return again, given


def _of_file(name: str, file: str) -> page.Prediction:
  try:
    (plan,) = result.from_json(pathlib.Path(file).read_text())
    (speed,) = (s for s in published_speeds.ALL if s.name == name)
    planned = plan.experiment, plan.target, plan.overrides
    wanted = speed.experiment, speed.target, _overrides(speed)
    if planned != wanted:
      raise ValueError(f"it is of {planned}, not of {wanted}")
    return page.of_plan(name, plan, date=plan.made_at[:10] or _today())
  except (OSError, ValueError, KeyError, TypeError) as error:
    raise user_error.UserError(
      f"--plan={name}={file} cannot be taken: {error}"
    ) from error


def _overrides(speed: published_speeds.Speed) -> tuple[str, ...]:
  return tuple(f"--fdl.{name}={value}" for name, value in speed.assigned)


def _plan(speed: published_speeds.Speed) -> page.Prediction:
  target = targets.parse(speed.target)
  missing = topology.missing(target)
  if missing:
    raise ValueError(f"{' and '.join(missing)} must be installed.")
  plan = child.plan(
    speed.experiment,
    [overrides.Override(*item) for item in speed.assigned],
    target,
    is_compiled=True,
    time_limit=_TIME_LIMIT,
  )
  return page.of_plan(speed.name, plan, date=_today())


def _write(known: dict[str, page.Prediction]) -> None:
  ordered = [known[s.name] for s in published_speeds.ALL if s.name in known]
  DATA.write_text(page.to_json(ordered))
  PAGE.write_text(page.to_markdown(known))


def _today() -> str:
  return datetime.datetime.now(tz=datetime.UTC).date().isoformat()


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
