"""The workspace that the rules check: files, targets, and resolved imports.

Files are found by walking the folders, not by asking Git: a source archive has
no `.git`, and a new file is to be checked before it is added.
"""

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import functools
import os
import pathlib
import sys

from paxon.tools.dependencies import build_file, violation
from paxon.tools.dependencies import distributions as locked
from paxon.tools.dependencies import imports as python_imports

IMPORT_ROOT = "paxon"
ROOT_TARGET = "//:paxon"

LOCK_FOLDER = "third_party/python"
_LOCK_END = "_lock.txt"
# Locks of tools that are run on the sources, which no repository installs.
_NO_REPOSITORY = frozenset({"pypi_dev", "pypi_release"})
_COMPARED_WITH = "pypi_oracle"
# Private modules of others that one of ours may import, for want of a public
# way. Its comment gives the reason, and its test fails if the module changes.
_PRIVATE = frozenset(
  {("runner/stores/drivers.py", "orbax.checkpoint._src.serialization")}
)


ROOT_MARK = "WORKSPACE"

# Outputs of building, testing and running at the root.
_PRODUCTS = frozenset({"build", "dist", "runs"})


@dataclasses.dataclass(frozen=True)
class Use:
  """One import of a target, resolved.

  Attributes:
    path: The source that imports.
    line: The line of the import.
    dotted: The imported module or name.
    labels: The targets that hold it, any of which will do; empty for the
      standard library, and if there is a problem.
    problem: Why it is not allowed and how to fix it; None if it is.
  """

  path: str
  line: int
  dotted: str
  labels: tuple[str, ...] = ()
  problem: str | None = None


@dataclasses.dataclass(frozen=True)
class Workspace:
  """The contents of a workspace, read once.

  Attributes:
    root: The folder of WORKSPACE.
    files: All source files, relative to the root.
    targets: The targets of all BUILD files, by label.
    imports: The imports of every Python source and of README examples.
    distributions: The distributions of the locks.
    unreadable: BUILD files and sources that could not be parsed.
  """

  root: pathlib.Path
  files: Sequence[str]
  targets: Mapping[str, build_file.Target]
  imports: Mapping[str, Sequence[python_imports.Import]]
  distributions: locked.Distributions
  unreadable: Sequence[violation.Violation]
  _uses: dict[str, list[Use]] = dataclasses.field(default_factory=dict)

  def text(self, path: str) -> str:
    """Returns the content of a file of the workspace."""
    return (self.root / path).read_text()

  def packages(self) -> list[str]:
    """Returns the folders that have a BUILD file; the root is empty."""
    return [
      _folder(path) for path in self.files if pathlib.Path(path).name == "BUILD"
    ]

  def owners(self, path: str) -> list[build_file.Target]:
    """Returns the Python targets that have `path` among their sources."""
    return self._owners.get(path, [])

  @functools.cached_property
  def _owners(self) -> Mapping[str, list[build_file.Target]]:
    """The Python targets by source."""
    found: dict[str, list[build_file.Target]] = {}
    for target in self.targets.values():
      if target.is_python:
        for path in dict.fromkeys(target.source_paths()):
          found.setdefault(path, []).append(target)
    return found

  def uses(self, target: build_file.Target) -> list[Use]:
    """Returns the imports of all sources of a target."""
    if target.label not in self._uses:
      found = [
        self._resolve(path, item)
        for path in target.source_paths()
        for item in self.imports.get(path, ())
      ]
      # A source may import another one of the same target.
      self._uses[target.label] = [
        use for use in found if target.label not in use.labels
      ]
    return self._uses[target.label]

  def closure(
    self, labels: Sequence[str], *, optional: bool = True
  ) -> set[str]:
    """Returns the transitive dependencies of `labels`, with `labels`.

    Args:
      labels: The first labels.
      optional: Whether to count dependencies that only a setting adds.
    """
    reached: set[str] = set()
    waiting = list(labels)
    while waiting:
      label = waiting.pop()
      if label not in reached:
        reached.add(label)
        if label in self.targets:
          target = self.targets[label]
          waiting += [
            edge
            for edge in target.edges
            if optional or edge not in target.optional
          ]
    return reached

  def loaded_modules(self, paths: Iterable[str]) -> set[str]:
    """Returns the modules of ours that importing `paths` loads, with `paths`.

    Imports inside functions and under `TYPE_CHECKING` load nothing.
    """
    reached: set[str] = set()
    waiting = list(paths)
    while waiting:
      path = waiting.pop()
      if path not in reached:
        reached.add(path)
        for item in self.imports.get(path, ()):
          imported = None if item.lazy else self._module_path(item.dotted)
          if imported and item.module.startswith(f"{IMPORT_ROOT}."):
            waiting.append(imported)
    return reached

  def _resolve(self, path: str, item: python_imports.Import) -> Use:
    """Resolves an import to targets."""
    labels: tuple[str, ...] = ()
    problem = None
    top = item.module.partition(".")[0]
    if item.level:
      problem = f"relative import; write `from {_parent(path)} import ...`."
    elif not item.module:
      problem = (
        "imports a name computed at run time, which hides an edge; import the"
        " module, or take it as an argument."
      )
    elif top == IMPORT_ROOT:
      labels, problem = self._resolve_own(item)
    elif top in sys.stdlib_module_names:
      pass
    elif top in self._top_folders:
      problem = (
        f"`{item.module}` without `{IMPORT_ROOT}.` makes a second copy of the"
        f" module; write `{IMPORT_ROOT}.{item.module}`."
      )
    elif (
      any(part.startswith("_") for part in item.module.split("."))
      and (path, item.module) not in _PRIVATE
    ):
      problem = f"`{item.module}` is private; use the public API."
    else:
      labels = self.distributions.find_labels(item.dotted)
      if not labels:
        problem = (
          f"`{top}` is neither ours, nor of the standard library, nor in a"
          f" lock of {LOCK_FOLDER}; add it to a requirements file there."
        )
    return Use(path, item.line, item.dotted, labels, problem)

  def _resolve_own(
    self, item: python_imports.Import
  ) -> tuple[tuple[str, ...], str | None]:
    """Returns the targets of a module of ours, or why there is none."""
    if item.dotted == IMPORT_ROOT:
      return (ROOT_TARGET,), None
    path = self._module_path(item.dotted)
    if path:
      return tuple(target.label for target in self.owners(path)), None
    if item.name and self._module_path(item.module):
      parent, _, module = item.module.rpartition(".")
      return (), (
        f"imports a name; import the module, `from {parent} import {module}`,"
        f" and write `{module}.{item.name}`."
      )
    folder = "/".join(item.dotted.split(".")[1:])
    if any(name.startswith(f"{folder}/") for name in self.files):
      return (), (
        f"`{item.dotted}` is a package, which is empty; import a module of it."
      )
    return (), f"there is no module `{item.dotted}`; check the spelling."

  def _module_path(self, dotted: str) -> str | None:
    path = "/".join(dotted.split(".")[1:]) + ".py"
    return path if path in self.imports else None

  @functools.cached_property
  def _top_folders(self) -> frozenset[str]:
    return frozenset(path.partition("/")[0] for path in self.files)


