"""Writes the parts of BUILD files that imports determine.

`find_updates` adds a target for each Python file that has none, removes files
that do not exist, and makes `deps` equal to the imports. Visibility, sizes,
data, `runtime_deps`, comments and all other attributes stay as written by hand.
An import that no target can satisfy is left to the rules, which report it.
"""

import ast
from collections.abc import Iterable, Iterator, Mapping
import dataclasses
import itertools
import pathlib
import re
import textwrap

from paxon.tools.dependencies import build_file, edge_rules, workspace

_LOAD = re.compile(r'load\("//tools:py\.bzl", ([^)]*)\)')
_HEADER = """\
# {folder}: {summary}

load("//tools:py.bzl", "py_library")

package(default_visibility = ["//:__subpackages__"])
"""
_TESTONLY = "testing"
_TEST_END = "_test.py"
_WITHOUT_TARGET = frozenset({"__init__.py", "setup.py"})


@dataclasses.dataclass(frozen=True)
class _Edit:
  """A replacement of the characters from `begin` to `end`."""

  begin: int
  end: int
  text: str


@dataclasses.dataclass(frozen=True)
class _Call:
  """The call of a BUILD file that makes a target.

  Attributes:
    target: The target.
    text: The BUILD file.
    node: The call.
    starts: Where each line begins.
  """

  target: build_file.Target
  text: str
  node: ast.Call
  starts: list[int]

  def value(self, name: str) -> ast.expr | None:
    """Returns an argument of the call, None if it is not passed."""
    values = {item.arg: item.value for item in self.node.keywords}
    return values.get(name)

  def replace(self, node: ast.expr, text: str) -> _Edit:
    """Returns the replacement of a part of the call."""
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    begin = self.starts[node.lineno - 1] + node.col_offset
    end = self.starts[node.end_lineno - 1] + node.end_col_offset
    return _Edit(begin, end, text)

  def add(self, name: str, values: list[str]) -> _Edit:
    """Returns the insertion of an argument at the end of the call."""
    end = self.replace(self.node, "").end - 1
    before = self.text[:end].rstrip()
    comma = "" if before[-1] in ",(" else ","
    return _Edit(end, end, f"{comma}    {name} = {_format(values)},\n")


def find_updates(tree: workspace.Workspace) -> dict[str, str]:
  """Returns the new text of each BUILD file that must change, by path.

  A new target gets its deps by a second call, when the file is written.
  """
  if tree.unreadable:  # Labels of others would be missing, and removed.
    return {}
  added = _sources_without_target(tree)
  builds = {path for path in tree.files if pathlib.Path(path).name == "BUILD"}
  found = {}
  for path in sorted(builds | set(added)):
    old = tree.text(path) if path in builds else ""
    folder = path.rpartition("/")[0]
    new = _apply(old, _edit_targets(tree, folder, old))
    new = _append(tree, folder, new, added.get(path, []))
    if new != old:
      found[path] = new
  return found


# --- Existing targets --------------------------------------------------------


def _edit_targets(
  tree: workspace.Workspace, folder: str, text: str
) -> Iterator[_Edit]:
  """Yields the changes of the targets of one BUILD file."""
  lengths = map(len, text.splitlines(keepends=True))
  starts = [0, *itertools.accumulate(lengths)]
  by_line = {
    target.line: target
    for target in tree.targets.values()
    if target.package == folder and target.is_python and target.srcs
  }
  for statement in ast.parse(text).body:
    target = by_line.get(statement.lineno)
    match statement:
      case ast.Expr(value=ast.Call() as node) if target:
        yield from _edit_target(tree, _Call(target, text, node, starts))


def _edit_target(tree: workspace.Workspace, call: _Call) -> Iterator[_Edit]:
  target = call.target
  srcs = [
    src
    for src, path in zip(target.srcs, target.source_paths(), strict=True)
    if path in tree.files or not path.endswith(".py")
  ]
  if not srcs:
    yield call.replace(call.node, "")
    return
  if len(srcs) < len(target.srcs):
    value = call.value("srcs")
    assert value is not None
    yield call.replace(value, _format(srcs))
  wanted = _imported_labels(tree, target)
  if wanted != set(target.deps):
    yield from _edit_deps(call, wanted)


