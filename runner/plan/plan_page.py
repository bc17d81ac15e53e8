"""`plan.html`: plans as one page with charts, which loads nothing."""

from collections.abc import Iterator, Sequence
from typing import Final

from paxon.runner import units, web_page
from paxon.runner.plan import change_sections, report, result, sections

_CLASSES: Final = {
  result.Fit.FITS: "good",
  result.Fit.TIGHT: "warn",
  result.Fit.DOES_NOT_FIT: "bad",
  result.Fit.UNKNOWN: "soft",
}
# A program below this share of the memory gets a second, zoomed chart.
_SMALL: Final = 0.25
_MOST_MODULES: Final = 12

# Colors of memory.
_PARAMETERS, _OPTIMIZER, _OTHERS, _BATCH, _TEMPORARIES = range(5)
_GRADIENTS, _SAVED, _PADDING = 5, 6, 7
# Colors of time.
_MATMULS, _MEMORY, _FAST, _NETWORK, _EXPOSED, _LAUNCHES = 0, 1, 2, 3, 4, 7


def to_html(
  plans: Sequence[result.Plan], failures: Sequence[result.Failure] = ()
) -> str:
  """Returns the page.

  Args:
    plans: At least one, of one experiment.
    failures: Targets that could not be planned.
  """
  name = plans[0].experiment
  body: list[web_page.Content] = [web_page.element("p", name, class_="soft")]
  if len(plans) + len(failures) > 1:
    body += _comparison(plans, failures)
  for plan, label in zip(plans, report.labels(plans), strict=True):
    body.append(web_page.element("section", *_plan(plan, label)))
  return web_page.page(f"Plan of {name.rpartition('.')[2]}", *body)


def _comparison(
  plans: Sequence[result.Plan], failures: Sequence[result.Failure]
) -> Iterator[web_page.Content]:
  names = report.labels(plans)
  pairs = list(zip(plans, names, strict=True))
  known = [(p, name) for p, name in pairs if p.memory.usable is not None]
  shares = [web_page.Bar(name, tuple(_shares(p))) for p, name in known]
  times = [_time(p, name) for p, name in pairs if p.bound is not None]
  yield from _section(report.compare(plans), heading="h2")
  for failure in failures:
    text = f"{failure.target}: no plan: {failure.message}"
    yield web_page.element("p", text, class_="bad")
  if shares:
    title = "Memory, as a share of usable memory"
    yield web_page.element("h3", title)
    yield web_page.bar_chart(
      shares, title=title, form=units.share, limits=[("usable", 1.0)]
    )
  if times:
    title = "Estimated step time, or its lower bound"
    yield web_page.element("h3", title)
    yield web_page.bar_chart(times, title=title, form=units.seconds)


def _plan(plan: result.Plan, label: str) -> Iterator[web_page.Content]:
  kind = f"verdict {_CLASSES[plan.memory.fit]}"
  yield web_page.element("h2", label)
  yield web_page.element("p", sections.verdict(plan), class_=kind)
  yield from _section(sections.make_answer(plan))
  if plan.overrides:
    yield web_page.element("pre", "\n".join(plan.overrides))
  yield from _list("What to change", plan.advice)
  for section in change_sections.make_sections(plan):
    yield from _section(section)
  yield from _list("Warnings", (*plan.findings, *plan.warnings), "warnings")
  charts = {
    sections.MEMORY: _memory_charts,
    sections.MODULES: _module_chart,
    sections.BOUND: _bound_chart,
    sections.ESTIMATE: _estimate_chart,
  }
  for section in sections.make_sections(plan):
    chart = charts.get(section.title)
    yield from _section(section, *(chart(plan) if chart else ()))
  yield from _list("Notes", plan.notes)


def _section(
  section: sections.Section,
  *charts: web_page.Content,
  heading: str = "h3",
) -> Iterator[web_page.Content]:
  title = section.title[:1].upper() + section.title[1:]
  columns = max((len(row) for row in section.rows), default=0)
  titles = section.titles or [""] * columns
  kind = "" if section.titles else "values"
  table = web_page.table(titles, section.rows, kind=kind)
  lines = [web_page.element("p", line, class_="soft") for line in section.lines]
  yield web_page.element(heading, title)
  yield from charts
  yield from lines
  if charts:
    yield web_page.details("All values", table)
  else:
    yield table


def _list(
  title: str, items: Sequence[str], kind: str = ""
) -> Iterator[web_page.Content]:
  if items:
    yield web_page.element("h3", title)
    lines = (web_page.element("li", item) for item in items)
    yield web_page.element("ul", *lines, class_=kind)


