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


_PRINTED = (
  "plan of a.B\n  peak     466.71 GiB\nkernels\n  1,024 x\nfits: 60 %\n"
)


@pytest.mark.parametrize(
  "text",
  [
    "plan of a.B\nfits: 60 %",
    "peak 466.71 GiB\n1,024 x",
    "peak 460 GiB",
    "1,030 x",
  ],
)
def test_a_text_is_what_was_printed(text):
  (block,) = run_page_examples.blocks(f"```text\n{text}\n```\n")
  run_page_examples.check(block, _PRINTED)


@pytest.mark.parametrize(
  ("text", "line"),
  [
    ("peak 500 GiB", 2),
    ("peak 466.71 MiB", 2),
    ("plan of a.C", 2),
    ("fits: 60 %\nplan of a.B", 3),
    ("1,024 x\n1,024 x", 3),
    ("peak", 2),
  ],
)
def test_another_text_is_an_error(text, line):
  (block,) = run_page_examples.blocks(f"```text\n{text}\n```\n")
  with pytest.raises(AssertionError, match=f"^line {line}: .* is not in what"):
    run_page_examples.check(block, _PRINTED)


def test_a_page_that_is_given_another_text_fails(tmp_path, monkeypatch):
  page = tmp_path / "page.md"
  monkeypatch.setenv(run_page_examples.PAGE_VARIABLE, str(page))
  whole = run_page_examples.test_the_page_runs_from_its_first_block_to_its_last
  page.write_text("```sh\necho 3 parts\n```\n```text\n3 parts\n```\n")
  whole(tmp_path)
  page.write_text("```sh\necho 3 parts\n```\n```text\n4 parts\n```\n")
  with pytest.raises(AssertionError, match="line 5: '4 parts' is not in what"):
    whole(tmp_path)