def load(root: pathlib.Path) -> Workspace:
  """Reads the workspace at `root`."""
  files = find_files(root)
  unreadable = []
  targets: dict[str, build_file.Target] = {}
  imports: dict[str, list[python_imports.Import]] = {}
  for path in files:
    name = pathlib.Path(path).name
    if name not in ("BUILD", "README.md") and not path.endswith(".py"):
      continue
    text = (root / path).read_text()
    try:
      if name == "BUILD":
        parsed = build_file.parse(text, _folder(path))
        targets.update((target.label, target) for target in parsed)
      elif name == "README.md":
        imports[path] = [
          item
          for block in python_imports.python_blocks(text)
          for item in python_imports.parse(block.text, block.line)
        ]
      else:
        imports[path] = python_imports.parse(text)
    except build_file.BuildFileError as error:
      unreadable.append(violation.Violation(path, error.line, path, str(error)))
    except SyntaxError as error:
      unreadable.append(
        violation.Violation(path, error.lineno or 0, path, f"{error.msg}.")
      )
  return Workspace(
    root, files, targets, imports, _distributions(root), unreadable
  )


def find_root(start: pathlib.Path) -> pathlib.Path:
  """Returns the workspace that holds the real file behind `start`.

  In Bazel's runfiles every source file is a link, so this leads back to the
  checkout.

  Raises:
    FileNotFoundError: No folder above `start` has a WORKSPACE file.
  """
  real = start.resolve()
  for folder in (real, *real.parents):
    if (folder / ROOT_MARK).is_file():
      return folder
  raise FileNotFoundError(
    f"no folder above {real} has a {ROOT_MARK} file; this check reads the"
    " checkout itself, so it must run on the machine that holds it."
  )


def find_files(root: pathlib.Path) -> list[str]:
  """Returns the paths of all source files below `root`, relative, sorted."""
  ignored = _ignored_folders(root)
  found = []
  for folder, subfolders, names in os.walk(root):
    here = pathlib.PurePath(folder).relative_to(root)
    subfolders[:] = sorted(
      name
      for name in subfolders
      if not _is_hidden(name)
      and str(here / name) not in ignored
      # The links that Bazel leaves at the root.
      and not os.path.islink(os.path.join(folder, name))
    )
    found += [str(here / name) for name in names if not name.startswith(".")]
  return sorted(found)


def _distributions(root: pathlib.Path) -> locked.Distributions:
  """Reads the locks; `requirements_tf_lock.txt` is that of `@pypi_tf`."""
  locks = {}
  for path in (root / LOCK_FOLDER).glob(f"requirements*{_LOCK_END}"):
    kind = path.name.removeprefix("requirements").removesuffix(_LOCK_END)
    locks[f"pypi{kind}"] = path.read_text()
  for name in _NO_REPOSITORY:
    locks.pop(name, None)
  # `@pypi` comes first: the others take from it what it has. What tests compare
  # with comes last: whoever needs only a tokenizer does not get torch.
  order = sorted(locks, key=lambda name: (name == _COMPARED_WITH, name))
  return locked.parse_locks({name: locks[name] for name in order})


def _folder(path: str) -> str:
  return path.rpartition("/")[0]


def _parent(path: str) -> str:
  return ".".join([IMPORT_ROOT, *path.split("/")[:-1]])


def _is_hidden(name: str) -> bool:
  return name.startswith(".") or name in ("__pycache__", "node_modules")


def _ignored_folders(root: pathlib.Path) -> frozenset[str]:
  """Returns the folders that do not belong to this workspace."""
  bazelignore = root / ".bazelignore"
  if not bazelignore.is_file():
    return _PRODUCTS
  lines = bazelignore.read_text().splitlines()
  return _PRODUCTS | {
    line.strip().rstrip("/")
    for line in lines
    if line.strip() and not line.startswith("#")
  }
