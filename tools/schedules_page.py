"""The page on schedules of pipelines, and its pictures, from simulation."""

from collections.abc import Mapping
import textwrap
from typing import Final

from paxon.pipeline.schedules import (
  closed_forms,
  drawing,
  interleaved,
  lowering,
  one_f_one_b,
  simulation,
  zero_bubble,
)
from paxon.pipeline.schedules import costs as costs_lib
from paxon.tools import schedules_plan

PAGE: Final = "docs/pipeline_schedules.md"
NUM_STAGES: Final = 4
NUM_MICROBATCHES: Final = 32
BEGIN: Final = "<!-- Made by tools/schedules --measure. -->"
END: Final = "<!-- Until here. -->"

_RECOMPUTE: Final = costs_lib.Costs(recompute=1.0)
_PICTURES: Final = (
  ("1f1b", one_f_one_b.make),
  ("1f1b_two_slot", one_f_one_b.two_slots),
  ("interleaved_two_slot", interleaved.two_slots),
  ("zb_h1", zero_bubble.make_h1),
)

_TEXT: Final = """\
# Schedules of pipelines

Made by `tools/schedules`; a test holds the page and the code together.

A schedule (`pipeline/schedules`) says what each stage runs at each tick. Two
clocks tell its time. On the *asynchronous* one, the papers', a stage begins as
soon as what it needs is there. On the *lock-step* one, that of one program for
all stages, a tick takes as long as the stage that has most to do in it; the
executor keeps this clock. A bubble is the time in which a stage does nothing.

{stages} stages, {microbatches} microbatches; the forward pass of a stage, the
gradient of its input and that of its weights (F, B, W) cost 1 each, so the work
of a stage is {work:g}. With recomputation a backward pass costs 1 more
({work_again:g} in all). The executor does either: `Residuals.RECOMPUTE` keeps
the inputs of pieces, `Residuals.SAVE` all that gradients need.

{table}

- Closed form: the asynchronous bubble that papers give, without recomputation;
  v chunks a stage, P stages. That of ZB-V is its authors' claim for their own
  heuristic; ours is greedy and stays above it.
- Peak: microbatches between their forward and the end of their backward pass,
  in whole stages, on the stage that has most; what papers count.
- Allocated: what one program for all stages has on each, in chunks (two of
  which are a stage where there are two). Recomputing: messages alone, which are
  inputs of pieces and gradients of their outputs. Saving: messages, residuals
  (what a forward operation keeps for X or B) and pairs (what B keeps for W).

## What to take
- **Two-slot 1F1B** gains memory, not time: GPipe's bubble, and a number of
  microbatches that does not grow with the batch.
- **Two-slot interleaved 1F1B** gains time: its smaller bubble holds in
  lock-step too. It sends as many more messages as there are chunks.
- **One operation a tick** (1F1B, interleaved) gains memory and *loses* time in
  lock-step: neighbours run opposite operations, and a tick costs the dearer.
- **Zero-bubble tables** gain time with saved residuals, where F, B and W cost
  about the same: then their smaller bubble holds in lock-step, too. Where they
  differ (B has attention's products, W has not), ticks cost the dearest, and
  the gain is lost; see the H200 below. With recomputation B and W both run
  their piece forward, and W repeats the way back through the layers: such
  tables are exact then, and lose time.
- Saved residuals cost memory: of GPipe all microbatches', of two-slot 1F1B
  those in flight. The chunks of tables with W are compiled layer by layer.

## Measured
One step by the executor beside the sequential model (the sum of gradients over
microbatches in a loop, on one device), in turn in one run, on four devices that
one host pretends to have. They share its cores, so this is the *work* of a
schedule, its recomputation included, and no bubble: nothing of it can be
expected of accelerators.

{begin}
{measured}
{end}

## Planned: eight stages of H200
{plan}

{planned}

## Pictures
Lock-step, {stages} stages, {few} microbatches.

{pictures}
"""
_PLAN: Final = """\
The layers of Llama 3 8B (32 of width 4096, 4 a stage) in bfloat16 on one DGX,
one H200 a stage, {microbatches} microbatches of {length} tokens, without
embedding, head and optimizer. What a stage takes for a microbatch follows from
its products, attention, memory traffic and kernels at the rates of the plan's
estimate; here F = {costs.forward:.1f}, B = {costs.input_gradient:.1f}, W =
{costs.weight_gradient:.1f}, and a message {costs.message:.2f} ms. The steps are
those of the executor, in lock-step. Nothing here was run. The rates are
{shares.summary}. Times may be {shares.band[0]:g} to {shares.band[1]:g} of
these; ratios between schedules are surer.
"""
_FEW: Final = 8
_HEADINGS: Final = (
  "Schedule",
  "Ticks",
  "Closed form",
  "Bubble, asynchronous",
  "lock-step",
  "Bubble with recomputation, asynchronous",
  "lock-step",
  "Peak",
  "Allocated, recomputing",
  "saving",
)


