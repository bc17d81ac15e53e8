"""The page on plans shows every section of a report."""

import pathlib

from paxon.runner.plan import report, sample_plan

_DOCS = pathlib.Path(__file__).parent.parent / "docs"


def test_the_plan_of_the_page_has_the_sections_that_plans_have():
  page = (_DOCS / "planning.md").read_text()
  shown = page.split("```text")[1].split("```")[0]
  # Of a program with nothing to warn of, in which nothing is quantized, without
  # further questions.
  plan = sample_plan.plan(
    findings=(),
    warnings=(),
    notes=(),
    quantized_matmuls=(),
    other_programs=(),
    decode_steps=(),
  )
  sections = report.to_text(plan).split("\n\n")
  headings = [section.split("\n")[0] for section in sections]
  wanted = [h.partition(":")[0].partition(" of ")[0] for h in headings[:-1]]
  assert len(wanted) > 6
  for heading in wanted:
    assert f"\n{heading}" in shown
