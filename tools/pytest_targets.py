"""Plain `pytest` in a checkout: each Bazel target in a separate process.

The targets and their environments are read by running the BUILD files and the
macros that they load, which are Python too, with a `native.py_test` that takes
notes. So nothing is written down twice. The process of a target is that of
`bazel test`: `pytest_main.py` with the target's files, from the checkout's
root, and the scratch folder and `paxon` of this call.
"""

import collections
from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import itertools
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from typing import Any
from xml.etree import ElementTree

import pytest

# Not of this repository, or not a source.
_SKIPPED = re.compile(r"(?:\.|bazel-|build$|runs$)")
_ROOTPATH = re.compile(r"\$\(rootpath ([^)]+)\)")
_PYTEST_MAIN = "tools/pytest_main.py"


@dataclasses.dataclass(frozen=True)
class Target:
  """A test target.

  Attributes:
    label: `//package:name`.
    files: Test files, relative to the checkout.
    arguments: More arguments of pytest.
    environ: Environment variables.
    pages: Markdown files whose code it runs, relative to the checkout.
    is_manual: Whether it runs only if one of its files is named.
  """

  label: str
  files: tuple[str, ...]
  arguments: tuple[str, ...]
  environ: Mapping[str, str]
  pages: tuple[str, ...]
  is_manual: bool

  def find_nodes(self, path: str, rest: str) -> list[str] | None:
    """Returns pytest's arguments for a path; None without tests of this target.

    Args:
      path: A folder, test file or page, relative to the checkout.
      rest: The part after a file, `::name` or nothing.
    """
    if path in self.files:
      return [path + rest]
    package = self.label[2:].rpartition(":")[0]
    is_below = path == "." or f"{package}/".startswith(f"{path}/")
    in_folder = [file for file in self.files if file.startswith(f"{path}/")]
    if path in self.pages:
      return _list_runners(self.files)
    if is_below and not self.is_manual:
      return list(self.files)
    return (not self.is_manual and in_folder) or None


def _list_runners(files: Sequence[str]) -> list[str]:
  """Returns the files that run the code of pages."""
  return [file for file in files if not file.endswith("_test.py")]


class _Select(list):
  """All branches of a `select`."""

  def __init__(self, branches: Mapping[str, Sequence[str]]):
    super().__init__(itertools.chain(*branches.values()))


class _Names(dict):
  """The names of a BUILD file; rules that it does not load make nothing."""

  def __missing__(self, name: str) -> Any:
    return lambda *args, **kwargs: None


class _Builder:
  """Runs BUILD files and macros."""

  def __init__(self, root: pathlib.Path):
    self._root = root
    self._loaded: dict[str, dict[str, Any]] = {}
    self._package = ""
    self.targets: list[Target] = []

  def build(self, file: pathlib.Path) -> None:
    """Adds the targets of a BUILD file."""
    package = os.fspath(file.parent.relative_to(self._root))
    self._package = "" if package == "." else package
    names = _Names(load=None, select=_Select)
    names["load"] = lambda label, *wanted: names.update(
      {name: self._load(label)[name] for name in wanted}
    )
    exec(compile(file.read_text(), str(file), "exec"), {}, names)

  def _load(self, label: str) -> dict[str, Any]:
    label = self._find_label(label)
    if label in self._loaded:
      return self._loaded[label]
    if not label.startswith("//tools:"):
      rules = collections.defaultdict(lambda: lambda *args, **kwargs: None)
      return rules | {"py_test": self._add}
    native = _Names(package_name=lambda: self._package)
    names: dict[str, Any] = {
      "Label": lambda text: text,
      "accelerator_wheels": lambda deps: [],
      "attr": _Attributes(native),
      "full_label": self._find_label,
      "native": _Attributes(native),
      "rule": lambda **kwargs: lambda **kwargs: None,
    }

    def load(other: str, *wanted: str, **renamed: str) -> None:
      for name, original in ({name: name for name in wanted} | renamed).items():
        names.setdefault(name, self._load(other)[original])

    names["load"] = load
    path = self._root / self._find_path(label)
    exec(compile(path.read_text(), str(path), "exec"), names)
    self._loaded[label] = names
    return names

  def _find_label(self, text: str) -> str:
    """Returns `//package:name`."""
    if text.startswith(("//", "@")):
      return text
    return f"//{self._package}:{text.removeprefix(':')}"

  def _find_path(self, label: str) -> str:
    package, _, name = self._find_label(label)[2:].partition(":")
    return f"{package}/{name}".lstrip("/")

  def _add(
    self,
    *,
    name: str,
    srcs: Sequence[str],
    args: Sequence[str],
    env: Mapping[str, str],
    data: Sequence[str] = (),
    tags: Sequence[str] = (),
    **kwargs: Any,
  ) -> None:
    del kwargs

    def expand(text: str) -> str:
      return _ROOTPATH.sub(lambda match: self._find_path(match[1]), text)

    files = [self._find_path(file) for file in srcs]
    files.remove(_PYTEST_MAIN)
    self.targets.append(
      Target(
        label=f"//{self._package}:{name}",
        files=tuple(files),
        # Those of the files come first.
        arguments=tuple(map(expand, args[len(files) :])),
        environ={key: expand(value) for key, value in env.items()},
        pages=tuple(
          self._find_path(page)
          for page in data
          # Other tests only read pages.
          if page.endswith(".md") and _list_runners(files)
        ),
        is_manual="manual" in tags,
      )
    )


