"""Check of all devices (`--check_devices`, `--mode=check_devices`).

Each process measures its devices, all gather the measurements, and process 0
prints a table. A device is

  wrong   if a program has any other result than the known one
  slow    if its matmul or its memory reaches less than 0.8 of the median of the
          other devices of its kind, or less than half of the datasheet; or if
          the link to it has less than half of the median of the other links,
          of which those between two processes are compared with each other

A wrong device ends all processes with `ExitStatus.DEVICES`.
"""

import collections
from collections.abc import Callable, Hashable, Mapping, Sequence
import dataclasses
import os
import statistics

import jax

from paxon.runner import exit_status, user_error
from paxon.runner.checkpoints import text_table
from paxon.runner.devices import device_speed
from paxon.runner.hosts import agreement, joining, process_failures
from paxon.runner.plan import hardware

_Measure = Callable[[], Sequence[device_speed.Measurement]]
# Less of the median of the others, or of the datasheet, is slow. Routes of
# links differ.
_OF_OTHERS = {
  device_speed.MATMUL: 0.8,
  device_speed.MEMORY: 0.8,
  device_speed.RING: 0.5,
}
_OF_DATASHEET = 0.5
_MAX_LINES, _MAX_NAMED = 16, 4
_HEADER = (
  "device",
  "process",
  "host",
  "TFLOP/s",
  "of table",
  "GB/s",
  "of table",
  "ring GB/s",
  "result",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
  """A judged device.

  Attributes:
    measured: Its measurement.
    shares: Shares of the datasheet's rates by program, where it has them.
    slow: Shares of what was expected, by the program that is slow.
  """

  measured: device_speed.Measurement
  shares: Mapping[str, float]
  slow: Mapping[str, str]

  def describe(self) -> str:
    """Returns the result in words."""
    parts = [f"wrong {name}" for name in self.measured.wrong]
    parts += [f"slow {name} ({share})" for name, share in self.slow.items()]
    return ", ".join(parts) or "ok"


def run(
  *,
  is_strict: bool,
  timeout_seconds: float = 300.0,
  measure: _Measure = device_speed.measure,
) -> None:
  """Checks the devices; all processes call it.

  Args:
    is_strict: Whether a slow device ends the process, too.
    timeout_seconds: Time after which the process ends with `ExitStatus.HANG`.
    measure: Returns the measurements of this process.

  Raises:
    UserError: A device fails or is wrong, or slow in a strict check.
  """
  with joining.Deadline(
    timeout_seconds,
    lambda: (
      f"The devices were not checked within {timeout_seconds:g} s"
      " (--host_timeout): a device or a link hangs."
    ),
    status=exit_status.ExitStatus.HANG,
  ):
    own = [dataclasses.asdict(each) for each in _measure_here(measure)]
    gathered = agreement.gather(own)
  found = judge(
    [device_speed.Measurement(**each) for one in gathered for each in one]
  )
  print("\n".join(format_lines(found)), flush=True)
  wrong = [each for each in found if each.measured.wrong]
  slow = [each for each in found if each.slow]
  problem = ""
  if wrong:
    problem = f"Devices compute wrong values: {_name(wrong, found)}"
  elif slow:
    problem = f"Devices are slow: {_name(slow, found)}"
  if wrong or (slow and is_strict):
    raise user_error.UserError(
      f"{problem}. Start again without them."
    ).with_status(exit_status.ExitStatus.DEVICES)
  if slow:
    print(f"warning: {problem}", flush=True)


def _measure_here(measure: _Measure) -> Sequence[device_speed.Measurement]:
  """Calls a function; a device that fails is a `UserError`."""
  try:
    return measure()
  except jax.errors.JaxRuntimeError as error:
    is_peer = process_failures.is_peer_failure(str(error))
    if is_peer or exit_status.find(error) is exit_status.ExitStatus.MEMORY:
      raise
    raise user_error.UserError(
      f"A device of process {jax.process_index()} ({os.uname().nodename})"
      f" failed: {str(error).partition(chr(10))[0]}"
    ).with_status(exit_status.ExitStatus.DEVICES) from error


def judge(
  measurements: Sequence[device_speed.Measurement],
) -> list[Finding]:
  """Compares devices with the datasheet and with each other."""
  slow: list[dict[str, str]] = [{} for _ in measurements]
  shares: list[dict[str, float]] = [{} for _ in measurements]
  for name, least in _OF_OTHERS.items():
    groups: dict[Hashable, dict[int, float]] = {}
    for index, each in enumerate(measurements):
      rate: float | None = getattr(each, name)
      if rate is None:
        continue
      is_link = name == device_speed.RING
      group = each.kind, each.is_across and is_link
      groups.setdefault(group, {})[index] = rate
      expected = _find_datasheet_rate(each.kind, name)
      if expected is not None:
        shares[index][name] = rate / expected
    for rates in groups.values():
      for index, median in _find_medians_of_others(rates).items():
        if rates[index] < least * median:
          share = rates[index] / median
          slow[index][name] = f"{share:.2f} of the median of the others"
  for index, of_device in enumerate(shares):
    for name, share in of_device.items():
      if share < _OF_DATASHEET:
        slow[index].setdefault(name, f"{share:.2f} of the datasheet")
  return [
    Finding(measured=each, shares=of_table, slow=problems)
    for each, of_table, problems in zip(measurements, shares, slow, strict=True)
  ]


def _find_datasheet_rate(kind: str, name: str) -> float | None:
  found = hardware.find_by_device_kind(kind)
  if found is None or name == device_speed.RING:
    # Consecutive devices need not be neighbors.
    return None
  if name == device_speed.MEMORY:
    return found.memory_bandwidth
  return found.peak_flops()


def _find_medians_of_others(rates: Mapping[int, float]) -> dict[int, float]:
  """Returns the median of all values but its own, for each of several."""
  if len(rates) == 1:
    return {}
  ordered = sorted(rates, key=lambda index: rates[index])
  values = [rates[index] for index in ordered]
  return {
    index: statistics.median(values[:position] + values[position + 1 :])
    for position, index in enumerate(ordered)
  }


def format_lines(found: Sequence[Finding]) -> list[str]:
  """Returns a table of the devices, of large runs only those with a problem."""
  shown = list(found)
  if len(shown) > _MAX_LINES:
    shown = [each for each in found if each.describe() != "ok"][:_MAX_LINES]
  rows = [_HEADER, *map(_make_row, shown)]
  right = range(3, len(_HEADER) - 1)
  lines = text_table.format_lines(rows, right=right) if shown else []
  if len(shown) < len(found):
    matmul = statistics.median(each.measured.matmul for each in found)
    memory = statistics.median(each.measured.memory for each in found)
    ok = sum(each.describe() == "ok" for each in found)
    lines.append(
      f"{len(found)} devices, {ok} of them ok; medians:"
      f" {_format(matmul / 1e12)} TFLOP/s, {_format(memory / 1e9)} GB/s"
    )
  return lines


def _make_row(found: Finding) -> tuple[str, ...]:
  each = found.measured
  shares = {name: f"{share:.0%}" for name, share in found.shares.items()}
  return (
    each.device,
    f"{each.process}",
    each.host,
    _format(each.matmul / 1e12),
    shares.get(device_speed.MATMUL, "-"),
    _format(each.memory / 1e9),
    shares.get(device_speed.MEMORY, "-"),
    "-" if each.ring is None else _format(each.ring / 1e9),
    found.describe(),
  )


def _format(number: float) -> str:
  return f"{number:.3g}" if number < 1000 else f"{number:,.0f}"


def _name(problems: Sequence[Finding], found: Sequence[Finding]) -> str:
  """Returns the processes with problems, and the first device of each."""
  sizes = collections.Counter(each.measured.process for each in found)
  by_process: dict[int, list[Finding]] = {}
  for each in problems:
    by_process.setdefault(each.measured.process, []).append(each)
  names = [
    f"{len(group)} of {sizes[process]} devices of process {process}"
    f" ({group[0].measured.host}), {group[0].measured.device}:"
    f" {group[0].describe()}"
    for process, group in list(by_process.items())[:_MAX_NAMED]
  ]
  if len(by_process) > _MAX_NAMED:
    names.append(f"{len(by_process) - _MAX_NAMED} more processes")
  return "; ".join(names)
