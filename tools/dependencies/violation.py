"""Violations of the build rules, and the list of allowed exceptions.

A line of the list, tools/exceptions.txt, is `rule subject detail`, optionally
followed by `# reason`.
"""

from collections.abc import Iterable, Mapping
import dataclasses
import pathlib

PATH = "tools/exceptions.txt"

_HEAD = """\
# Exceptions to the build rules; entries are removed, never added.
# Regenerate with: tools/python -m paxon.tools.check_deps --update
"""


@dataclasses.dataclass(frozen=True, order=True)
class Violation:
  """A violation of a rule.

  Attributes:
    path: The file to change, relative to the workspace.
    line: The line in it, from 1; 0 for the whole file.
    subject: The target or file that violates the rule.
    message: The problem and its fix.
    exception: The entry of the list that would allow it; empty if the rule has
      no exceptions.
  """

  path: str
  line: int
  subject: str
  message: str
  exception: str = ""

  def __str__(self) -> str:
    where = f"{self.path}:{self.line}" if self.line else self.path
    if self.subject == self.path:
      return f"{where}: {self.message}"
    return f"{where}: {self.subject}: {self.message}"


def make_for_file(path: str, message: str, exception: str = "") -> Violation:
  """Returns a violation by a whole file."""
  return Violation(path, 0, path, message, exception)


@dataclasses.dataclass(frozen=True)
class Exceptions:
  """The list of allowed exceptions.

  Attributes:
    reasons: The reason of each entry; may be empty.
  """

  reasons: Mapping[str, str]


def load_exceptions(root: pathlib.Path) -> Exceptions:
  """Reads the list of the workspace at `root`; a missing file is empty."""
  path = root / PATH
  if not path.is_file():
    return Exceptions({})
  reasons = {}
  for line in path.read_text().splitlines():
    entry, _, reason = line.partition("#")
    if entry.strip():
      reasons[" ".join(entry.split())] = reason.strip()
  return Exceptions(reasons)


def apply_exceptions(
  found: Iterable[Violation], listed: Exceptions
) -> list[Violation]:
  """Returns violations that are not listed, and one for each unused entry."""
  found = list(found)
  unused = listed.reasons.keys() - {item.exception for item in found}
  return [item for item in found if item.exception not in listed.reasons] + [
    make_for_file(
      PATH, f"`{entry}` allows nothing; remove it, or run check_deps --update."
    )
    for entry in sorted(unused)
  ]


def update_exceptions(
  root: pathlib.Path, found: Iterable[Violation]
) -> list[str]:
  """Rewrites the list to what `found` needs; reasons are kept.

  Returns:
    The entries that were added.
  """
  reasons = load_exceptions(root).reasons
  entries = sorted({item.exception for item in found if item.exception})
  lines = []
  for entry in entries:
    reason = reasons.get(entry)
    lines.append(f"{entry}  # {reason}\n" if reason else f"{entry}\n")
  (root / PATH).write_text(_HEAD + "".join(lines))
  return [entry for entry in entries if entry not in reasons]
