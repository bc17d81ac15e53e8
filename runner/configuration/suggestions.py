"""The names closest to a misspelled one, and how to say so."""

from collections.abc import Iterable
import difflib


def closest(word: str, names: Iterable[str], *, count: int = 1) -> list[str]:
  """Returns up to `count` of `names` that resemble `word`, best first.

  Capitals do not matter, so `pythonstdliblm` finds `PythonStdlibLm`.

  Args:
    word: What was typed.
    names: What could have been meant.
    count: How many to return at most.
  """
  lowered: dict[str, str] = {}
  for name in sorted(names):
    lowered.setdefault(name.lower(), name)
  found = difflib.get_close_matches(
    word.lower(), list(lowered), n=count, cutoff=0.5
  )
  return [lowered[name] for name in found]


def hint(word: str, names: Iterable[str], *, count: int = 1) -> str:
  """Returns `; did you mean 'x'?`, or what there is if nothing is close.

  Args:
    word: What was typed.
    names: What could have been meant.
    count: How many to name at most.
  """
  names = sorted(set(names))
  close = closest(word, names, count=count)
  if close:
    return f"; did you mean {' or '.join(repr(name) for name in close)}?"
  if not names:
    return "; there are none."
  shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
  return f"; there are: {shown}."
