"""Formatting of bytes, FLOPs, seconds and shares."""


def size(number: float | int) -> str:
  """Returns bytes, such as `1.50 GiB`."""
  for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
    if number >= scale:
      return f"{number / scale:,.2f} {unit}"
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
