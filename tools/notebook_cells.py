"""Notebooks in Markdown: a page's ```python blocks are the cells.

jupytext opens such a page as a notebook, a browser shows it, and a difference
between two versions is short. `to_ipynb` makes a notebook file of it. Other
blocks, and indented code, are text.
"""

from collections.abc import Mapping
import dataclasses
import json
import re

_BLOCK = re.compile(r"^```python\n(.*?)^```\n?", re.DOTALL | re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Cell:
  """One cell.

  Attributes:
    text: Code, or Markdown.
    is_code: Whether it is code.
    line: Its first line in the page, from 1.
  """

  text: str
  is_code: bool
  line: int


def read(page: str) -> list[Cell]:
  """Returns the cells of a page in order, without empty ones."""
  cells, end = [], 0

  def add(text: str, start: int, is_code: bool) -> None:
    if text.strip():
      skipped = len(text) - len(text.lstrip("\n"))
      line = page.count("\n", 0, start + skipped) + 1
      cells.append(Cell(text.strip("\n"), is_code, line))

  for match in _BLOCK.finditer(page):
    add(page[end : match.start()], end, False)
    add(match[1], match.start(1), True)
    end = match.end()
  add(page[end:], end, False)
  return cells


def change(page: str, values: Mapping[str, object]) -> str:
  """Returns a page with other values for variables of its cells.

  Raises:
    ValueError: A variable is not assigned in exactly one statement that begins
      a line.
  """
  for name, value in values.items():
    # A value may have several lines, up to a bracket that begins a line.
    pattern = rf"^{name} = (?:[({{\[]\n(?:  .*\n)*[)}}\]]|.*)$"
    found = list(re.finditer(pattern, page, re.MULTILINE))
    if len(found) != 1:
      raise ValueError(f"{name} is assigned {len(found)} times, not once.")
    (match,) = found
    page = f"{page[: match.start()]}{name} = {value!r}{page[match.end() :]}"
  return page


def to_ipynb(page: str) -> str:
  """Returns a page as a notebook file (nbformat 4.5) without outputs."""
  cells = []
  for number, cell in enumerate(read(page)):
    made = {
      "cell_type": "code" if cell.is_code else "markdown",
      "id": f"cell-{number}",
      "metadata": {},
      "source": cell.text.splitlines(keepends=True),
    }
    if cell.is_code:
      made |= {"execution_count": None, "outputs": []}
    cells.append(made)
  kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
  notebook = {
    "cells": cells,
    "metadata": {"kernelspec": kernel, "language_info": {"name": "python"}},
    "nbformat": 4,
    "nbformat_minor": 5,
  }
  return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"