def _memory_charts(plan: result.Plan) -> Iterator[web_page.Content]:
  """Yields memory at the scale of the device, and zoomed if it is small."""
  memory = plan.memory
  label = "peak" if memory.peak is not None else "state and batch"
  used = web_page.Bar(label, tuple(_list_sizes(memory)))
  contents = web_page.Bar(
    "temporaries (estimate)",
    (
      web_page.Segment("gradients (upper bound)", memory.gradients, _GRADIENTS),
      *(
        web_page.Segment("saved for the backward pass", size, _SAVED)
        for size in memory.saved.values()
      ),
    ),
    start=memory.arguments or memory.state_and_batch,
  )
  limits = [
    (name, size)
    for name, size in (("usable", memory.usable), ("device", memory.capacity))
    if size is not None
  ]
  title = "Memory of one device"
  end = max(used.end, contents.end)
  if memory.usable is not None and end < _SMALL * memory.usable:
    yield web_page.bar_chart(
      [used], title=title, form=units.size, limits=limits
    )
    zoom = f"Zoomed in {memory.usable / end:,.0f} times:"
    yield web_page.element("p", zoom, class_="soft")
    title, limits = f"{title}, zoomed", []
  yield web_page.bar_chart(
    [used, contents], title=title, form=units.size, limits=limits
  )


def _list_sizes(memory: result.Memory) -> Iterator[web_page.Segment]:
  """Yields the compiler's sizes, or only the state's if not compiled."""
  sizes = [
    ("parameters", memory.parameters, _PARAMETERS),
    ("optimizer", memory.optimizer, _OPTIMIZER),
    ("other variables", memory.other_variables, _OTHERS),
    ("batch", memory.batch, _BATCH),
  ]
  if memory.arguments is not None and memory.peak is not None:
    padding = memory.arguments - memory.state_and_batch
    # On TPUs the peak is below the sum: buffers of arguments are reused.
    temporaries = memory.peak - memory.arguments
    sizes.append(("layout and padding", max(padding, 0), _PADDING))
    sizes.append(("temporaries", max(temporaries, 0), _TEMPORARIES))
  for name, size, color in sizes:
    yield web_page.Segment(name, size, color)


def _shares(plan: result.Plan) -> Iterator[web_page.Segment]:
  usable = plan.memory.usable
  assert usable is not None
  for segment in _list_sizes(plan.memory):
    share = segment.value / usable
    yield web_page.Segment(segment.name, share, segment.color)


def _module_chart(plan: result.Plan) -> Iterator[web_page.Content]:
  bars = [
    web_page.Bar(
      # Paths differ at the end.
      "/".join(module.split("/")[-2:]) or "(outside any module)",
      (web_page.Segment("executed FLOPs", number, _MATMULS),),
      text=units.share(number / max(plan.flops.hardware, 1)),
    )
    for module, number in list(plan.flops.by_module.items())[:_MOST_MODULES]
  ]
  yield web_page.bar_chart(
    bars, title="Executed FLOPs by module", form=units.flops
  )


def _bound_chart(plan: result.Plan) -> Iterator[web_page.Content]:
  bars = [web_page.Bar(s.name, (s,)) for s in _bounds(plan)]
  yield web_page.bar_chart(
    bars, title="Roofline lower bound", form=units.seconds
  )


def _bounds(plan: result.Plan) -> Iterator[web_page.Segment]:
  found = plan.bound
  assert found is not None
  for name, seconds, color in (
    ("matmuls", found.compute, _MATMULS),
    ("memory", found.memory, _MEMORY),
    ("fast link", found.fast_link, _FAST),
    ("network", found.network, _NETWORK),
  ):
    if seconds is not None:
      yield web_page.Segment(name, seconds, color)


def _estimate_chart(plan: result.Plan) -> Iterator[web_page.Content]:
  yield web_page.bar_chart(
    [_time(plan, "step")], title="Estimated step time", form=units.seconds
  )


def _time(plan: result.Plan, label: str) -> web_page.Bar:
  """Returns the bar of the estimate, or of the bound without one."""
  found = plan.estimate
  if found is None:
    slowest = max(_bounds(plan), key=lambda s: s.value)
    text = f"\u2265 {units.seconds(slowest.value)}"
    return web_page.Bar(label, (slowest,), text=text)
  low, high = found.band
  waiting = sum(found.exposed.values())
  return web_page.Bar(
    label,
    (
      web_page.Segment("matmuls", found.compute, _MATMULS),
      web_page.Segment("memory", found.memory, _MEMORY),
      web_page.Segment("exposed collectives", waiting, _EXPOSED),
      web_page.Segment("kernel launch gaps", found.overhead, _LAUNCHES),
    ),
    text=units.seconds(found.step),
    range=(low * found.step, high * found.step),
  )
