"""Tests for the runner of a page's code."""

import pytest

from paxon.tools import run_page_examples

_PAGE = """# A page

```python file=mine/thing.py
VALUE = 3
```

Text.

```python
from mine import thing

open("out.txt", "w").write(str(thing.VALUE))
```

```sh status=3
test "$(python -c 'from mine import thing; print(thing.VALUE)')" = 3
exit 3
```
"""


def test_blocks_are_run_in_order_in_one_folder(tmp_path):
  blocks = run_page_examples.blocks(_PAGE)
  assert [(b.kind, b.file, b.status) for b in blocks] == [
    ("python", "mine/thing.py", 0),
    ("python", None, 0),
    ("sh", None, 3),
  ]
  assert blocks[1].line == 10
  for block in blocks:
    run_page_examples.run(block, tmp_path)
  assert (tmp_path / "out.txt").read_text() == "3"


def test_a_block_that_fails_is_shown(tmp_path):
  block = run_page_examples.blocks("```sh\nfalse | true\n```\n")[0]
  with pytest.raises(AssertionError, match="line 2: status 1, wanted 0"):
    run_page_examples.run(block, tmp_path)


@pytest.mark.parametrize(
  "page", ["no code", "```bash\nx\n```\n", "```python fiel=a\nx\n```\n"]
)
def test_a_block_that_is_not_understood_is_an_error(page):
  with pytest.raises(ValueError, match="blocks 0 can be read"):
    run_page_examples.blocks(page)
