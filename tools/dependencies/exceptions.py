"""The list of allowed exceptions to rules that the tree does not meet yet.

A line of the file is `rule subject detail`, optionally followed by `# reason`.
A detail of `*` allows everything that the rule finds in the subject.
"""

from collections.abc import Iterable, Mapping
import dataclasses
import pathlib

from paxon.tools.dependencies import violation

PATH = "tools/exceptions.txt"

_HEAD = """\
# Exceptions to the build rules; entries are removed, never added.
# Regenerate with: tools/python -m paxon.tools.check_deps --update
"""
# Rules whose entries stand for a whole file while it is being cleaned.
_WHOLE_FILE = frozenset({"word"})


@dataclasses.dataclass(frozen=True)
class Exceptions:
  """The entries of the list.

  Attributes:
    reasons: The reason given for each entry, empty for none.
  """

  reasons: Mapping[str, str]

  def entry_for(self, exception: str) -> str | None:
    """Returns the entry that allows `exception`, if there is one."""
    for entry in (exception, _whole_file(exception)):
      if entry in self.reasons:
        return entry
    return None


def load(root: pathlib.Path) -> Exceptions:
  """Reads the list of the workspace at `root`; it may be missing."""
  path = root / PATH
  if not path.is_file():
    return Exceptions({})
  reasons = {}
  for line in path.read_text().splitlines():
    entry, _, reason = line.partition("#")
    if entry.strip():
      reasons[" ".join(entry.split())] = reason.strip()
  return Exceptions(reasons)


def apply(
  found: Iterable[violation.Violation], listed: Exceptions
) -> list[violation.Violation]:
  """Returns the violations that are not listed."""
  return [
    item
    for item in found
    if not item.exception or listed.entry_for(item.exception) is None
  ]


def update(root: pathlib.Path, found: Iterable[violation.Violation]) -> None:
  """Writes the list that allows everything in `found` that may be allowed."""
  listed = load(root)
  entries = set()
  for item in found:
    if item.exception:
      entries.add(
        listed.entry_for(item.exception) or _whole_file(item.exception)
      )
  lines = []
  for entry in sorted(entries):
    reason = listed.reasons.get(entry)
    lines.append(f"{entry}  # {reason}\n" if reason else f"{entry}\n")
  (root / PATH).write_text(_HEAD + "".join(lines))


def _whole_file(exception: str) -> str:
  rule, subject, *_ = exception.split()
  return f"{rule} {subject} *" if rule in _WHOLE_FILE else exception
