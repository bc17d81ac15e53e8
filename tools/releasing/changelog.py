"""Entries of the changelog, with their changes by category."""

from collections.abc import Mapping
import dataclasses
import datetime
import re
from typing import Final

FILE: Final = "CHANGELOG.md"
CATEGORIES: Final = ("Added", "Changed", "Fixed", "Removed")
UNRELEASED: Final = "not released yet"
_TITLE = re.compile(r"## (\S+) \((.+)\)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
  """The changes of one version.

  Attributes:
    version: The version, as written.
    date: Its date, or None for `not released yet`.
    introduction: The text before the first category.
    changes: The text of each category, in order.
  """

  version: str
  date: datetime.date | None
  introduction: str
  changes: Mapping[str, str]

  def to_markdown(self) -> str:
    """Returns the release notes."""
    parts = [f"# Paxon {self.version}", self.introduction]
    parts += [f"## {name}\n{text}" for name, text in self.changes.items()]
    return "\n\n".join(filter(None, parts)) + "\n"


def parse(text: str) -> list[Entry]:
  """Returns the entries of a changelog, in its order.

  Args:
    text: The file: titles `## VERSION (YYYY-MM-DD)` or `## VERSION (not
      released yet)`, and below each the categories `### Added`, ..., as lists.

  Raises:
    ValueError: A title, a date or a category is not valid.
  """
  _, *sections = re.split(r"^(?=## )", text, flags=re.MULTILINE)
  return [_parse_entry(section) for section in sections]


def _parse_entry(section: str) -> Entry:
  title, _, body = section.partition("\n")
  title = title.strip()
  match = _TITLE.fullmatch(title)
  if match is None:
    raise ValueError(
      f"{FILE}: {title!r} must be `## VERSION (YYYY-MM-DD)` or"
      f" `## VERSION ({UNRELEASED})`."
    )
  version, when = match.groups()
  date = None
  if when != UNRELEASED:
    try:
      date = datetime.date.fromisoformat(when)
    except ValueError as error:
      raise ValueError(
        f"{FILE}: the date of {version} must be YYYY-MM-DD or"
        f" `{UNRELEASED}`, got {when!r}."
      ) from error
  introduction, *parts = re.split(r"^### ", body, flags=re.MULTILINE)
  changes: dict[str, str] = {}
  for part in parts:
    name, _, text = part.partition("\n")
    name = name.strip()
    if name not in CATEGORIES or name in changes:
      raise ValueError(
        f"{FILE}: {version} has the category {name!r}"
        f"{' twice' if name in changes else ''}; each of"
        f" {', '.join(CATEGORIES)} may occur once."
      )
    if not text.lstrip().startswith("- "):
      raise ValueError(
        f"{FILE}: {name} of {version} must be a list of `- ` items."
      )
    changes[name] = text.strip()
  if not changes:
    raise ValueError(
      f"{FILE}: {version} has no category; write its changes below"
      f" `### {CATEGORIES[0]}`, or {', '.join(CATEGORIES[1:])}."
    )
  return Entry(
    version=version,
    date=date,
    introduction=introduction.strip(),
    changes=changes,
  )
