"""Package READMEs: headings, the table of modules, examples; links of pages.

The five headings let a reader skim ten packages. The table of modules lists the
public targets, which other repositories may use. Examples are run by the
package's test that has the README in its `srcs`.
"""

from collections.abc import Iterator
import posixpath
import re

from paxon.tools.dependencies import (
  build_file,
  order_rules,
  violation,
  workspace,
)
from paxon.tools.dependencies import imports as python_imports

HEADINGS = ("Modules", "Use it", "Rules here", "Depends on", "Decisions")
MAX_EXAMPLE_LINES = 18
_MAX_ROOT_EXAMPLE_LINES = 20

# Packages that are used from BUILD files and the command line.
_NOT_FOR_IMPORT = ("third_party", "tools")

_HEADING = re.compile(r"^## (.+?)\s*$", re.MULTILINE)
# Of another page or file of the checkout, without the place on it.
_LINK = re.compile(r"\]\(([^()#\s:]+)(?:#[^()\s]*)?\)")
_ROW = re.compile(r"^\|[^|`]*`([^`|]+)`[^|]*\|", re.MULTILINE)


def check(tree: workspace.Workspace) -> Iterator[violation.Violation]:
  """Yields a violation for each README that is missing or out of date."""
  for package in tree.packages():
    path = f"{package}/README.md".lstrip("/")
    if package.startswith("third_party/"):
      continue  # Described in third_party/README.md.
    if path not in tree.files:
      messages = ["is missing; describe the package."]
    else:
      text = tree.text(path)
      messages = list(_example_problems(tree, package, text))
      if package:
        messages += _heading_problems(text)
        messages += _table_problems(tree, package, text)
      else:
        messages += _map_problems(tree, text)
    for message in messages:
      yield violation.Violation(path, 0, path, message)
  for path in tree.files:
    if path.endswith(".md"):
      for message in _link_problems(tree, path):
        yield violation.Violation(path, 0, path, message)


def _link_problems(tree: workspace.Workspace, path: str) -> Iterator[str]:
  for link in _LINK.findall(_without_code(tree.text(path))):
    target = posixpath.join(posixpath.dirname(path), link)
    if not (tree.root / target).exists():
      yield f"links to {link}, which does not exist; fix the link."


def _heading_problems(text: str) -> Iterator[str]:
  headings = tuple(_HEADING.findall(_without_code(text)))
  if headings != HEADINGS:
    yield (
      f"has the headings {', '.join(headings) or '(none)'}; every package has"
      f" {', '.join(HEADINGS)}, in this order."
    )


def _table_problems(
  tree: workspace.Workspace, package: str, text: str
) -> Iterator[str]:
  """Yields differences between the table of modules and public targets."""
  public = {
    target.name
    for target in tree.targets.values()
    if target.package == package and _is_listed(target)
  }
  section = re.search(r"^## Modules\n(.*?)(?=^## |\Z)", text, re.S | re.M)
  cells = set(_ROW.findall(section[1])) if section else set()
  folders = {cell for cell in cells if cell.endswith("/")}
  for folder in sorted(folders):
    if f"{package}/{folder}BUILD" not in tree.files:
      yield f"lists the folder `{folder}`, which has no BUILD; remove the row."
  rows = {cell.removesuffix(".py") for cell in cells - folders}
  for name in sorted(public - rows):
    yield (
      f"does not list the public target //{package}:{name}; add a row"
      f" `{name}` to its Modules table, or make the target not public."
    )
  for name in sorted(rows - public):
    yield (
      f"lists `{name}`, but //{package}:{name} is not public; make it public,"
      " or remove the row."
    )


def _is_listed(target: build_file.Target) -> bool:
  """Returns whether a target belongs in the table of modules."""
  if order_rules.get_top(target.package) == "tools":
    # Used by its own folder only; the table is an overview.
    is_shown = target.package != "tools" or not target.testonly
    return target.kind == "py_library" and is_shown
  return target.is_python and target.is_public


def _example_problems(
  tree: workspace.Workspace, package: str, text: str
) -> Iterator[str]:
  """Yields examples that are missing, too long, or run by no test."""
  blocks = list(python_imports.python_blocks(text))
  limit = MAX_EXAMPLE_LINES if package else _MAX_ROOT_EXAMPLE_LINES
  for block in blocks:
    lines = block.text.count("\n")
    if lines > limit:
      yield (
        f"the example at line {block.line} has {lines} lines; make it at most"
        f" {limit}."
      )
  importable = any(
    target.package == package
    and target.kind == "py_library"
    and target.is_public
    for target in tree.targets.values()
  )
  kept_apart = order_rules.get_top(package) in _NOT_FOR_IMPORT
  if importable and package and not blocks and not kept_apart:
    yield "has no example; add a ```python block under Use it."
  is_run = any(
    target.is_test and target.package == package and "README.md" in target.srcs
    for target in tree.targets.values()
  )
  if blocks and not is_run:
    yield (
      'has an example that no test runs; add "README.md" to the srcs of a'
      " py_test in BUILD."
    )


def _map_problems(tree: workspace.Workspace, text: str) -> Iterator[str]:
  """Yields top-level folders that the root README does not list."""
  folders = {
    order_rules.get_top(package) for package in tree.packages() if package
  }
  for folder in sorted(folders):
    if f"`{folder}/`" not in text:
      yield f"its map has no line for `{folder}/`; add one."


def _without_code(text: str) -> str:
  return re.sub(r"^```.*?^```$", "", text, flags=re.S | re.M)
