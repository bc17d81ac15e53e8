"""Imports of Python sources and of examples in Markdown.

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
      name is computed at run time.
    name: The name after `from module import`, or None.
    line: Its line, from 1.
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
  """Returns the imports of a source; raises SyntaxError if it is invalid."""
  found = []
  for node, lazy in _walk(ast.parse(text)):
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


def _walk(module: ast.Module) -> Iterator[tuple[ast.AST, bool]]:
  """Yields all nodes, each with whether importing the source skips it."""
  stack: list[tuple[ast.AST, bool]] = [(module, False)]
  while stack:
    node, lazy = stack.pop()
    yield node, lazy
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
      stack += [(child, True) for child in node.body]
      stack += [(child, lazy) for child in node.orelse]
    else:
      lazy |= isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
      stack += [(child, lazy) for child in ast.iter_child_nodes(node)]


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
