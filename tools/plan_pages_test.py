"""The pages on plans name every field of plan.json and every section."""

import dataclasses
import pathlib

import pytest

from paxon.runner.plan import report, result, sample_plan

_DOCS = pathlib.Path(__file__).parent.parent / "docs"


@pytest.mark.parametrize(
  "part",
  [
    result.Plan,
    result.Memory,
    result.Flops,
    result.Collectives,
    result.Resharding,
    result.KernelChoice,
    result.QuantizedProduct,
    result.Bound,
    result.Estimate,
    result.Change,
    result.Failure,
  ],
)
def test_the_page_of_fields_lists_each_field(part):
  page = (_DOCS / "plan_json.md").read_text()
  section = page.split(f"\n## {part.__name__}\n")[1].split("\n## ")[0]
  listed = [
    line.split("`")[1] for line in section.splitlines() if "| `" in line
  ]
  assert listed == [field.name for field in dataclasses.fields(part)]


def test_the_plan_of_the_page_has_the_sections_that_plans_have():
  page = (_DOCS / "planning.md").read_text()
  shown = page.split("```text")[1].split("```")[0]
  # Of a program with nothing to warn of, in which nothing is quantized.
  plan = sample_plan.plan(
    resharding=(), findings=(), warnings=(), notes=(), quantized_products=()
  )
  sections = report.to_text(plan).split("\n\n")
  headings = [section.split("\n")[0] for section in sections]
  wanted = [h.partition(":")[0].partition(" of ")[0] for h in headings[:-1]]
  assert len(wanted) > 6
  for heading in wanted:
    assert f"\n{heading}" in shown
