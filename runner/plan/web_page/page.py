"""`plan.html`: plans as one file with pictures, which loads nothing.

It is HTML that is also well-formed XML.
"""

from collections.abc import Callable, Sequence
from typing import Final

from paxon.runner import units, web_page
from paxon.runner.plan import comparison, result, sentences
from paxon.runner.plan.web_page import (
  bars,
  markup,
  memory_section,
  time_section,
  work_section,
)

_CLASSES: Final = {
  result.Fit.FITS: "good",
  result.Fit.TIGHT: "warn",
  result.Fit.DOES_NOT_FIT: "bad",
  result.Fit.UNKNOWN: "soft",
}


def to_html(
  plans: Sequence[result.Plan], failures: Sequence[result.Failure] = ()
) -> str:
  """Returns the page.

  Args:
    plans: At least one, of one experiment.
    failures: Targets without a plan.
  """
  first = plans[0]
  title = f"Plan of {first.experiment.rpartition('.')[2]}"
  parts = [
    "<!doctype html>",
    '<html lang="en"><head><meta charset="utf-8"/>',
    '<meta name="viewport" content="width=device-width, initial-scale=1"/>',
    f"<title>{markup.escape(title)}</title>",
    f"<style>{web_page.CSS}</style></head>",
    f"<body><header><h1>{markup.escape(title)}</h1>",
    f'<p class="soft">{markup.escape(first.experiment)}</p>',
    *_overrides(first),
    "</header><main>",
  ]
  if len(plans) + len(failures) > 1:
    parts += _comparison(plans, failures)
  for plan in plans:
    parts += _plan(plan)
  return "\n".join(part for part in [*parts, "</main></body></html>"] if part)


def _overrides(plan: result.Plan) -> list[str]:
  if not plan.overrides:
    return ['<p class="soft">Nothing is overridden.</p>']
  return [f"<pre>{markup.escape(chr(10).join(plan.overrides))}</pre>"]


def _comparison(
  plans: Sequence[result.Plan], failures: Sequence[result.Failure]
) -> list[str]:
  table = comparison.compare(plans, failures)
  head = "".join(f'<th scope="col">{t}</th>' for t in table.titles)
  body = "".join(_compared(row) for row in table.rows)
  wide = len(table.titles) - 1
  for failure in failures:
    body += (
      f'<tr><th scope="row">{markup.escape(failure.target)}</th>'
      f'<td class="wide bad" colspan="{wide}">no plan:'
      f" {markup.escape(failure.message)}</td></tr>"
    )
  known = [plan for plan in plans if plan.memory.usable is not None]
  shares = [bars.Row(p.target, memory_section.shares(p)) for p in known]
  timed = [plan for plan in plans if plan.bound is not None]
  times = [time_section.row(plan, plan.target) for plan in timed]
  return [
    "<section><h2>Targets</h2>",
    f'<p class="soft">Best figures are bold. {markup.escape(table.legend)}</p>'
    '<div class="table"><table>'
    f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>",
    "<h3>Memory, as a share of usable memory</h3>" if known else "",
    bars.draw(
      shares,
      title="Memory of each target",
      form=units.share,
      limits=[("usable", 1.0)] if known else (),
    ),
    memory_section.legend(shares) if known else "",
    "<h3>Time of a step</h3>" if times else "",
    bars.draw(times, title="Time of each target", form=units.seconds),
    time_section.legend(times) if times else "",
    "</section>",
  ]


def _compared(row: Sequence[comparison.Cell]) -> str:
  first, *rest = row
  cells = "".join(
    f'<td class="best">{markup.escape(cell.text)}</td>'
    if cell.is_best
    else f"<td>{markup.escape(cell.text)}</td>"
    for cell in rest
  )
  return f'<tr><th scope="row">{markup.escape(first.text)}</th>{cells}</tr>'


def _plan(plan: result.Plan) -> list[str]:
  mesh = " x ".join(f"{a}={n}" for a, n in plan.mesh.items()) or "one device"
  return [
    f"<section><h2>{markup.escape(plan.target)}</h2>",
    f'<p class="verdict {_CLASSES[plan.memory.fit]}">'
    f"{markup.escape(sentences.verdict(plan))}</p>",
    f"<p>{markup.escape(f'{sentences.devices(plan)} as {mesh}')}.</p>",
    markup.listing("What to change", plan.advice),
    *_changes(plan),
    markup.listing(
      "Warnings",
      [*plan.findings, *plan.warnings],
      kind="warnings",
    ),
    *memory_section.section(plan),
    *time_section.section(plan),
    *work_section.flops(plan),
    *work_section.communication(plan),
    *work_section.kernels(plan),
    *work_section.quantized(plan),
    markup.listing("Notes", plan.notes),
    *_made(plan),
    "</section>",
  ]


def _changes(plan: result.Plan) -> list[str]:
  parts = []
  for caption, changes in (
    ("Changes that were tried", plan.verified_changes),
    ("Layouts by step time, then memory", plan.search),
  ):
    rows = [
      (
        " ".join(c.overrides) or c.words,
        c.fit + ("" if c.compiled else " (analytical estimate)"),
        _change(c.peak_before, c.peak_after, units.size),
        _change(c.bound_before, c.bound_after, units.seconds),
        _change(c.estimate_before, c.estimate_after, units.seconds),
        units.share(c.recomputed_share),
        c.reason,
      )
      for c in changes
    ]
    titles = (
      "change",
      "fit",
      "peak",
      "bound",
      "estimate",
      "recomputed",
      "result",
    )
    parts.append(markup.table(titles, rows, caption=caption, kind="changes"))
  return parts


def _made(plan: result.Plan) -> list[str]:
  batch = [
    (name, " x ".join(f"{n:,}" for n in shape))
    for name, shape in plan.batch.items()
  ]
  if plan.num_parameters is not None:
    batch.append(("parameters", f"{plan.num_parameters:,}"))
  if plan.training_cost is not None:
    batch += [
      (name.replace("_", " "), f"{value:,.0f}")
      for name, value in vars(plan.training_cost).items()
      if value is not None
    ]
  options = plan.compiler_options.items()
  made = markup.escape(sentences.origin(plan))
  lines = ["<h3>How it was made</h3>", f"<p>{made}.</p>"]
  if plan.fingerprint is not None:
    words = markup.escape(f"Fingerprint of the executable: {plan.fingerprint}")
    lines.append(f'<p class="soft">{words}</p>')
  return [
    *lines,
    markup.table(("array", "shape"), batch, caption="A global batch"),
    markup.table(
      ("option", "value"),
      [(name, str(value)) for name, value in options],
      caption="Options of the compiler",
    ),
  ]


def _change(
  before: float | int | None,
  after: float | int | None,
  form: Callable[[float | int], str],
) -> str:
  """Returns two figures with an arrow between them."""
  shown = ["-" if n is None else form(n) for n in (before, after)]
  return shown[1] if before is None else " \u2192 ".join(shown)
