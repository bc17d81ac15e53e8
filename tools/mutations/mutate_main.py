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
from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time
import tomllib
from typing import Any, Final
import urllib.parse
from xml.etree import ElementTree

from paxon.runner import user_error
from paxon.runner.checkpoints import text_table
from paxon.tools import command_line
from paxon.tools.dependencies import workspace

FAULTS: Final = pathlib.Path(__file__).with_name("faults.toml")
# The share of the killed faults that the default tier must kill.
MIN_SHARE: Final = 0.95

# Bazel's options for each tier.
_TIERS: Final[Mapping[str, tuple[str, ...]]] = {
  "default": (),
  "nightly": ("--config=nightly",),
}
# Bazel's status without tests, such as in a folder that has none in the tier.
_NO_TESTS: Final = 4
# Errors of a wrong entry in the list, as opposed to failures of a test.
_BROKEN: Final = re.compile(
  r"\s*(collection failure|(Import|ModuleNotFound|Syntax|Name|UnboundLocal)"
  r"Error)\b"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fault:
  """A mistake in a file.

  Attributes:
    name: Says what is wrong.
    file: Path of the file in the checkout.
    before: Text that occurs once in the file.
    after: Text that replaces it.
    why: The effect that a user observes; empty if it is obvious.
  """

  name: str
  file: str
  before: str
  after: str
  why: str = ""

  def plant(self, text: str) -> str:
    """Returns the text of the file with the fault.

    Raises:
      UserError: The text does not have `before` exactly once.
    """
    count = text.count(self.before)
    if count != 1:
      raise user_error.UserError(
        f"The fault {self.name!r}: {self.file} must have its `before` exactly"
        f" once, and has it {count} times."
      )
    return text.replace(self.before, self.after)

  @property
  def digest(self) -> str:
    """Hash of the change; another one makes a stored result obsolete."""
    text = json.dumps([self.file, self.before, self.after])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Failure:
  """The first test case that failed.

  Attributes:
    target: Its target.
    case: Its name, or the target's status if there is no report.
    is_broken: Whether the file cannot be imported, or lacks a name.
  """

  target: str
  case: str
  is_broken: bool = False


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

  def is_final(self, fault: Fault, tiers: Sequence[str]) -> bool:
    """Returns whether a fault need not be planted again for these tiers."""
    if self.digest != fault.digest or self.status == "error":
      return False
    return self.status == "killed" or self.tier == tiers[-1]


class BuildError(Exception):
  """Bazel failed, and no test did."""


def read_faults(path: pathlib.Path = FAULTS) -> list[Fault]:
  """Returns the faults of a file."""
  return [Fault(**each) for each in tomllib.loads(path.read_text())["fault"]]


class Copy:
  """A worktree of a commit in which faults are planted.

  Attributes:
    path: Its folder.
    commit: Its commit.
  """

  def __init__(
    self, path: pathlib.Path, commit: str, bazel: str | None, jobs: int | None
  ):
    self.path, self.commit = path, commit
    self._bazel = bazel or str(path / "tools" / "bazelw")
    # Results of the unchanged files stay valid while others replace them in
    # Bazel's outputs, of each tier.
    self._options = [f"--disk_cache={path.with_name('results')}"]
    if jobs is not None:
      self._options += [f"--jobs={jobs}", f"--local_test_jobs={jobs}"]

  def read(self, fault: Fault) -> str:
    """Returns the text of the file of a fault.

    Raises:
      UserError: The commit has no such file.
    """
    try:
      return (self.path / fault.file).read_text()
    except FileNotFoundError:
      raise user_error.UserError(
        f"The fault {fault.name!r}: there is no file {fault.file} in the commit"
        f" {self.commit[:12]}."
      ) from None

  @contextlib.contextmanager
  def plant(self, fault: Fault) -> Iterator[None]:
    """While entered, the copy has a fault."""
    path, text = self.path / fault.file, self.read(fault)
    path.write_text(fault.plant(text))
    try:
      yield
    finally:
      path.write_text(text)

  def find_failure(
    self, tier: str, targets: str, *, ends_early: bool = True
  ) -> Failure | None:
    """Runs tests; returns the first failure, or None if all pass.

    Args:
      tier: `default` or `nightly`.
      targets: Bazel's pattern.
      ends_early: Whether the first failure ends the run.

    Raises:
      BuildError: Bazel failed for another reason.
    """
    events = self.path.with_name("events.json")
    events.unlink(missing_ok=True)
    options = [*_TIERS[tier], *self._options]
    if ends_early:
      options += ["--nokeep_going", "--notest_keep_going"]
    command = [
      *(self._bazel, "test", *options, "--test_output=summary"),
      *("--noshow_progress", f"--build_event_json_file={events}", targets),
    ]
    status, output = _run(command, self.path)
    failures = list(_read_failures(events))
    if failures:
      return failures[0]
    if status not in (0, _NO_TESTS):
      lines = [line for line in output.splitlines() if "ERROR" in line]
      raise BuildError(lines[0] if lines else f"Bazel's status is {status}")
    return None

  def shut_down(self) -> None:
    """Ends Bazel's server, which holds memory for hours."""
    with contextlib.suppress(OSError):
      _run([self._bazel, "shutdown"], self.path)


def _run(command: Sequence[str], folder: pathlib.Path) -> tuple[int, str]:
  """Returns the status and the output of a process, which ends before we do."""
  with subprocess.Popen(
    command,
    cwd=folder,
    # tools/python sets variables for its own interpreter.
    env={k: v for k, v in os.environ.items() if not k.startswith("PYTHON")},
    stdin=subprocess.DEVNULL,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    errors="replace",
  ) as process:
    try:
      output, _ = process.communicate()
    except KeyboardInterrupt:
      # Bazel got the signal, too, and its tests end first.
      process.communicate()
      raise
  return process.returncode, output


def _read_failures(events: pathlib.Path) -> Iterator[Failure]:
  """Yields the first failure of each target that failed."""
  lines = events.read_text().splitlines() if events.exists() else []
  for line in lines:
    try:
      event = json.loads(line)
    except ValueError:
      return  # Bazel was stopped in the middle of a line.
    result = event.get("testResult", {})
    if result.get("status") in ("FAILED", "TIMEOUT"):
      yield _find_first_case(event["id"]["testResult"]["label"], result)


def _find_first_case(label: str, result: Mapping[str, Any]) -> Failure:
  for output in result.get("testActionOutput", ()):
    if output["name"] != "test.xml":
      continue
    path = urllib.parse.unquote(urllib.parse.urlparse(output["uri"]).path)
    with contextlib.suppress(OSError, ElementTree.ParseError):
      for case in ElementTree.parse(path).iter("testcase"):
        problem = case.find("failure")
        problem = case.find("error") if problem is None else problem
        if problem is not None:
          return Failure(
            target=label,
            case=case.get("name", ""),
            is_broken=_BROKEN.match(problem.get("message", "")) is not None,
          )
  return Failure(target=label, case=f"({result['status'].lower()})")


@contextlib.contextmanager
def open_copy(
  root: pathlib.Path,
  scratch: pathlib.Path,
  *,
  bazel: str | None = None,
  jobs: int | None = None,
) -> Iterator[Copy]:
  """While entered, there is a copy of a checkout's commit HEAD.

  Its folder is the same each time, so that Bazel finds what it has built.

  Args:
    root: The checkout.
    scratch: Folder of the copy, and of Bazel's results.
    bazel: Bazel's launcher; that of the copy by default.
    jobs: Tests that run at the same time.

  Raises:
    UserError: The checkout has no commit, or another process has a copy of it.
  """
  scratch.mkdir(parents=True, exist_ok=True)
  path = scratch / "paxon"
  with (scratch / "lock").open("w") as lock:
    try:
      fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
      raise user_error.UserError(
        f"Another tools/mutate runs on {root}; wait for it, or stop it."
      ) from None
    # Of a process that was killed.
    _remove_worktree(root, path)
    commit = _git(root, "rev-parse", "HEAD").strip()
    try:
      _git(root, "worktree", "add", "--quiet", "--detach", str(path), commit)
      copy = Copy(path, commit, bazel, jobs)
      try:
        yield copy
      finally:
        copy.shut_down()
    finally:
      _remove_worktree(root, path)


def _remove_worktree(root: pathlib.Path, path: pathlib.Path) -> None:
  shutil.rmtree(path, ignore_errors=True)
  _git(root, "worktree", "prune")


def _git(root: pathlib.Path, *arguments: str) -> str:
  found = subprocess.run(
    ["git", "-C", str(root), *arguments], capture_output=True, text=True
  )
  if found.returncode:
    raise user_error.UserError(f"git {arguments[0]}: {found.stderr.strip()}")
  return found.stdout


def try_fault(copy: Copy, fault: Fault, tiers: Sequence[str]) -> Result:
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
        except BuildError as error:
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


def check_unchanged(copy: Copy, tiers: Sequence[str]) -> None:
  """Runs all tests of the unchanged copy, also to fill Bazel's cache.

  Raises:
    BuildError: One fails; it would kill every fault.
  """
  for tier in tiers:
    print(f"unchanged, {tier} tier ...", flush=True)
    found = copy.find_failure(tier, "//...", ends_early=False)
    if found is not None:
      raise BuildError(
        f"without a fault, {found.target} fails in the {tier} tier"
        f" ({found.case}), so it would kill every fault"
      )


def run(
  copy: Copy,
  faults: Sequence[Fault],
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
    BuildError: A test fails without a fault.
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
  read: Callable[[], list[Fault]] = read_faults,
  bazel: str | None = None,
) -> int:
  """Plants faults and prints what kills them; returns the exit status.

  Args:
    argv: The arguments after the program's name.
    root: The checkout; that of this file by default.
    read: Reads the faults.
    bazel: Bazel's launcher; that of the copy by default.
  """
  try:
    given = _parse(argv)
    faults = [f for f in read() if re.fullmatch(given.faults, f.name)]
    if not faults:
      raise user_error.UserError(
        f"--faults={given.faults} matches the name of no fault."
      )
    root = root or workspace.find_root(pathlib.Path(__file__))
    tiers = [*_TIERS][: 1 if given.tier == "default" else None]
    with open_copy(
      root, _find_scratch(root), bazel=bazel, jobs=given.jobs
    ) as copy:
      results = run(copy, faults, tiers, output=given.output)
  except user_error.UserError as error:
    print(user_error.one_line(error), file=sys.stderr)
    return command_line.WRONG_USE
  except OSError as error:
    # Such as a folder where a file must be.
    if error.filename is None:
      raise
    print(user_error.one_line(error), file=sys.stderr)
    return command_line.WRONG_USE
  except BuildError as error:
    print(user_error.one_line(error), file=sys.stderr)
    return 1
  print("\n".join(report(results, tiers)))
  share = find_share(results, tiers)
  has_errors = any(each.status == "error" for each in results)
  return int(has_errors or (share is not None and share < MIN_SHARE))


if __name__ == "__main__":
  command_line.run(main)
