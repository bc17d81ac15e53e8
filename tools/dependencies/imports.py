"""The imports of a Python source, wherever they stand in it.

An import inside a function, under `TYPE_CHECKING`, or made by
`importlib.import_module("a.b")`, `__import__("a.b")` and
`pytest.importorskip("a.b")` is an edge like one at the top.
"""

import ast
from collections.abc import Iterator
import dataclasses
import re

_DYNAMIC = frozenset({"import_module", "__import__", "importorskip"})
_PYTHON_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Import:
  """One imported thing.

  Attributes:
    module: The dotted name after `import` or `from`; empty when an imported
      name is computed while the program runs.
    name: The name after `from module import`, or None.
    line: Where it stands, from 1.
    level: The number of dots of a relative import.
    lazy: Whether importing the source leaves it out: the import is inside a
      function, or under `if TYPE_CHECKING`.
  """

  module: str
  name: str | None
  line: int
  level: int = 0
  lazy: bool = False

  @property
  def dotted(self) -> str:
    """The module and the name in it, as one path."""
    return f"{self.module}.{self.name}" if self.name else self.module


@dataclasses.dataclass(frozen=True)
class PythonBlock:
  """A ```python block of a Markdown file; `line` is that of its first line."""

  line: int
  text: str


def parse(text: str, first_line: int = 1) -> list[Import]:
  """Returns the imports of a source; raises SyntaxError if it has a mistake."""
  found = []
  for node, lazy in _walk(ast.parse(text), lazy=False):
    line = getattr(node, "lineno", 1) + first_line - 1
    match node:
      case ast.Import(names=names):
        found += [Import(alias.name, None, line, lazy=lazy) for alias in names]
      case ast.ImportFrom(module=module, names=names, level=level):
        found += [
          Import(module or "", alias.name, line, level, lazy) for alias in names
        ]
      case ast.Call(func=function, args=[first, *_]) if (
        _called_name(function) in _DYNAMIC
      ):
        literal = isinstance(first, ast.Constant)
        name = str(first.value) if literal else ""
        found.append(Import(name, None, line, lazy=lazy))
  return sorted(found, key=lambda item: (item.line, item.dotted))


def _walk(node: ast.AST, *, lazy: bool) -> Iterator[tuple[ast.AST, bool]]:
  """Yields all nodes, each with whether importing the source skips it."""
  yield node, lazy
  match node:
    case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
      lazy = True
    case ast.If(test=test, orelse=orelse) if "TYPE_CHECKING" in ast.unparse(
      test
    ):
      for child in orelse:
        yield from _walk(child, lazy=lazy)
      for child in node.body:
        yield from _walk(child, lazy=True)
      return
  for child in ast.iter_child_nodes(node):
    yield from _walk(child, lazy=lazy)


def python_blocks(markdown: str) -> Iterator[PythonBlock]:
  """Yields the ```python blocks of a Markdown text."""
  for match in _PYTHON_BLOCK.finditer(markdown):
    line = markdown.count("\n", 0, match.start(1)) + 1
    yield PythonBlock(line, match[1])


def _called_name(function: ast.expr) -> str | None:
  match function:
    case ast.Name(id=name) | ast.Attribute(attr=name):
      return name
  return None
