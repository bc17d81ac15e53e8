"""Seeded faults, and the tier of the tests that kills each.

  tools/mutate [--faults=REGEX] [--tier=default|all] [--output=FILE]
    [--jobs=N]

Plants one fault of tools/mutations/faults.toml after another in a copy of the
commit HEAD and runs the tests that depend on the changed file with Bazel: those
of its folder first, then all, in the default tier; if none fails, the same in
the nightly tier. A test that fails kills the fault, and ends its run. Prints
which test that was, and the share of the killed faults that the default tier
kills. The exit status is 1 if this share is under 95 %.

  --faults   Names of the faults, a regular expression for the whole name.
  --tier     With `default` the nightly tier is left out, and the share is that
             of all faults.
  --output   JSON lines, one for each fault. If the file exists, only faults
             that it lacks are planted, so that an interrupted run continues.
  --jobs     Tests that run at the same time; Bazel's own choice by default.

Your checkout is not changed, and its uncommitted changes are not in the copy.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
import dataclasses
import hashlib
import json
import os
import pathlib
import re
import sys
import time
from typing import Final

from paxon.runner import user_error
from paxon.runner.checkpoints import text_table
from paxon.tools import command_line
from paxon.tools.dependencies import workspace
from paxon.tools.mutations import planted_copy

# The share of the killed faults that the default tier must kill.
MIN_SHARE: Final = 0.95


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
  """The result of a fault.

  Attributes:
    fault: Its name.
    digest: `Fault.digest`.
    commit: The commit of the copy.
    status: `killed`, `survived` or `error`.
    tier: The tier that killed it, or the last one that ran.
    target: The target that failed.
    case: Its first test case that failed, or the reason of an error.
    seconds: Wall time of all its runs.
  """

  fault: str
  digest: str
  commit: str
  status: str
  tier: str
  target: str = ""
  case: str = ""
  seconds: float

  def is_final(self, fault: planted_copy.Fault, tiers: Sequence[str]) -> bool:
    """Returns whether a fault need not be planted again for these tiers."""
    if self.digest != fault.digest or self.status == "error":
      return False
    return self.status == "killed" or self.tier == tiers[-1]


def try_fault(
  copy: planted_copy.Copy, fault: planted_copy.Fault, tiers: Sequence[str]
) -> Result:
  """Plants a fault and runs the tests of some tiers until one fails.

  Args:
    copy: Where it is planted; has its own text again afterwards.
    fault: The fault.
    tiers: The tiers, in order.
  """
  begin, folder = time.monotonic(), os.path.dirname(fault.file)

  def make(status: str, tier: str, target: str = "", case: str = "") -> Result:
    return Result(
      fault=fault.name,
      digest=fault.digest,
      commit=copy.commit,
      status=status,
      tier=tier,
      target=target,
      case=case,
      seconds=round(time.monotonic() - begin, 1),
    )

  with copy.plant(fault):
    for tier in tiers:
      for targets in (f"//{folder}/...", "//..."):
        try:
          found = copy.find_failure(tier, targets)
        except planted_copy.BuildError as error:
          return make("error", tier, case=str(error))
        if found is not None:
          status = "error" if found.is_broken else "killed"
          return make(status, tier, found.target, found.case)
  return make("survived", tiers[-1])


def read_results(path: pathlib.Path, *, commit: str) -> dict[str, Result]:
  """Returns the stored results by name of the fault; a later line wins.

  Raises:
    UserError: They are of another commit, or no results.
  """
  text = path.read_text() if path.exists() else ""
  found = {}
  # The last line has no end if the process was killed while it wrote.
  for line in text.split("\n")[:-1]:
    try:
      result = Result(**json.loads(line))
    except (ValueError, TypeError):
      raise user_error.UserError(
        f"--output={path} has a line that is no result: {line[:80]!r}."
      ) from None
    if result.commit != commit:
      raise user_error.UserError(
        f"--output={path} has results of the commit {result.commit[:12]}, and"
        f" HEAD is {commit[:12]}; pass another file."
      )
    found[result.fault] = result
  return found


def _append(path: pathlib.Path, result: Result) -> None:
  path.parent.mkdir(parents=True, exist_ok=True)
  text = path.read_text() if path.exists() else ""
  if text and not text.endswith("\n"):
    path.write_text(text[: text.rfind("\n") + 1])
  with path.open("a") as file:
    file.write(json.dumps(dataclasses.asdict(result)) + "\n")


def check_unchanged(copy: planted_copy.Copy, tiers: Sequence[str]) -> None:
  """Runs all tests of the unchanged copy, also to fill Bazel's cache.

  Raises:
    planted_copy.BuildError: One fails; it would kill every fault.
  """
  for tier in tiers:
    print(f"unchanged, {tier} tier ...", flush=True)
    found = copy.find_failure(tier, "//...", ends_early=False)
    if found is not None:
      raise planted_copy.BuildError(
        f"without a fault, {found.target} fails in the {tier} tier"
        f" ({found.case}), so it would kill every fault"
      )


def run(
  copy: planted_copy.Copy,
  faults: Sequence[planted_copy.Fault],
  tiers: Sequence[str],
  *,
  output: pathlib.Path | None = None,
) -> list[Result]:
  """Returns the results of faults; plants those without a stored one.

  Args:
    copy: Where they are planted.
    faults: The faults.
    tiers: The tiers of the tests, in order.
    output: File of the results; appended.

  Raises:
    planted_copy.BuildError: A test fails without a fault.
    UserError: `output` has other results, or a file does not have the text of
      its fault.
  """
  kept: dict[str, Result] = {}
  if output is not None:
    kept = read_results(output, commit=copy.commit)
  left = [
    fault
    for fault in faults
    if fault.name not in kept or not kept[fault.name].is_final(fault, tiers)
  ]
  for fault in left:
    fault.plant(copy.read(fault))
  if left:
    check_unchanged(copy, tiers)
  for number, fault in enumerate(left, start=1):
    result = try_fault(copy, fault, tiers)
    kept[fault.name] = result
    if output is not None:
      _append(output, result)
    place = f" by {result.target}" if result.status == "killed" else ""
    print(
      f"{number}/{len(left)} {fault.name}: {result.status}{place}"
      f" ({result.tier}, {result.seconds:.0f} s)",
      flush=True,
    )
  return [kept[fault.name] for fault in faults]


def find_share(results: Sequence[Result], tiers: Sequence[str]) -> float | None:
  """Returns the share of the killed faults that the default tier kills.

  With only that tier, the share of all faults; None without any.
  """
  of = [r for r in results if r.status == "killed"]
  by_default = sum(r.tier == "default" for r in of)
  if len(tiers) == 1:
    of = [r for r in results if r.status != "error"]
  return by_default / len(of) if of else None


def report(results: Sequence[Result], tiers: Sequence[str]) -> Iterator[str]:
  """Yields the lines of the table, the share, survivors and errors."""
  rows = [("fault", "status", "tier", "seconds", "first failing test")]
  for each in results:
    test = " ".join(filter(None, (each.target, each.case)))
    seconds = f"{each.seconds:.0f}"
    rows.append((each.fault, each.status, each.tier, seconds, test))
  yield from text_table.format_lines(rows, right=[3])
  share = find_share(results, tiers)
  if share is not None:
    what = "what all tiers kill" if len(tiers) > 1 else "all faults"
    yield f"The default tier kills {share:.1%} of {what}."
  for status in ("survived", "error"):
    names = [each.fault for each in results if each.status == status]
    if names:
      yield f"{status}: {', '.join(names)}"


def _parse(argv: Sequence[str]) -> argparse.Namespace:
  parser = command_line.Parser("mutate", __doc__ or "")
  parser.prog = "tools/mutate"
  parser.formatter_class = argparse.RawDescriptionHelpFormatter
  parser.add_argument("--faults", default=".*")
  parser.add_argument("--tier", choices=("default", "all"), default="all")
  parser.add_argument("--output", type=pathlib.Path)
  parser.add_argument("--jobs", type=int)
  given = parser.parse_args(list(argv))
  if given.jobs is not None and given.jobs < 1:
    parser.error(f"--jobs must be at least 1, got {given.jobs}")
  try:
    re.compile(given.faults)
  except re.error as error:
    parser.error(f"--faults={given.faults} is no regular expression: {error}")
  return given


def _find_scratch(root: pathlib.Path) -> pathlib.Path:
  cache = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
  name = hashlib.sha256(os.fsencode(root)).hexdigest()[:12]
  return pathlib.Path(cache, "paxon", "mutations", name)


def main(
  argv: Sequence[str],
  *,
  root: pathlib.Path | None = None,
  read: Callable[[], list[planted_copy.Fault]] = planted_copy.read_faults,
  bazel: str | None = None,
) -> int:
  """Plants faults and prints what kills them; returns the exit status.

  Args:
    argv: The arguments after the program's name.
    root: The checkout; that of this file by default.
    read: Reads the faults.
    bazel: Bazel's launcher; that of the copy by default.
  """

  def act() -> int:
    given = _parse(argv)
    faults = [f for f in read() if re.fullmatch(given.faults, f.name)]
    if not faults:
      raise user_error.UserError(
        f"--faults={given.faults} matches the name of no fault."
      )
    checkout = root or workspace.find_root(pathlib.Path(__file__))
    tiers = [*planted_copy.TIERS][: 1 if given.tier == "default" else None]
    try:
      with planted_copy.open_copy(
        checkout, _find_scratch(checkout), bazel=bazel, jobs=given.jobs
      ) as copy:
        results = run(copy, faults, tiers, output=given.output)
    except planted_copy.BuildError as error:
      print(user_error.one_line(error), file=sys.stderr)
      return 1
    print("\n".join(report(results, tiers)))
    share = find_share(results, tiers)
    has_errors = any(each.status == "error" for each in results)
    return int(has_errors or (share is not None and share < MIN_SHARE))

  return command_line.catch_user_errors(act)


if __name__ == "__main__":
  command_line.run(main)