def _edit_deps(call: _Call, wanted: set[str]) -> Iterator[_Edit]:
  value = call.value("deps")
  while isinstance(value, ast.BinOp):  # What it adds, as a select, stays.
    value = value.left
  package = call.target.package
  if value is None:
    yield call.add("deps", _sort(wanted, package))
  elif isinstance(value, ast.List):
    written = {
      build_file.full_label(label, package) for label in ast.literal_eval(value)
    }
    labels = wanted - (set(call.target.deps) - written)
    yield call.replace(value, _format(_sort(labels, package)))


def _imported_labels(
  tree: workspace.Workspace, target: build_file.Target
) -> set[str]:
  added = edge_rules.added_by_macro(target)
  found: set[str] = set()
  for use in tree.uses(target):
    if use.labels and added.isdisjoint(use.labels):
      declared = set(use.labels) & set(target.deps)
      found.update(declared or use.labels[:1])
  return found


def _apply(text: str, edits: Iterable[_Edit]) -> str:
  for edit in sorted(edits, key=lambda edit: edit.begin, reverse=True):
    text = text[: edit.begin] + edit.text + text[edit.end :]
  return re.sub(r"\n{3,}", "\n\n", text)


# --- New targets -------------------------------------------------------------


def _sources_without_target(
  tree: workspace.Workspace,
) -> Mapping[str, list[str]]:
  """Returns the names of files that are in no target, by BUILD file."""
  found: dict[str, list[str]] = {}
  for path in tree.files:
    folder, _, name = path.rpartition("/")
    is_module = name.endswith(".py") and name not in _WITHOUT_TARGET
    if folder and is_module and not tree.owners(path):
      found.setdefault(f"{folder}/BUILD", []).append(name)
  return found


def _append(
  tree: workspace.Workspace, folder: str, text: str, names: list[str]
) -> str:
  """Returns the text of a BUILD file with a target for each of `names`."""
  if names and not text:
    text = _HEADER.format(folder=folder, summary=_find_summary(tree, folder))
  for name in names:
    stem = name.removesuffix(".py")
    is_test = name.endswith(_TEST_END)
    is_testonly = not is_test and _TESTONLY in [stem, *folder.split("/")]
    kind = "py_test" if is_test else "py_library"
    lines = [
      f'name = "{stem}",',
      'size = "small",' if is_test else "",
      "testonly = True," if is_testonly else "",
      f"srcs = {_format([name])},",
    ]
    attributes = textwrap.indent("\n".join(filter(None, lines)), " " * 4)
    text = _insert(text, kind, stem, f"{kind}(\n{attributes}\n)\n")
    text = _LOAD.sub(lambda match, kind=kind: _load(match[1], kind), text)
  return text


def _insert(text: str, kind: str, name: str, target: str) -> str:
  """Returns a text with a target before those of its kind that follow it."""
  lines = text.splitlines(keepends=True)
  for node in ast.parse(text).body:
    match node:
      case ast.Expr(value=ast.Call(func=ast.Name(id=found)) as call):
        names = [x.value for x in call.keywords if x.arg == "name"]
        if found == kind and names and name < ast.literal_eval(names[0]):
          at = node.lineno - 1
          while lines[at - 1].startswith("#"):
            at -= 1
          return "".join([*lines[:at], target, "\n", *lines[at:]])
  return f"{text.rstrip()}\n\n{target}"


def _find_summary(tree: workspace.Workspace, folder: str) -> str:
  init = f"{folder}/__init__.py"
  if init not in tree.files:
    return "a package."
  docstring = ast.get_docstring(ast.parse(tree.text(init)))
  return (docstring or "A package.").partition("\n")[0]


def _load(symbols: str, kind: str) -> str:
  names = {symbol.strip() for symbol in symbols.split(",")}
  return f'load("//tools:py.bzl", {", ".join(sorted(names | {_quote(kind)}))})'


# --- Format ------------------------------------------------------------------


def _format(values: list[str]) -> str:
  """Returns a list as buildifier writes it as an argument."""
  if len(values) < 2:
    return f"[{''.join(map(_quote, values))}]"
  lines = "".join(f"        {_quote(value)},\n" for value in values)
  return f"[\n{lines}    ]"


def _quote(value: str) -> str:
  return f'"{value}"'


def _sort(labels: Iterable[str], package: str) -> list[str]:
  """Returns labels as written in a package: its own, ours, then wheels."""
  prefix = f"//{package}:"
  short = [
    f":{label.removeprefix(prefix)}" if label.startswith(prefix) else label
    for label in labels
  ]
  return sorted(short, key=lambda label: (":/@".index(label[0]), label))
