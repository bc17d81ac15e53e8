"""Examples of a README are found, run, and fail where they are wrong."""

import traceback

import pytest

from paxon.tools import run_readme_examples


def _readme(folder, text):
  path = folder / "README.md"
  path.write_text(text)
  return path


def test_an_example_runs_as_a_program(tmp_path):
  text = f"""
```python
import pathlib

if __name__ == "__main__":
  pathlib.Path({str(tmp_path / "ran")!r}).touch()
```
"""
  readme = _readme(tmp_path, text)
  for example in run_readme_examples.examples(readme):
    run_readme_examples.run(readme, example)
  assert (tmp_path / "ran").exists()


def test_a_mistake_is_shown_at_its_line_of_the_readme(tmp_path):
  readme = _readme(tmp_path, "# x\n\n```python\na = 1\na.b\n```\n")
  (example,) = run_readme_examples.examples(readme)
  with pytest.raises(AttributeError, match="no attribute 'b'") as caught:
    run_readme_examples.run(readme, example)
  last = traceback.extract_tb(caught.value.__traceback__)[-1]
  assert (last.filename, last.lineno) == (str(readme), 5)


def test_examples_do_not_see_each_other(tmp_path):
  readme = _readme(tmp_path, "```python\na = 1\n```\n```python\na\n```\n")
  first, second = run_readme_examples.examples(readme)
  run_readme_examples.run(readme, first)
  with pytest.raises(NameError, match="'a' is not defined"):
    run_readme_examples.run(readme, second)


def test_a_readme_without_examples_is_a_mistake(tmp_path):
  readme = _readme(tmp_path, "```sh\nls\n```\n")
  with pytest.raises(ValueError, match="has no ```python block to run"):
    run_readme_examples.examples(readme)
