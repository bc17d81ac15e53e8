"""Formatting of bytes, FLOPs, seconds and shares."""

_BYTE_PREFIXES = "KMGTPE"


def size(number: float | int) -> str:
  """Returns bytes, such as `1.50 GiB`."""
  for power in range(len(_BYTE_PREFIXES), 0, -1):
    if number >= 1024**power:
      return f"{number / 1024**power:,.2f} {_BYTE_PREFIXES[power - 1]}iB"
  return f"{number:.0f} B"


def flops(number: float | int) -> str:
  """Returns FLOPs, such as `12.897 GFLOP`."""
  for unit, scale in (("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9)):
    if number >= scale:
      return f"{number / scale:,.3f} {unit}FLOP"
  return f"{number / 1e6:.3f} MFLOP" if number else "0 FLOP"


def seconds(number: float | int) -> str:
  """Returns a time, such as `1.25 s`, `12.5 ms` or `18.4 us`."""
  if number == 0:
    return "0 s"
  if number >= 1:
    return f"{number:,.2f} s"
  unit, scale = ("ms", 1e3) if number >= 1e-3 else ("us", 1e6)
  return f"{_digits(scale * number)} {unit}"


def share(number: float | int) -> str:
  """Returns a share of 1 as percent, such as `42 %` or `0.4 %`."""
  percent = 100 * number
  if 0 < percent < 0.1:
    return "< 0.1 %"
  return f"{percent:.0f} %" if percent >= 9.95 else f"{percent:.1f} %"


def _digits(number: float | int) -> str:
  """Three digits that count, never as a power of ten."""
  if number >= 99.95:
    return f"{number:.0f}"
  if number >= 9.995:
    return f"{number:.1f}"
  return f"{number:.2f}" if number >= 0.01 else "< 0.01"
