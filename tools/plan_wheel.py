"""`tools/plan_wheel`: the distribution `paxon-plan`, plans without the trainer.

Its modules are those that the public modules of `runner/plan/functions` and the
command `paxon-plan` depend on, by the BUILD files, under the same names as in
`paxon`; its requirements are the distributions that these modules import.
"""

import argparse
from collections.abc import Mapping, Sequence
import json
import pathlib
import shutil
import subprocess
import sys
import tempfile
import tomllib
from typing import Any, Final
import venv

from paxon.tools.dependencies import workspace

_LABELS: Final = (
  "//runner/plan/functions:plan_main",
  "//runner/plan/functions:public",
  "//tools:console_scripts",
)
# Name of each extra here and in pyproject.toml.
_EXTRAS: Final = {"cuda": "plan-cuda", "cudnn": "plan-cudnn", "tpu": "tpu"}
_COMMAND: Final = "paxon-plan"
_README: Final = """\
# paxon-plan
Plans any JAX function for hardware you don't have: memory, communication,
FLOPs and the estimated time of a step, from the compiler of the target.

```python
import paxon

print(paxon.plan(step, state, batch, target="h200:1x8", mesh={"fsdp": 8}))
```

`pip install 'paxon-plan[cuda]'` installs the compiler for NVIDIA GPUs, `[tpu]`
that for TPUs, and `[cudnn]` what cuDNN attention needs; no GPU or TPU is
needed. `paxon.assert_plan` tests plans; `paxon-plan run` and `paxon-plan diff`
make and compare them on the command line.

The trainer `paxon` contains the same modules under the same names, so install
one of the two: of two that are installed, the one installed last overwrites the
other, and uninstalling one breaks the other.
"""


def find_files(tree: workspace.Workspace) -> list[str]:
  """Returns the files of the distribution, relative to the checkout.

  Args:
    tree: The workspace.
  """
  files = {"LICENSE", "py.typed"}
  for label in tree.closure(_LABELS):
    if target := tree.targets.get(label):
      files.update(target.source_paths())
  folders = {
    folder for file in files for folder in pathlib.PurePath(file).parents
  }
  return sorted(files | {str(folder / "__init__.py") for folder in folders})


def make_project(
  tree: workspace.Workspace, project: Mapping[str, Any]
) -> dict[str, Any]:
  """Returns the metadata of the distribution.

  Args:
    tree: The workspace.
    project: The table `project` of its pyproject.toml.
  """
  imported = {
    label.rpartition(":")[2]
    for label in tree.closure(_LABELS)
    if label.startswith("@")
  }
  extras = project["optional-dependencies"]
  kept = ("authors", "license", "classifiers", "requires-python")
  return {
    "name": "paxon-plan",
    "version": _read_version(tree),
    "description": "Plans any JAX function for hardware you don't have.",
    "readme": "README.md",
    "license-files": ["paxon/LICENSE"],
    # JAX requires the others, such as ml_dtypes.
    "dependencies": [
      line for line in project["dependencies"] if _get_name(line) in imported
    ],
    "optional-dependencies": {new: extras[old] for new, old in _EXTRAS.items()},
    "scripts": {_COMMAND: project["scripts"][_COMMAND]},
  } | {key: project[key] for key in kept}


def _get_name(requirement: str) -> str:
  """Returns the target of a requirement: `jax` of `jax>=0.10,<0.12`."""
  name = "".join(c if c.isalnum() or c in "-_." else " " for c in requirement)
  return name.split()[0].replace("-", "_").lower()


def _read_version(tree: workspace.Workspace) -> str:
  (line,) = (
    line
    for line in tree.text("__init__.py").splitlines()
    if line.startswith("__version__ = ")
  )
  return json.loads(line.partition(" = ")[2])


def write_sources(root: pathlib.Path, folder: pathlib.Path) -> None:
  """Writes the sources of the distribution.

  Args:
    root: The checkout.
    folder: An empty folder.
  """
  tree = workspace.load(root)
  for file in find_files(tree):
    path = folder / "paxon" / file
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(root / file, path)
  content = tomllib.loads(tree.text("pyproject.toml"))
  packages = sorted(
    ".".join(path.relative_to(folder).parent.parts)
    for path in folder.rglob("__init__.py")
  )
  (folder / "README.md").write_text(_README)
  (folder / "pyproject.toml").write_text(
    _to_toml("build-system", content["build-system"])
    + _to_toml("project", make_project(tree, content["project"]))
    + _to_toml("tool.setuptools", {"packages": packages})
    + _to_toml("tool.setuptools.package-data", {"paxon": ["py.typed"]})
  )


def _to_toml(name: str, table: Mapping[str, Any]) -> str:
  """Returns a table; the values' JSON is TOML, but for tables in it."""
  lines, inner = [f"[{name}]"], ""
  for key, value in table.items():
    if isinstance(value, Mapping):
      inner += _to_toml(f"{name}.{key}", value)
    elif value and isinstance(value, list) and isinstance(value[0], Mapping):
      texts = (
        ", ".join(f"{k} = {json.dumps(v)}" for k, v in each.items())
        for each in value
      )
      lines.append(f"{key} = [{', '.join(f'{{ {text} }}' for text in texts)}]")
    else:
      lines.append(f"{key} = {json.dumps(value)}")
  return "\n".join(lines) + "\n\n" + inner


def build(root: pathlib.Path, out: pathlib.Path) -> pathlib.Path:
  """Builds the wheel with pip and setuptools; returns its path.

  Args:
    root: The checkout.
    out: Folder of the wheel.
  """
  with tempfile.TemporaryDirectory() as scratch:
    sources = pathlib.Path(scratch, "sources")
    sources.mkdir()
    write_sources(root, sources)
    environment = pathlib.Path(scratch, "environment")
    venv.create(environment, with_pip=True)
    subprocess.run(
      [
        *(environment / "bin" / "python", "-m", "pip", "wheel", "--quiet"),
        *("--disable-pip-version-check", "--no-deps", "--wheel-dir", out),
        sources,
      ],
      check=True,
    )
  return max(
    out.glob("paxon_plan-*.whl"), key=lambda path: path.stat().st_mtime
  )


def main(argv: Sequence[str]) -> int:
  """Builds the wheel; returns the exit status."""
  parser = argparse.ArgumentParser(
    prog="tools/plan_wheel", description="Builds the wheel paxon-plan."
  )
  parser.add_argument(
    "--out", type=pathlib.Path, default=pathlib.Path("dist"), help="folder"
  )
  out = parser.parse_args(argv).out.resolve()
  wheel = build(workspace.find_root(pathlib.Path(__file__)), out)
  print(f"{wheel}: {wheel.stat().st_size / 1024:,.0f} KiB")
  return 0


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
