"""Size of the tree: lines, modules, small modules, import closures.

    python -m paxon.tools.size_table [WORKSPACE]

Production code is Python that is neither a test (`*_test.py`) nor in a testonly
target. An import closure counts the modules of ours that `import` loads.
"""

from collections.abc import Iterable, Sequence
import dataclasses
import pathlib
import sys

from paxon.runner.checkpoints import text_table
from paxon.tools.dependencies import file_rules, workspace

SMALL = 100
# Modules that users import.
CLOSURES = {
  "experiment": "runner/experiment.py",
  "quickstart": "tasks/lm/params/quickstart.py",
  "train": "runner/training/train.py",
  "grouped_query": "layers/attention/grouped_query.py",
  "train_step": "learners/train_step.py",
  "decoder_lm": "layers/models/decoder_lm.py",
  "main": "runner/main.py",
}
_COLUMNS = (
  "folder",
  "production",
  "testonly",
  "test",
  "BUILD",
  "modules",
  f"< {SMALL} lines",
  "fragments",
)


@dataclasses.dataclass
class Row:
  """Counts of a folder; the fields are the columns of the table.

  Attributes:
    production: Lines of production Python.
    testonly: Lines of Python in testonly targets.
    test: Lines of tests.
    build: Lines of BUILD and .bzl files.
    modules: Number of production modules, without `__init__.py`.
    small: Number of modules with fewer lines than `SMALL`.
    fragments: Modules under `file_rules.MIN_LINES` with one importer.
  """

  production: int = 0
  testonly: int = 0
  test: int = 0
  build: int = 0
  modules: int = 0
  small: int = 0
  fragments: int = 0

  def __add__(self, other: "Row") -> "Row":
    pairs = zip(
      dataclasses.astuple(self), dataclasses.astuple(other), strict=True
    )
    return Row(*(a + b for a, b in pairs))


def measure(tree: workspace.Workspace) -> dict[str, Row]:
  """Returns the counts of every folder that has any."""
  importers = file_rules.production_importers(tree)
  rows: dict[str, Row] = {}
  for path in tree.files:
    row = rows.setdefault(path.rpartition("/")[0] or ".", Row())
    name = pathlib.PurePath(path).name
    if name != "BUILD" and not name.endswith((".bzl", ".py")):
      continue
    lines = tree.text(path).count("\n")
    owners = tree.owners(path)
    if not name.endswith(".py"):
      row.build += lines
    elif name.endswith("_test.py"):
      row.test += lines
    elif owners and all(target.testonly for target in owners):
      row.testonly += lines
    else:
      row.production += lines
      if name != "__init__.py":
        row.modules += 1
        row.small += lines < SMALL
        row.fragments += (
          lines < file_rules.MIN_LINES and len(importers.get(path, ())) == 1
        )
  return {folder: row for folder, row in rows.items() if row != Row()}


def closures(tree: workspace.Workspace) -> dict[str, tuple[int, int]]:
  """Returns modules and lines that importing each of `CLOSURES` loads."""
  found = {}
  for name, path in CLOSURES.items():
    if path in tree.imports:
      loaded = tree.loaded_modules([path])
      lines = sum(tree.text(each).count("\n") for each in loaded)
      found[name] = (len(loaded), lines)
  return found


def to_text(tree: workspace.Workspace) -> str:
  """Returns both tables."""
  rows = measure(tree)
  tops: dict[str, Row] = {}
  for folder, row in rows.items():
    top = folder.partition("/")[0]
    tops[top] = tops.get(top, Row()) + row
  sub = {folder: row for folder, row in rows.items() if "runner/" in folder}
  plan = sum((row for f, row in rows.items() if _is_plan(f)), Row())
  total = sum(rows.values(), Row())
  named = [
    *sorted(tops.items()),
    *sorted(sub.items()),
    ("plan and planning", plan),
    ("total", total),
  ]
  table = _table(
    [(name, *dataclasses.astuple(row)) for name, row in named], _COLUMNS
  )
  sizes = [(name, *size) for name, size in closures(tree).items()]
  return f"{table}\n\n{_table(sizes, ('importing', 'modules', 'lines'))}"


def _is_plan(folder: str) -> bool:
  return f"{folder}/".startswith(("runner/plan/", "runner/planning/"))


def _table(rows: Iterable[Sequence[object]], head: Sequence[str]) -> str:
  cells = [head, *(tuple(map(_cell, row)) for row in rows)]
  right = range(1, len(head))
  return "\n".join(text_table.format_lines(cells, right=right))


def _cell(value: object) -> str:
  return f"{value:,}" if isinstance(value, int) else str(value)


def main(arguments: Sequence[str]) -> int:
  """Prints the tables of a workspace, by default this one."""
  start = pathlib.Path(arguments[0] if arguments else __file__)
  print(to_text(workspace.load(workspace.find_root(start))))
  return 0


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
