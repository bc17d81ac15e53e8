"""Imports are found wherever they stand in a source."""

from paxon.tools.dependencies import imports

_SOURCE = """
import a, b.c as d
from e.f import g as h, i
from .j import k


def function():
  if TYPE_CHECKING:
    import l
  importlib.import_module("m.n")
  pytest.importorskip("o")
  __import__(name)
  something("p")
"""


def test_finds_every_import_in_order():
  found = [(i.line, i.dotted, i.level) for i in imports.parse(_SOURCE)]
  assert found == [
    (2, "a", 0),
    (2, "b.c", 0),
    (3, "e.f.g", 0),
    (3, "e.f.i", 0),
    (4, "j.k", 1),
    (9, "l", 0),
    (10, "m.n", 0),
    (11, "o", 0),
    (12, "", 0),
  ]


def test_lines_are_counted_from_where_the_text_begins():
  (item,) = imports.parse("x = 1\nimport a\n", first_line=40)
  assert item.line == 41


def test_only_python_blocks_of_markdown_are_programs():
  markdown = """# layers
```python
import a
```
```sh
import b
```
Text
```python
import c

x = "```"
```
"""
  assert list(imports.python_blocks(markdown)) == [
    imports.PythonBlock(3, "import a\n"),
    imports.PythonBlock(10, 'import c\n\nx = "```"\n'),
  ]