def page(measured: str) -> str:
  """Returns the text of the page.

  Args:
    measured: What is between `BEGIN` and `END`, which costs time to make.
  """
  headings, *planned = schedules_plan.rows()
  return _TEXT.format(
    plan=textwrap.fill(
      _PLAN.format(
        microbatches=schedules_plan.NUM_MICROBATCHES,
        length=schedules_plan.LENGTH,
        costs=schedules_plan.stage_costs(),
        shares=schedules_plan.calibrated(),
      ),
      width=80,
    ),
    planned=to_table(headings, planned),
    stages=NUM_STAGES,
    microbatches=NUM_MICROBATCHES,
    few=_FEW,
    work=3 * NUM_MICROBATCHES,
    work_again=4 * NUM_MICROBATCHES,
    table=to_table(
      _HEADINGS, [_row(form) for form in closed_forms.CLOSED_FORMS]
    ),
    begin=BEGIN,
    measured=measured,
    end=END,
    pictures="\n".join(
      f"![{name}](pipeline_schedule_{name}.svg)" for name, _ in _PICTURES
    ),
  )


def measured_part(text: str) -> str:
  """Returns what a page says was measured."""
  return text.split(BEGIN)[1].split(END)[0].strip()


def pictures() -> Mapping[str, str]:
  """Returns SVG by the name of its file."""
  found = {}
  for name, make in _PICTURES:
    made = make(num_stages=NUM_STAGES, num_microbatches=_FEW)
    clock = simulation.simulate(made).lock_step
    svg = drawing.to_svg(made, clock=clock)
    found[f"docs/pipeline_schedule_{name}.svg"] = svg
  return found


def to_table(headings: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
  """Returns a table of Markdown."""
  lines = [headings, ("---",) * len(headings), *rows]
  return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _row(form: closed_forms.ClosedForm) -> tuple[str, ...]:
  made = form.make(num_stages=NUM_STAGES, num_microbatches=NUM_MICROBATCHES)
  plain = simulation.simulate(made)
  again = simulation.simulate(made, costs=_RECOMPUTE)
  bubble = form.bubble(NUM_STAGES, costs_lib.Costs())
  # Without the slots of what nobody waits for.
  saving = lowering.lower(made, lowering.Residuals.SAVE)
  pools = {
    "messages": saving.box,
    "residuals": saving.residuals,
    "pairs": saving.pairs,
  }
  return (
    made.name,
    str(len(made.ticks)),
    f"{form.formula} = {bubble:g}" if bubble else form.formula,
    f"{plain.asynchronous.bubble:g}",
    f"{plain.lock_step.bubble:g}",
    f"{again.asynchronous.bubble:g}",
    f"{again.lock_step.bubble:g}",
    f"{max(plain.in_flight):g}",
    f"{lowering.lower(made).box - 1} messages",
    ", ".join(f"{n - 1} {name}" for name, n in pools.items() if n),
  )
