"""Tests that the pages on plans are current."""

import datetime
import pathlib

import pytest

from paxon.runner.plan import report, sample_plan
from paxon.tools import plan_pages

_ROOT = pathlib.Path(__file__).parent.parent


def _page(name):
  return (_ROOT / name).read_text()


def test_the_page_of_fields_is_current():
  assert _page(plan_pages.FIELDS_PAGE) == plan_pages.fields_page(), (
    "run tools/plan_pages"
  )


def test_every_field_is_explained():
  page = plan_pages.fields_page()
  assert "| `saved` | Mapping[str, int] | What is held from the forward" in page
  assert "|  |" not in page
  assert "| `estimate` | Estimate or None |" in page


def test_the_plan_of_the_page_has_the_sections_that_plans_have():
  page = _page(plan_pages.PLANNING_PAGE)
  shown = page.split(plan_pages.BEGIN)[1].split(plan_pages.END)[0]
  # Of a program with nothing to warn of, in which nothing is quantized.
  plan = sample_plan.plan(
    resharding=(), findings=(), warnings=(), notes=(), quantized_products=()
  )
  sections = report.to_text(plan).split("\n\n")
  headings = [section.split("\n")[0] for section in sections]
  wanted = [h.partition(":")[0].partition(" of ")[0] for h in headings[:-1]]
  assert len(wanted) > 6
  for heading in wanted:
    assert f"\n{heading}" in shown, "run tools/plan_pages --planning"


def test_a_plan_replaces_the_one_before():
  day = datetime.date(2026, 1, 2)
  page = f"a\n{plan_pages.BEGIN}\nold\n{plan_pages.END}\nb\n"
  once = plan_pages.with_plan(page, "new\n", date=day)
  assert once == (
    f"a\n{plan_pages.BEGIN}\n2026-01-02:\n\n```text\nnew\n```\n"
    f"{plan_pages.END}\nb\n"
  )
  assert plan_pages.with_plan(once, "new", date=day) == once
  with pytest.raises(ValueError, match=r"must have <!-- Made .* once each"):
    plan_pages.with_plan("a", "new", date=day)
