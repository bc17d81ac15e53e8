"""Tests for notebooks in Markdown."""

import json

import pytest

from paxon.tools import notebook_cells

_PAGE = """# A page

Text.

```python
N = 3
SIZES = {
  "a": 1,
}
```

    indented = "text"

```python
print(N)
```
"""


def test_blocks_of_python_are_cells():
  cells = notebook_cells.read(_PAGE)
  assert [(cell.is_code, cell.line) for cell in cells] == [
    *((False, 1), (True, 6), (False, 12), (True, 15))
  ]
  assert cells[3].text == "print(N)"


def test_a_setting_has_another_value():
  text = notebook_cells.change(_PAGE, {"N": 4, "SIZES": {"b": 2}})
  assert notebook_cells.read(text)[1].text == "N = 4\nSIZES = {'b': 2}"
  with pytest.raises(ValueError, match="M is assigned 0 times"):
    notebook_cells.change(_PAGE, {"M": 4})


def test_a_page_is_a_notebook_file():
  found = json.loads(notebook_cells.to_ipynb(_PAGE))
  assert [cell["cell_type"] for cell in found["cells"]] == [
    *("markdown", "code", "markdown", "code")
  ]
  assert found["cells"][1]["source"][0] == "N = 3\n"
  assert found["nbformat"] == 4
