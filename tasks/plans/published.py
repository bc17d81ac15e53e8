"""Published step times, compared with the estimates of their plans.

`published.json` has a row for each run: the command of its plan, the published
seconds, and what the plan said (`tools/plans --accuracy --update` makes it
again). From that, without a compiler, follow the estimates by the present
load, stragglers and casts of `estimate.efficiency`, their errors, and the fit
of load and stragglers with and without each row. The rows are used so:

  fit    the run is of the target's board
  board  another board with the same name (500 W, 2.4 TB/s): not in the fit
  check  not in the fit either; compared only
"""

from collections.abc import Iterable, Sequence
import dataclasses
import datetime
import json
import math
import pathlib
import statistics
from typing import Final

import numpy as np

from paxon.runner import user_error
from paxon.runner.configuration import overrides as overrides_lib
from paxon.runner.plan import target as targets
from paxon.runner.plan.estimate import efficiency
from paxon.runner.planning import child
from paxon.sharding import suggestions

FILE: Final = pathlib.Path(__file__).with_name("published.json")
BEGIN: Final = "<!-- published begins -->"
END: Final = "<!-- published ends -->"

_FITTED: Final = ("h100", "h200")
_TIME_LIMIT: Final = 1800.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
  """A published run and the plan of its program.

  Attributes:
    name: Of the row.
    source: Publication.
    experiment: As `--exp` takes it.
    target: As `--target` takes it.
    assigned: Values by knob, as `--fdl` takes them.
    seconds: Published seconds of a step.
    use: `fit`, `board` or `check`, see the module.
    simulated: Seconds of the simulation, without `slowdown`.
    ideal: Seconds of the model FLOPs at the bfloat16 peak, with every key.
    low_precision: Share of the FLOPs with operands of 8 bits.
    date: Day of the plan.
  """

  name: str
  source: str
  experiment: str
  target: str
  assigned: dict[str, str]
  seconds: float
  use: str
  simulated: float
  ideal: float
  low_precision: float
  date: str

  @property
  def kind(self) -> str:
    """Name of the hardware."""
    return self._target.hardware.name

  @property
  def factors(self) -> efficiency.Efficiency:
    """Default factors of the hardware."""
    found = efficiency.choose(self._target.hardware, {})
    assert found is not None
    return found

  @property
  def estimate(self) -> float:
    """Seconds of a step, as the plan prints them."""
    return self.simulated * self.factors.slowdown(
      num_devices=self._target.num_devices,
      num_hosts=self.num_hosts,
      low_precision=self.low_precision,
    )

  @property
  def error(self) -> float:
    """Share by which the estimate is longer than published."""
    return self.estimate / self.seconds - 1

  @property
  def num_hosts(self) -> int:
    """Number of hosts."""
    target = self._target
    return math.ceil(target.num_devices / target.hardware.devices_per_host)

  @property
  def band(self) -> tuple[float, float]:
    """Multiples of the estimate between which the run is expected."""
    is_alone = self._target.num_devices == 1
    return self.factors.lone_band if is_alone else self.factors.band

  @property
  def _target(self) -> targets.Target:
    return targets.parse(self.target)


def read() -> tuple[Row, ...]:
  """Returns the stored rows."""
  return tuple(Row(**each) for each in json.loads(FILE.read_text()))


def find(names: Sequence[str]) -> tuple[Row, ...]:
  """Returns the runs with these names, or all.

  Raises:
    UserError: There is no such run.
  """
  rows = {row.name: row for row in read()}
  for name in names:
    if name not in rows:
      raise user_error.UserError(
        f"There is no published run {name!r}{suggestions.suggest(name, rows)}"
      )
  return tuple(rows[name] for name in names) or tuple(rows.values())


def update(rows: Iterable[Row]) -> None:
  """Plans rows, prints and stores what the plans say."""
  for row in rows:
    plan = child.plan(
      row.experiment,
      [overrides_lib.Override(*item) for item in row.assigned.items()],
      targets.parse(row.target),
      is_compiled=True,
      time_limit=_TIME_LIMIT,
    )
    found = plan.estimate
    if found is None:
      raise user_error.UserError(
        f"{row.name} has no estimate: {' '.join(plan.notes)}"
      )
    peak = targets.parse(row.target).hardware.peak_flops()
    assert peak is not None
    counts = plan.flops.by_dtype
    low = sum(n for dtype, n in counts.items() if dtype.startswith("float8"))
    new = dataclasses.replace(
      row,
      simulated=float(f"{found.step / found.slowdown:.5g}"),
      ideal=float(f"{plan.flops.model / plan.num_devices / peak:.5g}"),
      low_precision=round(low / sum(counts.values()), 4),
      date=datetime.datetime.now(tz=datetime.UTC).strftime("%Y-%m-%d"),
    )
    print(f"{row.name}: {row.simulated:g} s -> {new.simulated:g} s", flush=True)
    _write([new if each.name == row.name else each for each in read()])


def _write(rows: Sequence[Row]) -> None:
  stored = [dataclasses.asdict(row) for row in rows]
  FILE.write_text(json.dumps(stored, indent=2) + "\n")


