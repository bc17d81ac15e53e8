"""A small valid workspace, and changes that plant violations in it."""

from collections.abc import Callable, Iterator, Mapping
import pathlib

from paxon.tools.dependencies import violation, workspace

Changes = Mapping[str, str | None]
Rule = Callable[[workspace.Workspace], Iterator[violation.Violation]]

_HEADINGS = """
## Use it
```python
from paxon.{package} import {module}
```
## Rules here
## Depends on
## Decisions
"""


def _readme(package: str, module: str) -> str:
  table = (
    f"## Modules\n| Module | Gives |\n| --- | --- |\n| `{module}` | it |\n"
  )
  headings = _HEADINGS.format(package=package, module=module)
  return f"# {package}\n{table}{headings}"


def lock(*names: str) -> str:
  """Returns a lock that pins `names`."""
  return "".join(f"{name}==1.0 \\\n    --hash=sha256:00\n" for name in names)


_BUILD = """
# A package.
load("//tools:py.bzl", "py_library", "py_test")

package(default_visibility = ["//:__subpackages__"])

py_library(
  name = "{module}",
  srcs = ["{module}.py"],
  visibility = ["//visibility:public"],
  deps = [{deps}],
)

py_test(
  name = "{module}_test",
  size = "small",
  srcs = ["{module}_test.py"],
  deps = [":{module}"],
)

py_test(
  name = "readme_test",
  size = "small",
  srcs = ["README.md"],
  deps = [":{module}"],
)
"""


def build_text(module: str, deps: str = "") -> str:
  """Returns a BUILD file with a library, its test and its README's test."""
  return _BUILD.format(module=module, deps=deps)


def package(
  folder: str, module: str, source: str, deps: str = ""
) -> dict[str, str]:
  """Returns the files of a valid folder with one module.

  Args:
    folder: Where it is.
    module: The name of the module, of its target and of its test.
    source: The content of the module.
    deps: The deps of the module, as written in BUILD.
  """
  return {
    f"{folder}/BUILD": build_text(module, deps),
    f"{folder}/README.md": _readme(folder.replace("/", "."), module),
    f"{folder}/__init__.py": '"""A package."""\n',
    f"{folder}/{module}.py": source,
    f"{folder}/{module}_test.py": (
      f"import pytest\nfrom paxon.{folder.replace('/', '.')} import {module}\n"
    ),
  }


# A valid workspace: runner:task -> layers:block -> sharding:axes -> numpy, and
# learners:adamw, which imports nothing.
CLEAN: Mapping[str, str] = {
  "WORKSPACE": "",
  "BUILD": 'py_root(name = "paxon", srcs = ["__init__.py"])\n',
  "README.md": "| `layers/` | `learners/` | `runner/` | `sharding/` |\n",
  "__init__.py": '"""The root."""\n',
  "third_party/python/requirements_lock.txt": lock(
    "absl-py", "flax", "jax", "numpy", "pytest", "scipy"
  ),
  "third_party/python/requirements_tf_lock.txt": lock("seqio", "numpy"),
  **package("sharding", "axes", "import numpy\n", '"@pypi//:numpy"'),
  **package(
    "layers",
    "block",
    "import math\n\nfrom paxon.sharding import axes\n",
    '"//sharding:axes"',
  ),
  **package("learners", "adamw", "VALUE = 1\n"),
  **package(
    "runner",
    "task",
    "from paxon.layers import block\n",
    '"//layers:block"',
  ),
}


def write(root: pathlib.Path, changes: Changes) -> None:
  """Writes the valid workspace with `changes`; None removes a file."""
  for path, text in {**CLEAN, **changes}.items():
    if text is not None:
      (root / path).parent.mkdir(parents=True, exist_ok=True)
      (root / path).write_text(text)


def found_by(rule: Rule, root: pathlib.Path, changes: Changes) -> list[str]:
  """Writes the workspace with `changes`; returns the violations of `rule`."""
  write(root, changes)
  return [str(found) for found in rule(workspace.load(root))]


def edit(path: str, old: str, new: str) -> dict[str, str]:
  """Returns a change of one file that replaces `old` by `new`."""
  assert old in CLEAN[path], f"{old!r} is not in {path}"
  return {path: CLEAN[path].replace(old, new)}


def build(folder: str, old: str, new: str) -> dict[str, str]:
  """Returns a change of a BUILD file that replaces `old` by `new`."""
  return edit(f"{folder}/BUILD", old, new)
