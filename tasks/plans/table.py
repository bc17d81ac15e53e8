"""Generator of `docs/plans.md`, from the golden plans."""

from collections.abc import Iterable
import textwrap

from paxon.runner.plan import golden
from paxon.tasks.plans import pairs

_GIB = 2**30
_HEADER = """\
# Plans of experiments

Generated from the golden plans in `tasks/plans/files` by `tools/plans --table`;
a test compares them. Nothing here was run: memory, FLOPs and collectives are
those of the training step, compiled for absent hardware.

Memory is per device. `fit` compares the peak with usable memory: 90 % of a
GPU's memory, and the compiler's limit on TPUs. FLOPs are model FLOPs per step
on all devices, with every key of every query counted. `compiled` is the
compile time; `in all` includes linting, tracing and reading the program, but
not Python's startup, on two CPU cores shared with other programs.

"""
_FOOTER = """
`sent within` is the payload of a device's collectives over NVLink or ICI, and
`sent between` the payload over the network between hosts or slices.
"""
_KINDS = """
## Kinds of devices

Two experiments on ten kinds of devices.

"""
_COLUMNS = (
  "experiment",
  "target",
  "devices",
  "mesh",
  "arguments",
  "peak",
  "fit",
  "model FLOPs",
  "sent within",
  "sent between",
  "compiled",
  "in all",
  "made",
)


def text() -> str:
  """Returns the page.

  Raises:
    UserError: The file of a pair does not exist.
  """
  plans = [pair.read() for pair in pairs.PAIRS if not pair.is_of_kinds]
  kinds = [pair.read() for pair in pairs.KINDS]
  return "".join(
    (
      _HEADER,
      _table([_COLUMNS, ("---",) * len(_COLUMNS), *map(_row, plans)]),
      _FOOTER,
      _KINDS,
      _table([_COLUMNS, ("---",) * len(_COLUMNS), *map(_row, kinds)]),
      "\n## Collectives and kernels\n",
      *(_details(plan) for plan in plans),
      "\n## Made with\n\n",
      *_versions([*plans, *kinds]),
    )
  )


def _row(plan: golden.GoldenPlan) -> tuple[str, ...]:
  figures = plan.figures
  memory = figures["memory"]
  within, between = (
    sum(
      sums["bytes"]
      for name, sums in figures["collectives"].items()
      if name.endswith(link)
    )
    for link in ("fast", "network")
  )
  mesh = " x ".join(f"{axis}={size}" for axis, size in figures["mesh"].items())
  seconds = plan.compile_seconds
  return (
    f"`{_short(plan.experiment)}`{_variant(plan)}",
    f"`{plan.target}`",
    f"{figures['devices']:,}",
    mesh or "one device",
    _gib(memory["arguments"]),
    _gib(memory["peak"]),
    figures["fit"],
    f"{figures['flops']['model'] / 1e12:,.4g} T",
    _gib(within),
    _gib(between),
    "-" if seconds is None else f"{seconds:.0f} s",
    f"{plan.seconds:.0f} s",
    plan.date,
  )


def _variant(plan: golden.GoldenPlan) -> str:
  """Returns the variant of a plan: attention and quantization."""
  words = ""
  for override in plan.overrides:
    name, _, value = override.removeprefix("--fdl.").partition("=")
    if name == "attention_kernel":
      words += ", plain attention"
    elif name == "quantization":
      words += f", {value}"
  return words


def _details(plan: golden.GoldenPlan) -> str:
  figures = plan.figures
  lines = [
    f"- {name}: {sums['count']:,} times, {_gib(sums['bytes'])}"
    for name, sums in figures["collectives"].items()
  ]
  kernels = ", ".join(
    f"`{name}` {count:,}" for name, count in figures["kernels"].items()
  )
  if kernels:
    lines.append(f"- kernels: {kernels}")
  overrides = " ".join(plan.overrides)
  command = f" with `{overrides}`" if overrides else ""
  title = f"\n`{_short(plan.experiment)}` on `{plan.target}`{command}\n\n"
  wrapped = [textwrap.fill(line, 120, subsequent_indent="  ") for line in lines]
  return title + "\n".join(wrapped or ["- none"]) + "\n"


def _versions(plans: Iterable[golden.GoldenPlan]) -> list[str]:
  texts = {
    ", ".join(f"{name} {version}" for name, version in plan.versions.items())
    for plan in plans
  }
  return [f"- {each}\n" for each in sorted(texts)]


def _table(rows: list[tuple[str, ...]]) -> str:
  return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _short(experiment: str) -> str:
  return experiment.rpartition(".")[2]


def _gib(size: int | None) -> str:
  if size is None:
    return "-"
  if size < _GIB / 100:
    return f"{size / 2**20:,.3g} MiB"
  return f"{size / _GIB:,.4g} GiB"
