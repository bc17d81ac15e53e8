"""Generator of `docs/plan_accuracy.md`: predicted and published MFU."""

from collections.abc import Callable, Iterable, Sequence
import dataclasses
import json
import statistics
from typing import Any, Final

from paxon.runner.plan import result
from paxon.tools import published_speeds

_VERSION: Final = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prediction:
  """The prediction of a plan for a published speed.

  Attributes:
    name: Name of the published speed.
    bound_mfu: Upper bound of the MFU.
    bound_step: Lower bound of the step time, in seconds.
    estimate: Estimated step time.
    used: Peak memory as a share of usable memory.
    date: Date of the plan.
    fingerprint: Fingerprint of the compiled program.
    versions: Library versions.
  """

  name: str
  bound_mfu: float
  bound_step: float
  estimate: result.Estimate
  used: float
  date: str
  fingerprint: str
  versions: dict[str, str]


def of_plan(name: str, plan: result.Plan, *, date: str) -> Prediction:
  """Returns the prediction of a plan.

  Args:
    name: Name of the published speed.
    plan: Plan of its experiment.
    date: Date of the plan.

  Raises:
    ValueError: The plan has no estimate.
  """
  if plan.estimate is None or plan.bound is None or not plan.memory.peak:
    said = [plan.memory.compiler_error, *plan.notes]
    raise ValueError(f"{name} has no estimate: {' '.join(filter(None, said))}")
  return Prediction(
    name=name,
    bound_mfu=plan.bound.mfu,
    bound_step=plan.bound.step,
    estimate=plan.estimate,
    used=plan.memory.peak / (plan.memory.usable or plan.memory.peak),
    date=date,
    fingerprint=plan.fingerprint or "",
    versions=dict(plan.versions),
  )


def to_json(predictions: Iterable[Prediction]) -> str:
  """Returns the contents of `docs/plan_accuracy.json`."""
  rows = [dataclasses.asdict(prediction) for prediction in predictions]
  content = {"version": _VERSION, "predictions": rows}
  return json.dumps(content, indent=2) + "\n"


def from_json(text: str) -> dict[str, Prediction]:
  """Returns stored predictions by name.

  Raises:
    ValueError: The file has another version.
  """
  content = json.loads(text)
  if content.get("version") != _VERSION:
    raise ValueError(
      f"These predictions have version {content.get('version')}, not"
      f" {_VERSION}; make them again."
    )
  return {row["name"]: _prediction(row) for row in content["predictions"]}


def _prediction(row: dict[str, Any]) -> Prediction:
  estimate = row["estimate"]
  return Prediction(
    **row
    | {
      "estimate": result.Estimate(
        **estimate | {"band": tuple(estimate["band"])}
      )
    }
  )


Pair = tuple[published_speeds.Speed, Prediction]

# Predicted MFUs by column title.
_WAYS: Final[dict[str, Callable[[Prediction], float]]] = {
  "matmuls only, at peak": lambda p: p.estimate.ceiling_mfu,
  "upper bound": lambda p: p.bound_mfu,
  "simulated, data sheet": lambda p: p.estimate.datasheet_mfu,
  "estimate": lambda p: p.estimate.mfu,
}
_ESTIMATE: Final = "estimate"


def to_markdown(predictions: dict[str, Prediction]) -> str:
  """Returns the page.

  Args:
    predictions: Predictions by name of the speed; some may be missing.
  """
  pairs = [
    (speed, predictions[speed.name])
    for speed in published_speeds.ALL
    if speed.name in predictions
  ]
  missing = [s.name for s in published_speeds.ALL if s.name not in predictions]
  parts = [
    _INTRODUCTION,
    _table(
      (
        "model",
        "target",
        "published MFU",
        *_WAYS,
        "band",
        "in band",
        "error",
      ),
      (_row(*pair) for pair in pairs),
    ),
  ]
  if missing:
    parts.append(f"Not predicted yet: {', '.join(missing)}.")
  parts += [_ERRORS, _errors(pairs), _verdict(pairs), _TIME, _times(pairs)]
  parts += [_REASONS, _reasons(pairs), _GENERAL, _how(pairs)]
  return "\n\n".join(parts) + "\n"


