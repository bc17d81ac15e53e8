"""A copy of a commit in which faults are planted and tests run.

Bazel's events tell which test failed first, and why.
"""

from collections.abc import Iterator, Mapping, Sequence
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
import tomllib
from typing import Any, Final
import urllib.parse
from xml.etree import ElementTree

from paxon.runner import user_error

FAULTS: Final = pathlib.Path(__file__).with_name("faults.toml")
# Bazel's options for each tier.
TIERS: Final[Mapping[str, tuple[str, ...]]] = {
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
    options = [*TIERS[tier], *self._options]
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
