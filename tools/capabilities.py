"""The table of capabilities: what serves each, and the test that shows it.

`docs/capabilities.json` says, of each capability that users of Pax had in the
areas below, which part serves it, or why none does. From it comes the page; and
it is held against the checkout, so that no row names what is not there.

  python -m paxon.tools.capabilities            checks
  python -m paxon.tools.capabilities --update   writes docs/capabilities.md
"""

import ast
from collections.abc import Iterator, Mapping
import dataclasses
import functools
import itertools
import json
import pathlib
import sys
from typing import Any

from paxon.tools.dependencies import source_tree, workspace

DATA = "docs/capabilities.json"
PAGE = "docs/capabilities.md"
MEND = "run tools/python -m paxon.tools.capabilities --update"

# The rows that each area must have: none of them may be left out.
ROWS: Mapping[str, tuple[range, ...]] = {
  "A": (
    range(12, 24),
    range(27, 28),
    range(43, 51),
    range(52, 53),
    range(58, 59),
    range(66, 68),
  ),
  "B": (range(1, 34),),
  "C": (range(1, 19),),
  "D": (range(1, 40),),
  "E": (range(1, 44),),
  "F": (range(1, 14),),
  "I": (range(1, 35),),
  "K": (range(14, 19), range(24, 25)),
  "L": (range(1, 21),),
}
# Parts of other libraries, which our tests use.
_LIBRARIES = frozenset({"flax"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
  """One capability; it has parts with a test, or one of the reasons.

  Attributes:
    id: Area and number.
    what: The capability, in a few words.
    parts: What serves it: modules, their names, fields or methods of these.
    test: `path::function` of a test that shows it.
    note: What else to know.
    later: What the issue is about that will bring it.
    not_taken: Why it is not wanted.
  """

  id: str
  what: str
  parts: tuple[str, ...] = ()
  test: str = ""
  note: str = ""
  later: str = ""
  not_taken: str = ""

  @property
  def area(self) -> str:
    """The letter of its area."""
    return self.id[0]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
  """All rows.

  Attributes:
    areas: Titles by letter.
    rows: In order.
    ours: What public modules of `layers` are for that serve no row, by the name
      of the module or of its package.
  """

  areas: Mapping[str, str]
  rows: tuple[Row, ...]
  ours: Mapping[str, str]


def read(root: pathlib.Path) -> Table:
  """Returns the table of a checkout."""
  data: dict[str, Any] = json.loads((root / DATA).read_text())
  rows: list[Row] = []
  for row in data["rows"]:
    given: dict[str, Any] = {**row, "parts": tuple(row.get("parts", ()))}
    rows.append(Row(**given))
  return Table(areas=data["areas"], rows=tuple(rows), ours=data["ours"])


def page(table: Table) -> str:
  """Returns the text of docs/capabilities.md."""
  lines = [
    "# Capabilities",
    "",
    "Made by `tools/python -m paxon.tools.capabilities --update` from"
    f" `{DATA}`; a test checks that every part and test is there. Rows are"
    " those of Pax; a capability is owed, not a class.",
  ]
  for area, title in table.areas.items():
    lines += ["", f"## {area}. {title}", ""]
    lines += ["| Row | Capability | Served by | Test | Note |"]
    lines += ["| --- | --- | --- | --- | --- |"]
    lines += [_line(row) for row in table.rows if row.area == area]
  lines += ["", "## Ours alone", "", "| Module | For |", "| --- | --- |"]
  lines += [f"| `{name}` | {what} |" for name, what in table.ours.items()]
  return "\n".join(lines) + "\n"


def _line(row: Row) -> str:
  served = ", ".join(f"`{part}`" for part in row.parts)
  note = row.note
  if row.later:
    served, note = "a later issue", row.later
  elif row.not_taken:
    served, note = "not taken", row.not_taken
  path, _, function = row.test.partition("::")
  test = f"[{function}](../{path})" if path else ""
  cells = (row.id, row.what, served, test, note.replace("|", "\\|"))
  return f"| {' | '.join(cells)} |"


def problems(tree: workspace.Workspace, table: Table) -> list[str]:
  """Returns what is wrong with a table, one line each.

  Args:
    tree: The checkout.
    table: Of this checkout or not.
  """
  found = list(_counted(table))
  for row in table.rows:
    found += [f"{row.id}: {problem}" for problem in _of_row(tree, row)]
  found += _of_modules(tree, table)
  return found


def _counted(table: Table) -> Iterator[str]:
  expected = [
    f"{area}{number}"
    for area, ranges in ROWS.items()
    for number in itertools.chain(*ranges)
  ]
  ids = [row.id for row in table.rows]
  for name in expected:
    if ids.count(name) != 1:
      yield f"{name} must have one row, and has {ids.count(name)}."
  for name in sorted(set(ids) - set(expected)):
    yield f"{name} is no row that is asked for."


def _of_row(tree: workspace.Workspace, row: Row) -> Iterator[str]:
  kinds = [bool(row.parts), bool(row.later), bool(row.not_taken)]
  if sum(kinds) != 1 or bool(row.parts) != bool(row.test):
    yield "must have parts and a test, or `later`, or `not_taken`."
    return
  if not row.parts:
    return
  path, _, function = row.test.partition("::")
  if path not in tree.files:
    yield f"the test file {path} does not exist."
    return
  if not any(owner.is_test for owner in tree.owners(path)):
    yield f"{path} is in no test target, so nothing runs it."
  if f"\ndef {function}(" not in tree.text(path):
    yield f"{path} has no function {function}."
  for part in row.parts:
    library, _, name = part.partition(".")
    if library not in _LIBRARIES:
      yield from _of_part(tree, part)
    elif name.rpartition(".")[2] not in tree.text(path):
      yield f"{path} does not use {part}."


def _of_part(tree: workspace.Workspace, part: str) -> Iterator[str]:
  """Yields why a part of ours cannot be imported."""
  module = _module(tree, part)
  if module is None:
    yield f"there is no module for {part}."
    return
  path = module.replace(".", "/") + ".py"
  if not any(t.kind == "py_library" for t in tree.owners(path)):
    yield f"{path} is in no library."
  names = part.removeprefix(module).strip(".").split(".")
  body: list[ast.stmt] = _parsed(tree.root / path).body
  for name in filter(None, names):
    inner = [stmt for stmt in body if name in _defined(stmt)]
    if not inner:
      yield f"{path} defines no {name}, of {part}."
      return
    last = inner[-1]
    body = last.body if isinstance(last, ast.ClassDef) else []


def _module(tree: workspace.Workspace, part: str) -> str | None:
  """Returns the longest beginning of a dotted name that is a module."""
  names = part.split(".")
  for end in range(len(names), 0, -1):
    if "/".join(names[:end]) + ".py" in tree.files:
      return ".".join(names[:end])
  return None


@functools.cache
def _parsed(path: pathlib.Path) -> ast.Module:
  return ast.parse(path.read_text())


def _defined(stmt: ast.stmt) -> set[str]:
  """Returns the names that a statement defines."""
  if isinstance(stmt, ast.ClassDef | ast.FunctionDef):
    return {stmt.name}
  if isinstance(stmt, ast.AnnAssign):
    return {stmt.target.id} if isinstance(stmt.target, ast.Name) else set()
  if isinstance(stmt, ast.Assign):
    return {t.id for t in stmt.targets if isinstance(t, ast.Name)}
  return set()


def _of_modules(tree: workspace.Workspace, table: Table) -> Iterator[str]:
  """Yields public modules of `layers` that nobody has use for, and others."""
  public = {
    path.removesuffix(".py").replace("/", ".")
    for target in tree.targets.values()
    if target.kind == "py_library" and target.is_public
    for path in target.source_paths()
    if path.startswith("layers/")
  }
  named = {
    _module(tree, part) or part for row in table.rows for part in row.parts
  }
  served: set[str] = set()
  for name, prefix in itertools.product(sorted(public), table.ours):
    if name == prefix or name.startswith(f"{prefix}."):
      served.add(name)
      if name in named:
        yield f"{name} is in `ours`, but serves a row."
  for name in sorted(public - named - served):
    yield f"{name} is public, but in no row and not in `ours` of {DATA}."
  for name in table.ours:
    if not any(one == name or one.startswith(f"{name}.") for one in served):
      yield f"{name} is in `ours`, but is no public module of layers."


def check(root: pathlib.Path) -> list[str]:
  """Returns what is wrong with the table and its page, one line each."""
  table = read(root)
  found = problems(workspace.load(root), table)
  path = root / PAGE
  if not path.is_file() or path.read_text() != page(table):
    found.append(f"{PAGE} is not current; {MEND}.")
  return found


def main(argv: list[str]) -> int:
  """Checks the checkout, or writes the page; returns the exit status."""
  root = source_tree.find_root(pathlib.Path(__file__))
  if argv == ["--update"]:
    (root / PAGE).write_text(page(read(root)))
  elif argv:
    print(__doc__)
    return 2
  found = check(root)
  print("\n".join(found) or "all rows are right")
  return 1 if found else 0


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
