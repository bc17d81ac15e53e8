"""Runs the code of one page of the documentation, in order, in one folder.

  ```python file=a/b.py   is written to that file
  ```python               is run as a program of its own
  ```sh                   is run by bash, and must succeed
  ```sh status=2          the same, and must end with that status
  ```text                 is what the command before it prints: these lines in
                          this order, others between them

Numbers in a text may be 2 % off, and 3 % with a later JAX, as what a compiler
makes differs with its version; all other words are exact.

The macro in pages.bzl makes a test of this file and names the page in the
environment. Programs are run by the Python that runs the test, which has what
most of them import already.
"""

from collections.abc import Iterator
import dataclasses
import importlib.util
import math
import os
import pathlib
import re
import shlex
import subprocess
import sys

import pytest

from paxon.runner.hosts import warm_python

PAGE_VARIABLE = "PAXON_PAGE"

_BLOCK = re.compile(
  r"^```(?P<kind>python|sh|text)(?: (?P<key>file|status)=(?P<value>\S+))?\n"
  r"(?P<text>.*?)^```$",
  re.DOTALL | re.MULTILINE,
)
# A number, such as 1,234.5; digits in a word are a part of the word.
_NUMBER = re.compile(r"(?<![\w.,])\d[\d,]*(?:\.\d+)?(?![\w,]|\.\d)")
# Pages are made with the JAX of Python 3.11; the lock has a later one for later
# Pythons, whose compiler is a little further off.
_TOLERANCE = 0.02 if sys.version_info < (3, 12) else 0.03
_SECONDS = 280
# Modules that the commands of all pages import sooner or later.
_IMPORTED = (
  "paxon.runner.main",
  "paxon.runner.generation.decode",
  "paxon.runner.evaluation.evaluate",
  "paxon.runner.planning.plan_program",
  "paxon.runner.training.train",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Block:
  """One block of code.

  Attributes:
    kind: `python`, `sh` or `text`.
    text: The code.
    line: Its first line in the page, from 1.
    file: Where it is written instead of being run, or None.
    status: The exit status that it must have.
  """

  kind: str
  text: str
  line: int
  file: str | None = None
  status: int = 0


def blocks(page: str) -> list[Block]:
  """Returns the blocks of a page in order.

  Args:
    page: Markdown.

  Raises:
    ValueError: There is none, or one cannot be read.
  """
  found = []
  for match in _BLOCK.finditer(page):
    key, value = match["key"], match["value"]
    found.append(
      Block(
        kind=match["kind"],
        text=match["text"],
        line=page.count("\n", 0, match.start("text")) + 1,
        file=value if key == "file" else None,
        status=int(value) if key == "status" else 0,
      )
    )
  if not found or len(found) != len(
    re.findall("^```[a-z]", page, re.MULTILINE)
  ):
    raise ValueError(
      f"Of the page's blocks {len(found)} can be read; write ```python,"
      " ```python file=PATH, ```sh, ```sh status=N or ```text."
    )
  return found


def run(block: Block, folder: pathlib.Path) -> str:
  """Runs one block in a folder.

  Args:
    block: Block to run.
    folder: Where the blocks before it have left their files.

  Returns:
    Its output.

  Raises:
    AssertionError: It ended with another status; its output is in the message.
  """
  if block.file is not None:
    path = folder / block.file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(block.text)
    return ""
  program = (
    [sys.executable, "-c", block.text]
    if block.kind == "python"
    else ["bash", "-euo", "pipefail", "-c", _shell() + block.text]
  )
  done = subprocess.run(
    program,
    cwd=folder,
    env=_environment(folder),
    capture_output=True,
    text=True,
    timeout=_SECONDS,
    check=False,
  )
  assert done.returncode == block.status, (
    f"line {block.line}: status {done.returncode}, wanted {block.status}\n"
    f"{block.text}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
  )
  return done.stdout


def check(block: Block, printed: str) -> None:
  """Checks that a text is what was printed.

  Args:
    block: Of the kind `text`.
    printed: By the block before it.

  Raises:
    AssertionError: A line is not there, or not after the one before it.
  """
  rest = printed.splitlines()
  for number, line in enumerate(block.text.splitlines()):
    met = next((i for i, other in enumerate(rest) if _is_same(line, other)), -1)
    assert met >= 0, (
      f"line {block.line + number}: {line!r} is not in what follows:\n"
      + "\n".join(rest)
    )
    rest = rest[met + 1 :]


def _is_same(line: str, other: str) -> bool:
  """Whether two lines have the same words, and almost the same numbers."""
  words = [" ".join(_NUMBER.sub("#", each).split()) for each in (line, other)]
  if words[0] != words[1]:
    return False
  numbers = [
    [float(found.replace(",", "")) for found in _NUMBER.findall(each)]
    for each in (line, other)
  ]
  return all(
    math.isclose(a, b, rel_tol=_TOLERANCE)
    for a, b in zip(*numbers, strict=True)
  )


def _shell() -> str:
  """Returns shell code that makes this Python the page's `python`."""
  return f'python() {{ {shlex.quote(sys.executable)} "$@"; }}\n'


def _environment(folder: pathlib.Path) -> dict[str, str]:
  environment = dict(os.environ)
  # The reader's own folder is one to import from.
  environment.pop("PYTHONSAFEPATH", None)
  # Ours alone; other libraries promote dtypes.
  environment.pop("JAX_NUMPY_DTYPE_PROMOTION", None)
  environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
  environment["JAX_NUM_CPU_DEVICES"] = "1"
  # What was made before, outside of the page, does not count.
  environment["XDG_CACHE_HOME"] = str(folder / ".cache")
  return environment


@pytest.fixture(name="_warm_python")
def _commands_have_their_imports(
  tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[None]:
  folder = tmp_path_factory.mktemp("python")
  # A page about single modules has no runner.
  here = [module for module in _IMPORTED if _is_here(module)]
  with warm_python.install(here, folder):
    yield


def _is_here(module: str) -> bool:
  try:
    return importlib.util.find_spec(module) is not None
  except ModuleNotFoundError:  # Of the module's package.
    return False


@pytest.mark.usefixtures("_warm_python")
def test_the_page_runs_from_its_first_block_to_its_last(
  tmp_path: pathlib.Path,
) -> None:
  """Every block does what the page says."""
  page, printed = pathlib.Path(os.environ[PAGE_VARIABLE]).read_text(), ""
  for block in blocks(page):
    if block.kind == "text":
      check(block, printed)
    else:
      printed = run(block, tmp_path)
