"""Text tables, shapes and short lists of names."""

from collections.abc import Iterable, Sequence
import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class NameGroup:
  """Names that are shown as one.

  Attributes:
    label: A name, or a prefix followed by `/*`.
    names: The names of the group.
  """

  label: str
  names: tuple[str, ...]


def format_lines(
  rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()
) -> list[str]:
  """Returns rows with aligned columns, the columns `right` to the right."""
  if not rows:
    return []
  columns = range(len(rows[0]))
  widths = [max(len(row[column]) for row in rows) for column in columns]
  return [
    "  ".join(
      row[column].rjust(widths[column])
      if column in right
      else row[column].ljust(widths[column])
      for column in columns
    ).rstrip()
    for row in rows
  ]


def format_shape(dimensions: Sequence[int]) -> str:
  """Returns a shape such as `[264,16]`."""
  return f"[{','.join(map(str, dimensions))}]"


def collapse_names(
  names: Iterable[str], *, among: Iterable[str]
) -> list[NameGroup]:
  """Returns names in as few groups as possible, in the order of first names.

  A prefix becomes a group if all names of `among` below it, and more than one,
  are among `names`.
  """
  wanted = dict.fromkeys(names)
  totals: dict[str, int] = {}
  for name in among:
    for prefix in _prefixes(name):
      totals[prefix] = totals.get(prefix, 0) + 1
  inside: dict[str, list[str]] = {}
  for name in wanted:
    for prefix in _prefixes(name):
      inside.setdefault(prefix, []).append(name)
  groups: dict[str, tuple[str, ...]] = {}
  for name in wanted:
    whole = next(
      (
        prefix
        for prefix in _prefixes(name)
        if len(inside[prefix]) == totals.get(prefix) and len(inside[prefix]) > 1
      ),
      None,
    )
    if whole is None:
      groups[name] = (name,)
    else:
      groups[f"{whole}/*"] = tuple(inside[whole])
  return [NameGroup(label=label, names=held) for label, held in groups.items()]


def _prefixes(name: str) -> list[str]:
  """Returns the proper prefixes of a name at slashes, shortest first."""
  parts = name.split("/")
  return ["/".join(parts[:end]) for end in range(1, len(parts))]