class _Attributes:
  """Items of a dictionary as attributes."""

  def __init__(self, items: dict[str, Any]):
    self._items = items

  def __getattr__(self, name: str) -> Any:
    return self._items[name]


def read_targets(root: pathlib.Path) -> list[Target]:
  """Returns all test targets of a checkout, in the order of their folders."""
  builder = _Builder(root)
  ignored = (root / ".bazelignore").read_text().split()
  for folder, folders, files in os.walk(root):
    folders[:] = sorted(
      name
      for name in folders
      if not _SKIPPED.match(name)
      and os.path.relpath(os.path.join(folder, name), root) not in ignored
    )
    if "BUILD" in files:
      builder.build(pathlib.Path(folder, "BUILD"))
  return builder.targets


def select(
  targets: Sequence[Target], root: pathlib.Path, paths: Sequence[str]
) -> list[tuple[Target, list[str]]]:
  """Returns the targets of paths, with the test files of each.

  Args:
    targets: All targets.
    root: The checkout.
    paths: Folders, test files with or without `::name`, and Markdown files
      whose code a target runs.

  Raises:
    ValueError: No target has a path.
  """
  nodes: dict[str, list[str]] = {}
  for text in paths:
    path, colons, name = text.partition("::")
    relative = os.path.relpath(os.path.realpath(path), root)
    found = {
      target.label: target.find_nodes(relative, colons + name)
      for target in targets
    }
    if not any(found.values()):
      raise ValueError(
        f"{text} has no test of a BUILD file; `tools/check --fix` writes the"
        " targets of new test files."
      )
    for label, more in found.items():
      for node in more or ():
        if node not in nodes.setdefault(label, []):
          nodes[label].append(node)
  return [(t, nodes[t.label]) for t in targets if nodes.get(t.label)]


def _read_counts(report: pathlib.Path) -> Iterator[tuple[str, int]]:
  """Yields the counts of cases in a JUnit report."""
  if report.exists():
    for suite in ElementTree.parse(report).iter("testsuite"):
      for name in ("tests", "failures", "errors", "skipped"):
        yield name, int(suite.get(name, 0))


def run(
  root: pathlib.Path,
  paths: Sequence[str],
  arguments: Sequence[str],
  *,
  stops: bool,
) -> int:
  """Runs the tests of paths; returns pytest's exit status.

  Args:
    root: The checkout.
    paths: See `select`.
    arguments: Other arguments of pytest, for each target.
    stops: Whether the first target that fails is the last.
  """
  chosen = select(read_targets(root), root, paths)
  counts: collections.Counter[str] = collections.Counter()
  failed: list[str] = []
  is_empty = True
  for number, (target, nodes) in enumerate(chosen, start=1):
    print(f"[{number}/{len(chosen)}] {target.label}", flush=True)
    with tempfile.TemporaryDirectory(prefix="paxon-pytest-") as folder:
      # The checkout, under the name it is imported by.
      pathlib.Path(folder, "import").mkdir()
      pathlib.Path(folder, "import", "paxon").symlink_to(root)
      scratch, report = (pathlib.Path(folder, n) for n in ("tmp", "test.xml"))
      scratch.mkdir()
      command = [sys.executable, _PYTEST_MAIN, *nodes, *target.arguments]
      status = subprocess.run(
        [*command, *arguments],
        cwd=root,
        env=os.environ
        | target.environ
        | {
          "PYTHONPATH": os.pathsep.join(
            filter(None, [f"{folder}/import", os.environ.get("PYTHONPATH")])
          ),
          "TEST_TMPDIR": os.fspath(scratch),
          "XML_OUTPUT_FILE": os.fspath(report),
        },
        check=False,
      ).returncode
      counts.update(dict(_read_counts(report)))
    is_empty = is_empty and status == pytest.ExitCode.NO_TESTS_COLLECTED
    # `-k` and `::` may leave nothing of a target.
    if status not in (0, pytest.ExitCode.NO_TESTS_COLLECTED):
      failed.append(target.label)
      if stops:
        break
  number_failed = counts["failures"] + counts["errors"]
  passed = counts["tests"] - number_failed - counts["skipped"]
  print(
    f"{len(chosen)} targets: {passed} passed, {number_failed} failed,"
    f" {counts['skipped']} skipped"
  )
  for label in failed:
    print(f"FAILED {label}")
  if failed:
    return int(pytest.ExitCode.TESTS_FAILED)
  return int(pytest.ExitCode.NO_TESTS_COLLECTED if is_empty else 0)
