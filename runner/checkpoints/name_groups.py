"""Short lists of names: a folder of which all names are meant is one entry."""

from collections.abc import Iterable
import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
  """Names that are shown as one.

  Attributes:
    label: A name, or a folder's with `/*`.
    names: Those that it stands for.
  """

  label: str
  names: tuple[str, ...]


def collapse(names: Iterable[str], *, among: Iterable[str]) -> list[Group]:
  """Returns the names in as few groups as say exactly which they are.

  Args:
    names: To be shown.
    among: All names that there are; a folder is one group if all of it is
      among `names`, and that is more than one.

  Returns:
    Groups in the order of their first names.
  """
  wanted = dict.fromkeys(names)
  every: dict[str, int] = {}
  for name in among:
    for folder in _folders(name):
      every[folder] = every.get(folder, 0) + 1
  inside: dict[str, list[str]] = {}
  for name in wanted:
    for folder in _folders(name):
      inside.setdefault(folder, []).append(name)
  groups: dict[str, tuple[str, ...]] = {}
  for name in wanted:
    whole = next(
      (
        folder
        for folder in _folders(name)
        if len(inside[folder]) == every.get(folder) and len(inside[folder]) > 1
      ),
      None,
    )
    if whole is None:
      groups[name] = (name,)
    else:
      groups[f"{whole}/*"] = tuple(inside[whole])
  return [Group(label=label, names=held) for label, held in groups.items()]


def _folders(name: str) -> list[str]:
  """Returns the folders of a name, the outermost first."""
  parts = name.split("/")
  return ["/".join(parts[:end]) for end in range(1, len(parts))]
