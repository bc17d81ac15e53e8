"""Checks before a release: version, tree, tag and changelog."""

from collections.abc import Sequence
import pathlib
import re
import subprocess

from packaging import version as versions

from paxon.tools.releasing import changelog

_VERSION = re.compile(r'^__version__ = "(.*)"$', re.MULTILINE)
_TAG = "v"


def read_version(root: pathlib.Path) -> str:
  """Returns `__version__`, which every wheel and command reports."""
  (version,) = _VERSION.findall((root / "__init__.py").read_text())
  return version


def run_git(root: pathlib.Path, *arguments: str) -> str:
  """Returns the output of a git command in a checkout."""
  return subprocess.run(
    ["git", "-c", "safe.directory=*", "-C", str(root), *arguments],
    check=True,
    capture_output=True,
    text=True,
  ).stdout.strip()


def find_previous(root: pathlib.Path, version: str) -> str | None:
  """Returns the tag `vX.Y` of the newest version but `version`, or None."""
  tags = []
  for tag in run_git(root, "tag", "--list", f"{_TAG}*").split():
    try:
      parsed = versions.Version(tag.removeprefix(_TAG))
    except versions.InvalidVersion:
      continue  # A tag of something else.
    if str(parsed) != version:
      tags.append((parsed, tag))
  return max(tags)[1] if tags else None


def check_version(version: str) -> None:
  """Checks the spelling of a version.

  Raises:
    ValueError: It is not the normal form of a public version of PEP 440.
  """
  try:
    parsed = versions.Version(version)
  except versions.InvalidVersion as error:
    raise ValueError(
      f"VERSION must be one of PEP 440, such as 0.2.0 or 0.2.0rc1, got"
      f" {version!r}."
    ) from error
  if version != parsed.public:
    raise ValueError(
      f"VERSION must be written {parsed.public}, got {version!r}."
    )


def find_problems(root: pathlib.Path, version: str) -> Sequence[str]:
  """Returns why a checkout cannot be released as a version, one line each.

  Args:
    root: The checkout.
    version: A version that `check_version` accepts.
  """
  problems = []
  written = read_version(root)
  if written != version:
    problems.append(
      f"__init__.py: __version__ must be {version!r}, got {written!r}."
    )
  changed = run_git(root, "status", "--porcelain").splitlines()
  if changed:
    problems.append(
      f"The checkout must be clean; {len(changed)} files differ from the"
      f" commit, such as {changed[0].split()[-1]}."
    )
  if run_git(root, "tag", "--list", f"{_TAG}{version}"):
    problems.append(f"The tag {_TAG}{version} exists: {version} was released.")
  previous = find_previous(root, version)
  if previous and versions.Version(previous[1:]) > versions.Version(version):
    problems.append(
      f"VERSION must be above {previous[1:]}, the newest tag, got {version}."
    )
  try:
    entries = changelog.parse((root / changelog.FILE).read_text())
  except ValueError as error:
    return [*problems, str(error)]
  newest = entries[0].version if entries else "none"
  if newest != version:
    problems.append(
      f"{changelog.FILE}: the first entry must be that of {version}, got"
      f" {newest}."
    )
  elif entries[0].date is None:
    problems.append(
      f"{changelog.FILE}: {version} must have a date, got"
      f" `{changelog.UNRELEASED}`."
    )
  return problems