def spearman(a: Sequence[float], b: Sequence[float]) -> float | None:
  """Returns the rank correlation; None if one side is constant.

  Equal values share the mean of their ranks.
  """
  ranks = _ranks(a), _ranks(b)
  if any(len(set(side)) < 2 for side in ranks):
    return None
  return statistics.correlation(*ranks)


def _ranks(values: Sequence[float]) -> list[float]:
  ordered = sorted(values)
  return [
    ordered.index(value) + (ordered.count(value) - 1) / 2 for value in values
  ]


def _row(speed: published_speeds.Speed, found: Prediction) -> list[str]:
  lower, upper = _band(found)
  is_inside = lower <= speed.mfu <= upper
  return [
    speed.name,
    f"`{speed.target}`",
    _percent(speed.mfu),
    *(_percent(way(found)) for way in _WAYS.values()),
    f"{100 * lower:.0f} to {_percent(upper)}",
    "yes" if is_inside else "no",
    _error(speed, found),
  ]


def _error(speed: published_speeds.Speed, found: Prediction) -> str:
  """Returns the error of the estimate, in points of MFU."""
  # Rounded first, so that there is no -0.
  return f"{round(100 * (found.estimate.mfu - speed.mfu)):+d}"


def _band(found: Prediction) -> tuple[float, float]:
  """Returns the MFU at the longest and at the shortest step time."""
  shortest, longest = found.estimate.band
  return found.estimate.mfu / longest, found.estimate.mfu / shortest


def _errors(pairs: Sequence[Pair]) -> str:
  rows = []
  series = dict.fromkeys(speed.series for speed, _ in pairs)
  groups = [
    (name, [p for p in pairs if p[0].series == name]) for name in series
  ]
  if len(groups) > 1:
    groups.append(("all", list(pairs)))
  for name, group in groups:
    published = [speed.mfu for speed, _ in group]
    for way, of in _WAYS.items():
      predicted = [of(found) for _, found in group]
      rows.append(_error_row(name, way, predicted, published))
    if len(group) > 1:
      others = [
        statistics.fmean(published[:i] + published[i + 1 :])
        for i in range(len(published))
      ]
      # Leave-one-out means are in reverse order by construction.
      row = _error_row(name, "mean of the others", others, published)
      rows.append([*row[:-1], "-"])
  heads = (
    "models",
    "prediction",
    "mean error",
    "largest error",
    "rank correlation",
  )
  return _table(heads, rows)


def _error_row(
  group: str, way: str, predicted: list[float], published: list[float]
) -> list[str]:
  errors = [100 * abs(a - b) for a, b in zip(predicted, published, strict=True)]
  order = spearman(predicted, published) if len(predicted) > 2 else None
  return [
    group,
    way,
    f"{statistics.fmean(errors):.1f}",
    f"{max(errors):.0f}",
    "-" if order is None else f"{order:+.2f}",
  ]


def _verdict(pairs: Sequence[Pair]) -> str:
  inside = sum(_row(*pair)[-2] == "yes" for pair in pairs)
  return (
    f"{inside} of {len(pairs)} published MFUs are within the band of their"
    " estimate."
  )


def _times(pairs: Sequence[Pair]) -> str:
  axes = dict.fromkeys(
    axis
    for _, found in pairs
    for axis, seconds in found.estimate.exposed.items()
    if seconds > 0.005 * found.estimate.step
  )
  heads = ("model", "step time", "matmuls", "memory-bound", "between kernels")
  rows = []
  for speed, found in pairs:
    estimate = found.estimate
    parts = [estimate.compute, estimate.memory, estimate.overhead]
    parts += [estimate.exposed.get(axis, 0.0) for axis in axes]
    rows.append(
      [
        speed.name,
        f"{estimate.step:.3g} s",
        *(f"{100 * part / estimate.step:.0f} %" for part in parts),
      ]
    )
  return _table((*heads, *(f"exposed ({axis})" for axis in axes)), rows)


def _reasons(pairs: Sequence[Pair]) -> str:
  lines = list(_one_sided(pairs))
  for differs in dict.fromkeys(speed.differs for speed, _ in pairs):
    members = [pair for pair in pairs if pair[0].differs == differs]
    names = ", ".join(speed.name for speed, _ in members)
    errors = ", ".join(_error(*member) for member in members)
    lines.append(f"- {names} ({errors}): {differs}.")
    lines += [
      f"  {speed.name} {words}."
      for speed, found in members
      for words in _where(found.estimate)
    ]
  return "\n".join(lines)


