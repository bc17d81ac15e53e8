"""Names that resemble a misspelled one, and lists cut short, for errors."""

from collections.abc import Iterable, Sequence
import difflib

_MAX_LISTED = 8
_MAX_PROBLEMS = 5


def find_closest(
  word: str, names: Iterable[str], *, count: int = 1
) -> list[str]:
  """Returns up to `count` of `names` that resemble `word`, best first.

  Case is ignored: `pythonstdliblm` finds `PythonStdlibLm`.
  """
  lowered: dict[str, str] = {}
  for name in sorted(names):
    lowered.setdefault(name.lower(), name)
  found = difflib.get_close_matches(
    word.lower(), list(lowered), n=count, cutoff=0.5
  )
  return [lowered[name] for name in found]


def suggest(word: str, names: Iterable[str], *, count: int = 1) -> str:
  """Returns `; did you mean 'x'?`, or the known names if none is close.

  The result is appended to an error about the unknown name; `count` is the
  maximum number of names suggested.
  """
  names = sorted(set(names))
  close = find_closest(word, names, count=count)
  if close:
    return f"; did you mean {' or '.join(repr(name) for name in close)}?"
  if not names:
    return "; none are known."
  listed = ", ".join(names[:_MAX_LISTED])
  return f"; known: {listed}{', ...' if len(names) > _MAX_LISTED else '.'}"


def limit(problems: Sequence[str]) -> str:
  """Returns the first problems and the number of the others, for an error."""
  shown = list(problems[:_MAX_PROBLEMS])
  if len(problems) > len(shown):
    shown.append(f"and {len(problems) - len(shown)} more")
  return "; ".join(shown)