def fit(rows: Iterable[Row]) -> tuple[float, float]:
  """Returns load and stragglers of Hopper by least squares of logarithms.

  Args:
    rows: Rows, of which those in the fit count.
  """
  used = [row for row in rows if row.use == "fit" and row.kind in _FITTED]
  known = [
    row.factors.slowdown(
      num_devices=1, num_hosts=1, low_precision=row.low_precision
    )
    for row in used
  ]
  logarithms = [
    math.log(row.seconds / row.simulated / casts)
    for row, casts in zip(used, known, strict=True)
  ]
  columns = [(1.0, math.sqrt(2 * math.log(row.num_hosts))) for row in used]
  load, stragglers = np.linalg.lstsq(
    np.array(columns), np.array(logarithms), rcond=None
  )[0]
  return float(load), float(stragglers)


def leave_out(row: Row, rows: Iterable[Row]) -> float:
  """Returns a row's error with factors that were fitted without it."""
  num_devices = targets.parse(row.target).num_devices
  if row.kind not in _FITTED or num_devices == 1:
    return row.error
  load, stragglers = fit(each for each in rows if each is not row)
  factors = dataclasses.replace(row.factors, load=load, stragglers=stragglers)
  slowdown = factors.slowdown(
    num_devices=num_devices,
    num_hosts=row.num_hosts,
    low_precision=row.low_precision,
  )
  return row.simulated * slowdown / row.seconds - 1


def is_covered(row: Row, error: float) -> bool:
  """Returns whether the band around an estimate has the published time."""
  low, high = row.band
  return low <= 1 / (1 + error) <= high


def text() -> str:
  """Returns the tables of all rows."""
  rows = read()
  lines = [
    "| row | target | use | published | MFU | estimate | error | without"
    " itself | in band | date |",
    "|" + " --- |" * 10,
  ]
  for row in rows:
    left_out = leave_out(row, rows)
    lines.append(
      f"| {row.name} | `{row.target}` | {row.use} | {row.seconds:.4g} s |"
      f" {row.ideal / row.seconds:.0%} | {row.estimate:.3g} s |"
      f" {row.error:+.0%} | {left_out:+.0%} |"
      f" {'yes' if is_covered(row, left_out) else 'no'} | {row.date} |"
    )
  lines += ["", *_summarize(rows), ""]
  lines += ["Commands: `--mode=plan --plan_programs=train` and", ""]
  for row in rows:
    flags = " ".join(f"--fdl.{k}={v}" for k, v in row.assigned.items())
    lines.append(
      f"- `{row.name}`: `--exp={row.experiment} --target={row.target} {flags}`."
      f" Published: {row.source}."
    )
  return "\n".join(lines) + "\n"


def _summarize(rows: Sequence[Row]) -> list[str]:
  """Returns the errors by hardware, each without the run itself."""
  lines = [
    "| hardware | runs | median error | largest | in band | constant MFU,"
    " median error |",
    "|" + " --- |" * 6,
  ]
  groups = {"all": list(rows)}
  for row in rows:
    family = "h100, h200" if row.kind in _FITTED else row.kind
    groups.setdefault(family, []).append(row)
  for name, members in groups.items():
    left_out = [leave_out(row, rows) for row in members]
    errors = [abs(error) for error in left_out]
    covered = sum(map(is_covered, members, left_out))
    lines.append(
      f"| {name} | {len(members)} | {statistics.median(errors):.0%} |"
      f" {max(errors):.0%} | {covered} of {len(members)} |"
      f" {_constant_mfu(members)} |"
    )
  load, stragglers = fit(rows)
  return [
    *lines,
    "",
    f"Fit: load {load:.3f}, stragglers {stragglers:.3f}. Rank correlation of"
    f" MFU on h100 and h200: {_rank_correlation(rows):.2f}.",
  ]


def _constant_mfu(rows: Sequence[Row]) -> str:
  """The median error of the other rows' median MFU."""
  if len(rows) < 2:
    return "-"
  errors = []
  for row in rows:
    others = [each.ideal / each.seconds for each in rows if each is not row]
    errors.append(abs(row.ideal / statistics.median(others) / row.seconds - 1))
  return f"{statistics.median(errors):.0%}"


def _rank_correlation(rows: Iterable[Row]) -> float:
  used = [row for row in rows if row.kind in _FITTED]
  published, estimated = (
    np.argsort(np.argsort(values))
    for values in (
      [row.ideal / row.seconds for row in used],
      [row.ideal / row.estimate for row in used],
    )
  )
  return float(np.corrcoef(published, estimated)[0, 1])


def replace_section(page: str) -> str:
  """Returns a page with the tables between its two marks.

  Raises:
    UserError: The page has no marks.
  """
  before, begin, rest = page.partition(BEGIN)
  _, end, after = rest.partition(END)
  if not begin or not end:
    raise user_error.UserError(f"The page has no {BEGIN} ... {END}.")
  return f"{before}{begin}\n{text()}{end}{after}"
