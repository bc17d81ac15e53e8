"""Distributions of parts of Paxon: `paxon-plan` and `paxon-layers`.

The modules of a distribution are its targets and those that they depend on, by
the BUILD files, under the same names as in `paxon`; its requirements are the
distributions that these modules import.
"""

import argparse
from collections.abc import Mapping, Sequence
import dataclasses
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

_REPLACES: Final = """
The trainer `paxon` contains the same modules under the same names, so install
one of the two: of two that are installed, the one installed last overwrites the
other, and uninstalling one breaks the other.
"""
_PLAN_README: Final = """\
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
"""
_LAYERS_README: Final = """\
# paxon-layers
Flax linen layers, quantization, pipelines, sharding by logical axes, and
optimizers with schedules as optax transformations. Each module can be used
alone, in any training loop:

```python
from paxon.layers import feed_forward
from paxon.learners.optimizers import adamw

layer = feed_forward.GatedFeedForward(mlp_dim=32)
optimizer = adamw.AdamW(schedule=lambda step: 1e-2).transform()
```

The runner, experiments, checkpoints, inputs, and the import of Hugging Face
weights are only in `paxon`.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
  """A distribution of a part of Paxon.

  Attributes:
    description: One line.
    readme: Its page on a package index.
    labels: Its public targets.
    folders: Folders whose targets, but for tests, are public too.
    excluded: Folders in `folders` that are not part of it.
    extras: Name of each extra here, and in pyproject.toml.
    commands: Its commands.
  """

  description: str
  readme: str
  labels: tuple[str, ...] = ()
  folders: tuple[str, ...] = ()
  excluded: tuple[str, ...] = ()
  extras: Mapping[str, str] = dataclasses.field(default_factory=dict)
  commands: tuple[str, ...] = ()

  def find_labels(self, tree: workspace.Workspace) -> list[str]:
    """Returns the public targets."""

    def is_in(package: str, folders: tuple[str, ...]) -> bool:
      return any(f"{package}/".startswith(f"{name}/") for name in folders)

    return [*self.labels] + [
      label
      for label, target in tree.targets.items()
      if target.is_python
      and not target.testonly
      and is_in(target.package, self.folders)
      and not is_in(target.package, self.excluded)
    ]


PARTS: Final = {
  "paxon-layers": Part(
    description="Layers, sharding and optimizers in JAX, for any loop.",
    readme=_LAYERS_README,
    folders=("layers", "learners", "pipeline", "quantization", "sharding"),
    excluded=("layers/models/hugging_face",),
    extras={"privacy": "privacy"},
  ),
  "paxon-plan": Part(
    description="Plans any JAX function for hardware you don't have.",
    readme=_PLAN_README,
    labels=(
      "//runner/plan/functions:plan_main",
      "//runner/plan/functions:public",
      "//tools:console_scripts",
    ),
    extras={"cuda": "plan-cuda", "cudnn": "plan-cudnn", "tpu": "tpu"},
    commands=("paxon-plan",),
  ),
}


def find_files(tree: workspace.Workspace, part: Part) -> list[str]:
  """Returns the files of a distribution, relative to the checkout.

  Args:
    tree: The workspace.
    part: The distribution.
  """
  files = {"LICENSE", "py.typed"}
  for label in tree.closure(part.find_labels(tree)):
    if target := tree.targets.get(label):
      files.update(target.source_paths())
  folders = {
    folder for file in files for folder in pathlib.PurePath(file).parents
  }
  return sorted(files | {str(folder / "__init__.py") for folder in folders})


def make_project(
  tree: workspace.Workspace, name: str, project: Mapping[str, Any]
) -> dict[str, Any]:
  """Returns the metadata of a distribution.

  Args:
    tree: The workspace.
    name: The distribution, a key of `PARTS`.
    project: The table `project` of its pyproject.toml.
  """
  part = PARTS[name]
  imported = {
    label.rpartition(":")[2]
    for label in tree.closure(part.find_labels(tree))
    if label.startswith("@")
  }
  extras = project["optional-dependencies"]
  kept = ("authors", "license", "classifiers", "requires-python")
  return {
    "name": name,
    "version": _read_version(tree),
    "description": part.description,
    "readme": "README.md",
    "license-files": ["paxon/LICENSE"],
    # JAX requires the others, such as ml_dtypes.
    "dependencies": [
      line for line in project["dependencies"] if _get_name(line) in imported
    ],
    "optional-dependencies": {
      new: extras[old] for new, old in part.extras.items()
    },
    "scripts": {
      command: project["scripts"][command] for command in part.commands
    },
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


def write_sources(root: pathlib.Path, name: str, folder: pathlib.Path) -> None:
  """Writes the sources of a distribution.

  Args:
    root: The checkout.
    name: The distribution, a key of `PARTS`.
    folder: An empty folder.
  """
  tree = workspace.load(root)
  for file in find_files(tree, PARTS[name]):
    path = folder / "paxon" / file
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(root / file, path)
  content = tomllib.loads(tree.text("pyproject.toml"))
  packages = sorted(
    ".".join(path.relative_to(folder).parent.parts)
    for path in folder.rglob("__init__.py")
  )
  (folder / "README.md").write_text(PARTS[name].readme + _REPLACES)
  (folder / "pyproject.toml").write_text(
    _to_toml("build-system", content["build-system"])
    + _to_toml("project", make_project(tree, name, content["project"]))
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


def build(root: pathlib.Path, name: str, out: pathlib.Path) -> pathlib.Path:
  """Builds a wheel with pip and setuptools; returns its path.

  Args:
    root: The checkout.
    name: The distribution, a key of `PARTS`.
    out: Folder of the wheel.
  """
  with tempfile.TemporaryDirectory() as scratch:
    sources = pathlib.Path(scratch, "sources")
    sources.mkdir()
    write_sources(root, name, sources)
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
  wheels = out.glob(f"{name.replace('-', '_')}-*.whl")
  return max(wheels, key=lambda path: path.stat().st_mtime)


def main(argv: Sequence[str]) -> int:
  """Builds a wheel; returns the exit status."""
  parser = argparse.ArgumentParser(
    prog="part_wheel", description="Builds the wheel of a part of Paxon."
  )
  parser.add_argument("name", choices=sorted(PARTS), help="distribution")
  parser.add_argument(
    "--out", type=pathlib.Path, default=pathlib.Path("dist"), help="folder"
  )
  flags = parser.parse_args(argv)
  root = workspace.find_root(pathlib.Path(__file__))
  wheel = build(root, flags.name, flags.out.resolve())
  print(f"{wheel}: {wheel.stat().st_size / 1024:,.0f} KiB")
  return 0


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