def _one_sided(pairs: Sequence[Pair]) -> Iterable[str]:
  """Yields an explanation for each series whose errors have one sign."""
  for series in dict.fromkeys(speed.series for speed, _ in pairs):
    signs = {
      found.estimate.mfu > speed.mfu
      for speed, found in pairs
      if speed.series == series
    }
    if signs == {True}:
      yield (
        f"- {series}: every estimate is too fast. These programs reached less"
        " of the peak rates than assumed, or waited for something that"
        " estimates omit."
      )
    elif signs == {False}:
      yield (
        f"- {series}: every estimate is too slow. These programs reached more"
        " of the peak rates than assumed, or did less work than ours."
      )


def _where(estimate: result.Estimate) -> Iterable[str]:
  """Yields the largest costs other than matmuls."""
  for axis, seconds in list(estimate.exposed.items())[:1]:
    if seconds > 0.05 * estimate.step:
      share = _percent(seconds / estimate.step)
      yield f"spends {share} of its step on exposed `{axis}` communication"
  if estimate.memory > 0.3 * estimate.step:
    share = _percent(estimate.memory / estimate.step)
    yield f"spends {share} of its step in memory-bound kernels"


def _how(pairs: Sequence[Pair]) -> str:
  sources = dict.fromkeys(found.estimate.source for _, found in pairs)
  lines = ["## Sources and commands", ""]
  lines += [f"- Rates: {source}." for source in sources]
  for speed, found in pairs:
    knobs = "".join(f" --fdl.{n}={v}" for n, v in speed.assigned)
    lines.append(
      f"- {speed.name}: `--exp={speed.experiment} --target={speed.target}"
      f"{knobs}`, {100 * found.used:.0f} % of the memory, program"
      f" {found.fingerprint[:12]}, {found.date}. Published: {speed.source}."
    )
  versions = dict.fromkeys(
    ", ".join(f"{name} {text}" for name, text in found.versions.items())
    for _, found in pairs
  )
  lines += [f"- With {text}." for text in versions]
  lines += ["", _AGAIN]
  return "\n".join(lines)


def _percent(share: float) -> str:
  return f"{100 * share:.0f} %"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
  lines = [heads, ["---"] * len(heads), *rows]
  return "\n".join(f"| {' | '.join(line)} |" for line in lines)


_INTRODUCTION: Final = """# Accuracy of plan estimates

Generated by `tools/plan_accuracy`, which plans programs with a published speed
and compares. Nothing was fitted to the published values: rates are those of
data sheets, times the efficiencies in `runner/plan/estimate/calibrations`,
which were chosen before the first comparison. All values are MFU: model FLOPs
(without recomputation and masked attention) as a share of peak FLOPs. Errors
are in points of MFU."""

_ERRORS: Final = """## Errors

An estimate is useful if it is closer than a simple guess. The guess here is the
mean published MFU of the other models in the same group. Rank correlations mean
little where predictions differ by less than a point, as those of `matmuls only`
do."""

_TIME: Final = """## Estimated step time

Shares of the estimated step time. `exposed` is communication over a mesh axis
that does not overlap with compute."""

_REASONS: Final = """## Causes of the differences"""

_GENERAL: Final = """Limits of all estimates:

- Efficiencies are rounded values from other people's microbenchmarks.
  `tools/calibrate` measures those of your machine, which narrows the band.
- Kernels are not autotuned without a device, so one efficiency stands for
  matmuls of all shapes.
- Values read off a chart are exact to about one point of MFU. It is unknown how
  many runs a published value was selected from.
- Estimates omit waiting for hosts, input and slow machines.

Use estimates to compare plans for the same kind of hardware, not to predict a
speed."""

_AGAIN: Final = """To update the page, install the compilers that
`--mode=plan` needs. Models in `docs/plan_accuracy.json` are not planned
again by default.

```sh
tools/plan_accuracy --again=16B   # plan one model again; all without a name
tools/plan_accuracy               # plan missing models and write the page
```"""
