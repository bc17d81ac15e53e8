"""Our schedules by name, for knobs and command lines."""

from collections.abc import Callable, Mapping
import difflib

from paxon.pipeline.schedules import (
  gpipe,
  interleaved,
  one_f_one_b,
  table,
  zero_bubble,
)

NAMES: Mapping[str, Callable[..., table.Table]] = {
  "gpipe": gpipe.make,
  "1f1b": one_f_one_b.make,
  "1f1b_split": one_f_one_b.split,
  "1f1b_two_slots": one_f_one_b.two_slots,
  "interleaved": interleaved.make,
  "interleaved_two_slots": interleaved.two_slots,
  "zb_h1": zero_bubble.make_h1,
  "zb_v": zero_bubble.make_v,
}


def find(name: str) -> Callable[..., table.Table]:
  """Returns the function that makes a schedule's table.

  Args:
    name: One of `NAMES`.

  Raises:
    ValueError: There is none of that name.
  """
  if name not in NAMES:
    close = difflib.get_close_matches(name, NAMES, n=1, cutoff=0.5)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise ValueError(
      f"There is no schedule {name!r}; there are {', '.join(NAMES)}{hint}"
    )
  return NAMES[name]
