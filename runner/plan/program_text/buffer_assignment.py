"""Buffers of a compiled program in the memory of its device, over time.

XLA writes where each value of a program is stored (`buffer-assignment.txt`) and
from which to which instruction it is live (`live-range.txt`). The peak that
`memory_analysis()` returns is the larger of the device's memory and the host's
if a program offloads values; here, memory spaces are apart.
"""

from collections.abc import Iterable, Iterator, Mapping
import dataclasses
import itertools
import pathlib
import re
from typing import Final

_FILES: Final = (
  "*optimizations-buffer-assignment.txt",
  "*optimizations-live-range.txt",
)
_ALLOCATION: Final = re.compile(r"allocation \d+: size (\d+), (.*):$")
_COLOR: Final = re.compile(r"\bcolor ([1-9]\d*)\b")
_TEMPORARY: Final = "preallocated-temp"
_VALUE: Final = re.compile(
  r" value: <\d+ (\S+?)(\{[\d,]*\})? (?:\(phi\) )?@\d+>"
  r" \(size=(\d+),offset=(\d+)\): (\S.*)$"
)
_RANGE: Final = re.compile(r"    (\S+?)(\{[\d,]*\}):(\d+)-(\d+)$")

# An instruction and the index in its tuple, such as `("while", "{1}")`.
_Name = tuple[str, str]


class ReadError(ValueError):
  """Files that are missing, or that are not understood."""


@dataclasses.dataclass(frozen=True)
class Value:
  """A value in a buffer.

  Attributes:
    instruction: Name of the instruction that returns it.
    index: Indices into the tuple that the instruction returns, if it does.
    type: Its type, as HLO writes it.
    num_bytes: Its size, with padding.
  """

  instruction: str
  index: tuple[int, ...]
  type: str
  num_bytes: int


@dataclasses.dataclass(frozen=True)
class Buffers:
  """Buffers in the main memory of a device.

  Attributes:
    lasting: Bytes of arguments, results and constants, which are allocated
      during the whole program.
    peak: Largest number of bytes in use at once, `lasting` included.
    at_peak: For each temporary buffer in use at that time, the values that
      share it, the largest first.
  """

  lasting: int
  peak: int
  at_peak: tuple[tuple[Value, ...], ...]


@dataclasses.dataclass(frozen=True)
class _Stored:
  value: Value
  first: int
  last: int


def read(folder: pathlib.Path) -> Buffers:
  """Reads the files that XLA wrote about one program.

  Args:
    folder: Where `xla_dump_to` made it write them.

  Raises:
    ReadError: There is none, or it has another form.
  """
  texts = []
  for pattern in _FILES:
    # The largest is that of the program; others are of kernels.
    found = sorted(folder.glob(pattern), key=lambda file: file.stat().st_size)
    if not found:
      raise ReadError(f"the compiler wrote no file {pattern}")
    texts.append(found[-1].read_text())
  return parse(*texts)


def parse(assignment: str, live_ranges: str) -> Buffers:
  """Reads the two texts.

  Args:
    assignment: Text of `buffer-assignment.txt`.
    live_ranges: Text of `live-range.txt`.

  Raises:
    ReadError: A text has another form.
  """
  ranges = dict(_find_ranges(live_ranges.splitlines()))
  lasting, slots = _find_slots(assignment.splitlines(), ranges)
  if not lasting and not slots:
    raise ReadError("the text lists no allocation")
  time, used = _find_peak(slots)
  live = (
    tuple(s.value for s in slot if s.first <= time <= s.last) for slot in slots
  )
  at_peak = [
    tuple(sorted(values, key=lambda value: -value.num_bytes))
    for values in live
    if values
  ]
  at_peak.sort(key=lambda values: -values[0].num_bytes)
  return Buffers(lasting, lasting + used, tuple(at_peak))


def _find_ranges(
  lines: Iterable[str],
) -> Iterator[tuple[_Name, tuple[int, int]]]:
  for line in lines:
    if match := _RANGE.match(line):
      yield (match[1], match[2]), (int(match[3]), int(match[4]))


def _find_slots(
  lines: Iterable[str], ranges: Mapping[_Name, tuple[int, int]]
) -> tuple[int, list[list[_Stored]]]:
  """Returns the bytes that last, and the values of each temporary buffer."""
  lasting = allocation = 0
  is_temporary = False
  slots: dict[tuple[int, int], list[_Stored]] = {}
  for line in lines:
    if match := _ALLOCATION.match(line):
      allocation += 1
      is_elsewhere = _COLOR.search(match[2]) or "thread-local" in match[2]
      is_temporary = _TEMPORARY in match[2] and not is_elsewhere
      if not is_temporary and not is_elsewhere:
        lasting += int(match[1])
    elif is_temporary and (match := _VALUE.match(line)):
      name = match[1], match[2] or "{}"
      if name not in ranges:
        raise ReadError(f"the live range of {match[1]} is missing")
      index = tuple(int(n) for n in re.findall(r"\d+", name[1]))
      value = Value(match[1], index, match[5], int(match[3]))
      stored = _Stored(value, *ranges[name])
      slots.setdefault((allocation, int(match[4])), []).append(stored)
  return lasting, list(slots.values())


def _find_peak(slots: Iterable[list[_Stored]]) -> tuple[int, int]:
  """Returns when most temporary bytes are in use, and how many."""
  changes: dict[int, int] = {}
  for slot in slots:
    times = sorted({t for s in slot for t in (s.first, s.last + 1)})
    for begin, end in itertools.pairwise(times):
      size = max(
        (s.value.num_bytes for s in slot if s.first <= begin <= s.last),
        default=0,
      )
      changes[begin] = changes.get(begin, 0) + size
      changes[end] = changes.get(end, 0) - size
  used = most = when = 0
  for time in sorted(changes):
    used += changes[time]
    if used > most:
      most, when = used, time
  return when, most
