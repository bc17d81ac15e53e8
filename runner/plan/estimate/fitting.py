"""Calibrations from measurements: of small programs, or of a training run."""

from collections.abc import Mapping, Sequence
import dataclasses
import datetime
import statistics

from paxon.runner import user_error
from paxon.runner.plan import hardware, result
from paxon.runner.plan.estimate import calibration as calibrations
from paxon.runner.plan.estimate import microbenchmarks

# What small programs do not have, and training steps do: kernels of all shapes,
# hosts that hiccup, links that several collectives share.
_BAND_OF_MICROBENCHMARKS = (0.8, 1.4)
# Other programs of the same machine.
_BAND_OF_RUN = (0.85, 1.18)
_TERA = 1e12

# Of the tokens of a batch that a run must have counted; the rest is padding.
_LEAST_TOKENS = 0.5
_MOST_TOKENS = 1.001


def from_microbenchmarks(
  found: microbenchmarks.Measurements,
  *,
  kind: hardware.Hardware,
  where: str,
  versions: Mapping[str, str],
  today: datetime.date,
) -> calibrations.Calibration:
  """Returns the calibration that small programs give.

  Args:
    found: What they measured.
    kind: The hardware.
    where: The machine, for the calibration's source.
    versions: Of libraries.
    today: The date.
  """
  notes = [f"microbenchmarks on {where}"]
  rates = None
  if kind.flops:
    sheet = calibrations.for_hardware(kind)
    assert sheet is not None
    matmul = {
      dtype: rate / kind.flops[dtype]
      for dtype, rate in found.products.items()
      if dtype in kind.flops
    }
    matmul[calibrations.DEFAULT] = min(matmul.values())
    memory = _share(found.memory, kind.memory_bandwidth)
    link, network = sheet.fast_link, sheet.network
    if found.link is None:
      notes.append("links as in the package's file, because it is one device")
    else:
      link = _share(found.link, kind.link_bandwidth)
      notes.append("network as in the package's file")
    attention = min(matmul.values())
    if found.attention is not None:
      attention = found.attention / kind.flops["bfloat16"]
  else:
    # No data sheet: the best that was seen stands in for it.
    rates = calibrations.DeviceRates(
      flops=found.best_products,
      memory=found.memory,
      fast_link=found.link or found.memory,
      network=None,
    )
    matmul = {
      dtype: rate / found.best_products[dtype]
      for dtype, rate in found.products.items()
    }
    matmul[calibrations.DEFAULT] = min(matmul.values())
    memory = link = network = 1.0
    attention = min(matmul.values())
  return calibrations.Calibration(
    hardware=(kind.name,),
    measured=True,
    date=today.isoformat(),
    source="; ".join(notes),
    versions=versions,
    band=_BAND_OF_MICROBENCHMARKS,
    kernel_overhead=found.overhead,
    matmul=matmul,
    attention=attention,
    memory=memory,
    fast_link=link,
    network=network,
    rates=rates,
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunTime:
  """How fast a run was.

  Attributes:
    seconds: Of a step, the median over its reports, the first left out.
    spread: Half the distance of the quartiles over the median.
    reports: How many there were.
  """

  seconds: float
  spread: float
  reports: int


def time_of_run(
  reports: Sequence[Mapping[str, float]], plan: result.Plan, *, name: str
) -> RunTime:
  """Returns the time of a step of a run.

  Args:
    reports: The values of its training's lines in `metrics.jsonl`.
    plan: Of the same configuration, for the same devices.
    name: Of the run, for messages.

  Raises:
    UserError: There are too few reports, or the run is of another program than
      the plan.
  """
  if plan.flops.causal_model is None:
    raise user_error.UserError(
      f"The plan of {plan.experiment} has no token batch, so its time cannot be"
      " compared with that of a run."
    )
  flops = plan.flops.causal_model / plan.num_devices / _TERA
  # The first is of the time in which the program also starts.
  pairs = [
    (flops / values["model_tflops_per_device"], values["tokens_per_second"])
    for values in reports[1:]
    if values.get("model_tflops_per_device") and "tokens_per_second" in values
  ]
  if len(pairs) < 2:
    raise user_error.UserError(
      f"The run {name} has {len(pairs)} reports of its speed after the first;"
      " at least 2 are needed. Let it train longer, or set"
      " --fdl.summary_every_steps."
    )
  seconds = sorted(pair[0] for pair in pairs)
  median = statistics.median(seconds)
  rows, length = next(iter(plan.batch.values()))[:2]
  tokens = statistics.median(time * rate for time, rate in pairs)
  if not _LEAST_TOKENS <= tokens / (rows * length) <= _MOST_TOKENS:
    raise user_error.UserError(
      f"The run {name} differs from the plan: by the plan's FLOPs and the"
      f" run's metrics, a step has {tokens:.0f} tokens, but a batch of the plan"
      f" has {rows * length}. Plan it with the overrides of the run."
    )
  quarter = len(seconds) // 4
  spread = (seconds[-1 - quarter] - seconds[quarter]) / 2 / median
  return RunTime(seconds=median, spread=spread, reports=len(seconds))


def from_run(
  time: RunTime,
  plan: result.Plan,
  before: calibrations.Calibration,
  *,
  name: str,
  versions: Mapping[str, str],
  today: datetime.date,
) -> calibrations.Calibration:
  """Returns a calibration with which the plan's estimate is a run's time.

  All rates change by the same factor: one time cannot tell which of them was
  wrong.

  Args:
    time: Of the run.
    plan: Its plan, with an estimate.
    before: The calibration that this estimate was made with.
    name: Of the run.
    versions: Of libraries.
    today: The date.

  Raises:
    UserError: The plan has no estimate, or it was made with another
      calibration.
  """
  estimate = plan.estimate
  if estimate is None:
    why = " ".join(note for note in plan.notes if "not predicted" in note)
    raise user_error.UserError(
      f"The plan of {plan.experiment} on {plan.target} has no estimate to"
      f" correct. {why}".rstrip()
    )
  if estimate.source != before.summary:
    raise user_error.UserError(
      f"The plan's estimate was made with {estimate.source!r}, not with"
      f" {before.summary!r}; set {calibrations.VARIABLE} as it was then."
    )
  factor = time.seconds / estimate.step
  lower, upper = _BAND_OF_RUN
  after = before.slower(factor)
  return dataclasses.replace(
    after,
    measured=True,
    date=today.isoformat(),
    source=f"run {name} of {plan.experiment} on {plan.num_devices}"
    f" {plan.device_kind}, {time.reports} reports: {time.seconds:.4g} s a step,"
    f" {factor:.3g} times what these said: {before.source}",
    versions=versions,
    band=(
      min(lower, max(1 - 2 * time.spread, 0.1)),
      max(upper, 1 + 2 * time.spread),
    ),
  )


def _share(rate: float, of: float | None) -> float:
  assert of is not None
  return rate / of
