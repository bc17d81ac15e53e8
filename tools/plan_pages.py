"""Writes the pages on plans that follow from the code.

tools/plan_pages               docs/plan_json.md, from the docstrings
tools/plan_pages --planning    and the plan shown in docs/planning.md, which
                               needs the compiler for CUDA
"""

import argparse
from collections.abc import Sequence
import dataclasses
import datetime
import inspect
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from typing import Final

from paxon.runner.plan import result

FIELDS_PAGE: Final = "docs/plan_json.md"
PLANNING_PAGE: Final = "docs/planning.md"
BEGIN: Final = "<!-- Made by tools/plan_pages --planning. -->"
END: Final = "<!-- Until here. -->"

_EXPERIMENT: Final = "tasks.lm.params.quickstart.PythonStdlibLm"
_ARGUMENTS: Final = (
  "--mode=plan",
  "--target=h200:1x8",
  "--fdl.mesh=fsdp=-1",
)
_PARTS: Final = (
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
)
_ROOT: Final = pathlib.Path(__file__).parent.parent
_ENTRY: Final = re.compile(r"^(\w+): (.*(?:\n {2,}.*)*)", re.MULTILINE)


def fields_page() -> str:
  """Returns the text of docs/plan_json.md."""
  lines = [
    "# plan.json",
    "",
    "Made by `tools/plan_pages` from the docstrings of `runner/plan/result.py`;"
    " a test holds the two together.",
    "",
    f"Version {result.VERSION}. A reader refuses another version: fields change"
    " their meaning only with it. Null is what is not known.",
    "",
    _after_the_first_line(result.__doc__ or ""),
  ]
  for part in _PARTS:
    description, fields = _documented(part)
    lines += ["", f"## {part.__name__}", description, ""]
    lines += ["| Field | Type | Meaning |", "| --- | --- | --- |"]
    for field in dataclasses.fields(part):
      kind = inspect.formatannotation(field.type)
      kind = kind.replace("collections.abc.", "").replace("|", "or")
      kind = re.sub(r"paxon\.runner\.plan\.result\.", "", kind)
      lines.append(f"| `{field.name}` | {kind} | {fields[field.name]} |")
  return "\n".join(lines) + "\n"


def with_plan(page: str, plan: str, *, date: datetime.date) -> str:
  """Returns a page with another plan between its marks.

  Args:
    page: The text of docs/planning.md.
    plan: What `--mode=plan` printed.
    date: When it was made.

  Raises:
    ValueError: The page has no marks, or they are several.
  """
  if page.count(BEGIN) != 1 or page.count(END) != 1:
    raise ValueError(f"The page must have {BEGIN} and {END} once each.")
  before, rest = page.split(BEGIN)
  after = rest.split(END)[1]
  block = f"{date:%Y-%m-%d}:\n\n```text\n{plan.strip()}\n```"
  return f"{before}{BEGIN}\n{block}\n{END}{after}"


def main(arguments: Sequence[str]) -> int:
  """Writes the pages."""
  parser = argparse.ArgumentParser(prog="tools/plan_pages")
  parser.add_argument("--planning", action="store_true")
  options = parser.parse_args(arguments)
  (_ROOT / FIELDS_PAGE).write_text(fields_page())
  if options.planning:
    page = _ROOT / PLANNING_PAGE
    today = datetime.datetime.now(datetime.UTC).date()
    page.write_text(with_plan(page.read_text(), _planned(), date=today))
  return 0


def _planned() -> str:
  """Runs the command of the page and returns what it prints of the plan."""
  with tempfile.TemporaryDirectory() as folder:
    done = subprocess.run(
      [
        *(sys.executable, "-m", "paxon.runner.main", f"--exp={_EXPERIMENT}"),
        *(*_ARGUMENTS, f"--job_log_dir={folder}"),
      ],
      env=os.environ | {"PAXON_CACHE_DIR": "off"},
      stdout=subprocess.PIPE,
      text=True,
      check=True,
    )
  lines = done.stdout.splitlines()
  begin = next(i for i, line in enumerate(lines) if line.startswith("plan of "))
  end = next(i for i, line in enumerate(lines) if line.startswith("plan: "))
  return "\n".join(lines[begin:end])


def _documented(part: type) -> tuple[str, dict[str, str]]:
  """Returns the description of a dataclass, and that of each field."""
  text = inspect.getdoc(part) or ""
  description, _, attributes = text.partition("\nAttributes:\n")
  fields = {
    name: " ".join(words.split())
    for name, words in _ENTRY.findall(inspect.cleandoc(attributes))
  }
  return " ".join(description.split()), fields


def _after_the_first_line(text: str) -> str:
  return " ".join(text.partition("\n")[2].split())


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
