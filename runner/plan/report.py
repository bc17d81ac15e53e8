"""Plans as text for a terminal, and the comparison of several plans.

The comparison has one line a plan. The best value of a column is marked among
the plans that fit. Cost is chips times seconds for each token, relative to the
best.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from paxon.runner import units
from paxon.runner.checkpoints import text_table
from paxon.runner.plan import change_sections, result, sections


def to_text(plan: result.Plan) -> str:
  """Returns the whole plan as several lines of text."""
  verdict = f"{plan.target}: {sections.verdict(plan)}"
  answer = _align(sections.make_answer(plan).rows)
  blocks = [
    [
      f"plan: {plan.experiment} on {plan.target}",
      verdict,
      *(f"  {line}" for line in answer),
    ],
  ]
  if plan.overrides:
    blocks.append(["flags", *(f"  {flag}" for flag in plan.overrides)])
  blocks += [
    list(_section(section)) for section in sections.make_sections(plan)
  ]
  blocks.append(
    [
      *(f"warning: {text}" for text in (*plan.findings, *plan.warnings)),
      *(f"note: {text}" for text in plan.notes),
    ]
  )
  blocks += [
    list(_section(section)) for section in change_sections.make_sections(plan)
  ]
  blocks.append([verdict, *_advice(plan)])
  return "\n\n".join("\n".join(lines) for lines in blocks if lines) + "\n"


def _advice(plan: result.Plan) -> Iterator[str]:
  if plan.memory.fit is result.Fit.DOES_NOT_FIT and not plan.verified_changes:
    for number, change in enumerate(plan.advice, start=1):
      yield f"  {number}. {change}"


def _section(section: sections.Section) -> Iterator[str]:
  yield section.title
  rows = list(section.rows)[: section.most]
  if section.titles and rows:
    rows.insert(0, section.titles)
  for line in _align(rows):
    yield f"  {line}"
  if (more := len(section.rows) - len(section.rows[: section.most])) > 0:
    yield f"  and {more} more"
  for line in section.lines:
    yield f"  {line}"


def to_table(
  plans: Sequence[result.Plan], failures: Sequence[result.Failure] = ()
) -> str:
  """Returns one line a plan, to compare them; `*` marks the best."""
  lines, last = [], []
  if plans:
    compared = compare(plans)
    lines = _align([compared.titles, *compared.rows])
    last = list(compared.lines)
  width = max((len(label) for label in labels(plans)), default=0)
  for failure in failures:
    lines.append(f"{failure.target.ljust(width)}  no plan: {failure.message}")
  return "\n".join([*lines, *last])


# Format of each ranked column, and whether more is better.
_RANKED: Final[Mapping[str, tuple[Callable[[float], str], bool]]] = {
  "bound": (units.seconds, False),
  "estimate": (units.seconds, False),
  "tokens/s": ("{:,.0f}".format, True),
  "MFU": (units.share, True),
  "exposed": (units.seconds, False),
  "cost": ("{:.2f}".format, False),
}


def compare(plans: Sequence[result.Plan]) -> sections.Section:
  """Returns the comparison of at least one plan; `*` marks the best."""
  # Bounds and estimates are not compared with each other.
  timed = [plan for plan in plans if plan.bound is not None]
  timed = [plan for plan in timed if _fits(plan)] or timed
  is_estimated = bool(timed) and all(plan.estimate for plan in timed)
  values = [_values(plan, is_estimated=is_estimated) for plan in plans]
  fitting = [v for v, p in zip(values, plans, strict=True) if _fits(p)]
  cheapest = min((v["cost"] for v in fitting if v["cost"]), default=None)
  for found in values:
    cost = found["cost"]
    found["cost"] = cost and cheapest and cost / cheapest
  best = {
    name: _best([v[name] for v in fitting], is_more_better=is_more_better)
    for name, (_, is_more_better) in _RANKED.items()
  }
  costs = [_costs(plan.training_cost) for plan in plans]
  has_costs = any(plan.training_cost for plan in plans)
  rows = []
  for plan, label, found, paid in zip(
    plans, labels(plans), values, costs, strict=True
  ):
    sizes = plan.memory.peak, plan.memory.usable
    texts = ("-" if n is None else units.size(n) for n in sizes)
    ranked = []
    for name, (form, _) in _RANKED.items():
      number = found[name]
      text = "-" if number is None else form(number)
      is_best = number is not None and number == best[name] and _fits(plan)
      ranked.append(text + "*" * is_best)
    cells = (label, f"{plan.num_chips:,}", *texts, plan.fit, *ranked)
    rows.append(cells + (paid if has_costs else ()))
  basis = "the estimate" if is_estimated else "the bound"
  legend = (
    f"* best. tokens/s, MFU and cost are by {basis}. Cost is chips x seconds"
    " for each token, relative to the best that fits; prices of chips are not"
    " in it."
  )
  without = [
    label
    for plan, label in zip(plans, labels(plans), strict=True)
    if plan.bound and not sections.has_communication(plan.bound)
  ]
  if without:
    legend += f" Bounds without communication: {', '.join(without)}."
  titles = ("target", "chips", "peak", "usable", "fit", *_RANKED)
  more = ("days", "device-hours", "price") if has_costs else ()
  return sections.Section("targets", rows, (*titles, *more), (legend,))


def _costs(cost: result.TrainingCost | None) -> tuple[str, ...]:
  """Returns the days, device-hours and price of training."""
  if cost is None:
    return ("-",) * 3
  money = "-" if cost.money is None else f"{cost.money:,.0f}"
  return f"{cost.days:,.1f}", f"{cost.device_hours:,.0f}", money


def labels(plans: Sequence[result.Plan]) -> list[str]:
  """Returns the target of each plan, and the overrides that not all share."""
  if not plans:
    return []
  shared = set.intersection(*(set(plan.overrides) for plan in plans))
  return [
    " ".join(
      [
        plan.target,
        *(o.removeprefix("--fdl.") for o in plan.overrides if o not in shared),
      ]
    )
    for plan in plans
  ]


def _values(
  plan: result.Plan, *, is_estimated: bool
) -> dict[str, float | None]:
  bound, estimate = plan.bound, plan.estimate
  basis = estimate if is_estimated else bound
  if basis is not None and not sections.is_meaningful(basis):
    basis = None
  tokens = None if basis is None else basis.tokens_per_second
  return {
    "bound": None if bound is None else bound.step,
    "estimate": None if estimate is None else estimate.step,
    "tokens/s": tokens,
    "MFU": None if basis is None else basis.mfu,
    "exposed": None if estimate is None else sum(estimate.exposed.values()),
    "cost": plan.num_chips / tokens if tokens else None,
  }


def _best(
  numbers: Sequence[float | None], *, is_more_better: bool
) -> float | None:
  """Returns the best of several numbers; None if there is no choice."""
  known = [number for number in numbers if number is not None]
  if len(known) < 2:
    return None
  return max(known) if is_more_better else min(known)


def _fits(plan: result.Plan) -> bool:
  return plan.memory.fit is not result.Fit.DOES_NOT_FIT


def _align(rows: Sequence[Sequence[str]]) -> list[str]:
  """Returns lines with aligned columns; numbers are right-aligned."""
  right = [
    index
    # The first row may have headings.
    for index, (_, *cells) in enumerate(zip(*rows, strict=True))
    if all(cell[:1] in "0123456789-<" for cell in cells)
  ]
  return text_table.format_lines(rows, right=right)
