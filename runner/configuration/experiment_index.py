"""A list of experiments made by reading source files, without running them.

Importing every experiment would import every library that one of them uses,
which takes many seconds, and one broken module would break the list. So class
statements are read instead, and bases are followed through imports. A class
that is made otherwise (by `type(...)` or a decorator) can be run by its name,
but is not listed.
"""

import ast
from collections.abc import Iterator, Sequence
import dataclasses
import functools
from importlib import machinery
import importlib.util
import os
import pkgutil

ROOT = "paxon.runner.experiment.Experiment"
_REQUIRED_METHODS = frozenset({"task", "datasets"})


@dataclasses.dataclass(frozen=True)
class Entry:
  """One experiment.

  Attributes:
    name: The full import path of its class.
    summary: The first line of its docstring, or an empty text.
  """

  name: str
  summary: str


@dataclasses.dataclass(frozen=True)
class _Class:
  """What a class statement says; `bases` are full import paths."""

  bases: tuple[str, ...]
  methods: frozenset[str]
  summary: str


def list_experiments(packages: Sequence[str]) -> list[Entry]:
  """Returns the runnable experiments of packages, sorted by name.

  Classes whose name begins with an underscore and classes that lack `task` or
  `datasets` are bases of others and left out.

  Args:
    packages: Import paths of packages (with all below them) or modules.

  Raises:
    ModuleNotFoundError: A package does not exist.
  """
  index = _Index()
  entries = {}
  for module in sorted({m for p in packages for m in _modules(p)}):
    for name, statement in index.classes(module).items():
      full = f"{module}.{name}"
      methods = index.methods(full)
      if not name.startswith("_") and methods >= _REQUIRED_METHODS:
        entries[full] = Entry(name=full, summary=statement.summary)
  return [entries[name] for name in sorted(entries)]


def _modules(package: str) -> Iterator[str]:
  """Yields a package and everything below it, tests excepted."""
  spec = _find(package)
  if spec is None:
    raise ModuleNotFoundError(f"No module named {package!r}")
  yield package
  locations = list(spec.submodule_search_locations or ())
  for found in pkgutil.iter_modules(locations):
    name = f"{package}.{found.name}"
    if found.ispkg:
      yield from _modules(name)
    elif not found.name.endswith("_test"):
      yield name
  for folder in _plain_folders(locations):
    yield from _modules(f"{package}.{folder}")


def _plain_folders(locations: Sequence[str]) -> list[str]:
  """Returns the folders without `__init__.py`, which are packages as well."""
  folders = set()
  for location in locations:
    if not os.path.isdir(location):  # A package in a zip file, say.
      continue
    with os.scandir(location) as entries:
      folders |= {
        entry.name
        for entry in entries
        if entry.name.isidentifier()
        and entry.name != "__pycache__"
        and entry.is_dir()
        and not os.path.exists(os.path.join(entry.path, "__init__.py"))
      }
  return sorted(folders)


class _Index:
  """Class statements by module, read when they are asked for."""

  @functools.cache  # noqa: B019  The index lives as long as its caller.
  def classes(self, module: str) -> dict[str, _Class]:
    """Returns the classes at the top level of a module; none if unreadable."""
    source = _source(module)
    if source is None:
      return {}
    try:
      body = ast.parse(source).body
    except (SyntaxError, ValueError):
      return {}
    names = {
      node.name: f"{module}.{node.name}"
      for node in body
      if isinstance(node, ast.ClassDef)
    }
    imports: dict[str, str] = {}
    for node in body:
      imports.update(_imported(node))
    return {
      node.name: _Class(
        bases=tuple(
          _resolve(base, {**imports, **names}) for base in node.bases
        ),
        methods=frozenset(_defined(node)),
        summary=(ast.get_docstring(node) or "").partition("\n")[0],
      )
      for node in body
      if isinstance(node, ast.ClassDef)
    }

  @functools.cache  # noqa: B019
  def methods(self, name: str) -> frozenset[str]:
    """Returns the methods of an experiment; none if it is not one."""
    found = self._methods(name, frozenset())
    return found if ROOT in found else frozenset()

  def _methods(self, name: str, above: frozenset[str]) -> frozenset[str]:
    """Returns the methods of a class and its bases, and the root's name."""
    if name == ROOT:
      return frozenset({ROOT})
    module, _, qualname = name.rpartition(".")
    statement = self.classes(module).get(qualname) if module else None
    if statement is None or name in above:
      return frozenset()
    return statement.methods.union(
      *(self._methods(base, above | {name}) for base in statement.bases)
    )


def _source(module: str) -> str | None:
  try:
    spec = _find(module)
    read = getattr(spec.loader if spec else None, "get_source", None)
    return read(module) if read else None
  except (ImportError, OSError, SyntaxError, ValueError):
    return None


def _find(module: str) -> machinery.ModuleSpec | None:
  """Finds a module without importing the packages above it.

  `importlib.util.find_spec` would import them, and with them jax: a base class
  may be flax's.
  """
  top, *below = module.split(".")
  spec = importlib.util.find_spec(top)
  name = top
  for part in below:
    if spec is None or spec.submodule_search_locations is None:
      return None
    name = f"{name}.{part}"
    spec = _find_below(name, list(spec.submodule_search_locations))
  return spec


def _find_below(
  name: str, locations: Sequence[str]
) -> machinery.ModuleSpec | None:
  """Finds a module in the folders (or zip files) of its package.

  Python's own search wants the package imported where the module is a folder
  without `__init__.py`.
  """
  portions: list[str] = []
  for location in locations:
    importer = pkgutil.get_importer(location)
    spec = importer.find_spec(name) if importer else None
    if spec is not None and spec.loader is not None:
      return spec
    if spec is not None:
      portions += spec.submodule_search_locations or []
  if not portions:
    return None
  namespace = machinery.ModuleSpec(name, None, is_package=True)
  namespace.submodule_search_locations = portions
  return namespace


def _imported(node: ast.stmt) -> dict[str, str]:
  """Returns what an import statement binds: name to full import path."""
  if isinstance(node, ast.ImportFrom) and node.module and not node.level:
    return {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
  if isinstance(node, ast.Import):
    return {
      a.asname or a.name.partition(".")[0]: (
        a.name if a.asname else a.name.partition(".")[0]
      )
      for a in node.names
    }
  return {}


def _resolve(base: ast.expr, names: dict[str, str]) -> str:
  """Returns the full import path of a base class, or an empty text."""
  if isinstance(base, ast.Subscript):  # Generic[T] and the like.
    base = base.value
  if isinstance(base, ast.Attribute):
    owner = _resolve(base.value, names)
    return f"{owner}.{base.attr}" if owner else ""
  return names.get(base.id, "") if isinstance(base, ast.Name) else ""


def _defined(node: ast.ClassDef) -> Iterator[str]:
  for item in node.body:
    if isinstance(item, ast.FunctionDef) and not any(
      "abstract" in ast.dump(decorator) for decorator in item.decorator_list
    ):
      yield item.name
