"""Runs the examples of one README, each in a separate namespace.

The macro py_test makes a test of this file of each `README.md` in its `srcs`,
and names the README in the environment, as pytest's arguments are for pytest.
"""

import os
import pathlib

import pytest

from paxon.tools.dependencies import imports

README_VARIABLE = "PAXON_README"

pytestmark = pytest.mark.nightly


def examples(readme: pathlib.Path) -> list[imports.PythonBlock]:
  """Returns the ```python blocks of a README.

  Raises:
    ValueError: There is none, so that a test of it would test nothing.
  """
  blocks = list(imports.python_blocks(readme.read_text()))
  if not blocks:
    raise ValueError(f"{readme} has no ```python block to run.")
  return blocks


def run(readme: pathlib.Path, example: imports.PythonBlock) -> None:
  """Runs an example as a program; its line numbers are the README's."""
  text = "\n" * (example.line - 1) + example.text
  exec(compile(text, str(readme), "exec"), {"__name__": "__main__"})


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
  """Makes one test of each example."""
  # Absolute, as an example runs in a folder where it may leave files.
  readme = pathlib.Path(os.environ[README_VARIABLE]).absolute()
  metafunc.parametrize(
    ("readme", "example"),
    [
      pytest.param(readme, example, id=f"line {example.line}")
      for example in examples(readme)
    ],
  )


def test_example_runs(
  readme: pathlib.Path,
  example: imports.PythonBlock,
  tmp_path: pathlib.Path,
  monkeypatch: pytest.MonkeyPatch,
) -> None:
  """The example ends without an error."""
  monkeypatch.chdir(tmp_path)
  run(readme, example)
