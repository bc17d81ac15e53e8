"""Experiments by name: import of one class, and a list of all.

`tasks.lm.params.c4.C4` is the class `C4` of `paxon.tasks.lm.params.c4`, or of
`tasks.lm.params.c4`. The list is made by parsing source files: importing every
experiment takes long, and one broken module would break the list. Classes made
by `type(...)` or a decorator can be run by name, but are not listed.

A class may name what a run requires: `run_requires = ("train_files", "seqio")`.
A knob of the class must then have a value; any other name is an import name of
a library. The list shows what is missing here, and meshes larger than this
machine; literal values of the class and its bases are read.
"""

import ast
from collections.abc import Iterator, Sequence
import dataclasses
import difflib
import functools
import importlib
import importlib.util
import inspect
import math
import pathlib
import re
import types
from typing import TYPE_CHECKING

from paxon.runner import user_error
from paxon.sharding import suggestions

if TYPE_CHECKING:
  from paxon.runner import experiment

_PREFIXES = ("paxon.", "")
# No import path is longer, and a message that quotes one stays readable.
_MAX_NAME = 250


def find_experiment(
  name: str, *, packages: Sequence[str] = ()
) -> type["experiment.Experiment"]:
  """Imports an experiment; errors suggest experiments of `packages`.

  `a.b.C` is the class `C` of the module `paxon.a.b` or, where there is no such
  class, of `a.b`.

  Raises:
    user_error.UserError: There is no such module or class, its module cannot
      be imported, or it is not an experiment that can run.
  """
  if len(name) > _MAX_NAME:
    raise user_error.UserError(
      f"--exp={name[:20]}... has {len(name)} characters; write it as a.b.C."
    )
  module_name, _, class_name = name.rpartition(".")
  modules = []
  for prefix in _PREFIXES:
    module = _import(prefix, module_name)
    found = getattr(module, class_name, None)
    if found is not None and not isinstance(found, types.ModuleType):
      return _check_class(found, f"{prefix}{name}", packages)
    if module is not None:
      modules.append(f"{prefix}{module_name}")
  for prefix in _PREFIXES:
    if _import(prefix, name) is not None:
      hint = _hint(name, [f"{prefix}{name}"])
      raise user_error.UserError(
        f"--exp={name} is a module; name a class in it{hint}"
      )
  if modules:
    raise _no_class(name, class_name, modules, packages)
  what = f"there is no module {module_name!r}"
  if not module_name:
    what = "it has no module; write it as a.b.C"
  elif (file := pathlib.Path(f"{module_name.replace('.', '/')}.py")).is_file():
    raise user_error.UserError(
      f"--exp={name}: {file} is in the current directory, which is not on"
      " Python's path; set PYTHONPATH=. in the environment."
    )
  raise user_error.UserError(f"--exp={name}: {what}{_hint(name, packages)}")


def _import(prefix: str, name: str) -> types.ModuleType | None:
  """Imports a module; None if it does not exist."""
  if not all(part.isidentifier() for part in name.split(".")):
    return None
  module = f"{prefix}{name}"
  try:
    return importlib.import_module(module)
  except ModuleNotFoundError as error:
    # A module that exists may import one that does not.
    if error.name is not None and f"{module}.".startswith(f"{error.name}."):
      return None
    raise _describe_failure(module, error) from error
  except user_error.UserError:
    raise
  except Exception as error:
    raise _describe_failure(module, error) from error


def _describe_failure(module: str, error: Exception) -> user_error.UserError:
  """Says why a module failed to import, and in which line."""
  reason = error.msg if isinstance(error, SyntaxError) else str(error)
  return user_error.UserError(
    f"--exp: the module {module} failed to import because of"
    f" {type(error).__name__}: {reason}"
    f" ({user_error.find_location(error)})"
  )


def _check_class(
  found: object, name: str, packages: Sequence[str]
) -> type["experiment.Experiment"]:
  from paxon.runner import experiment

  is_class = isinstance(found, type)
  if not is_class or not issubclass(found, experiment.Experiment):
    raise user_error.UserError(
      f"--exp={name} is not an experiment, but a"
      f" {'class' if is_class else type(found).__name__} of another kind"
      f"{_hint(name, packages)}"
    )
  if inspect.isabstract(found):
    missing = ", ".join(sorted(found.__abstractmethods__))
    raise user_error.UserError(
      f"--exp={name} is an abstract experiment: it lacks {missing}"
      f"{_hint(name, packages)}"
    )
  return found


def _no_class(
  name: str, class_name: str, modules: list[str], packages: Sequence[str]
) -> user_error.UserError:
  listed = list_experiments(modules)
  inside = [
    entry.name.rpartition(".")[2]
    for entry in listed
    if entry.name.rpartition(".")[0] in modules
  ]
  if not inside:
    return user_error.UserError(
      f"--exp={name}: the module {modules[0]} has no experiment"
      f"{_hint(name, packages)}"
    )
  return user_error.UserError(
    f"--exp={name}: the module {modules[0]} has no experiment {class_name!r}"
    f"{suggestions.suggest(class_name, inside)}"
  )


def _hint(name: str, packages: Sequence[str]) -> str:
  """Returns `; did you mean 'x'?` for the closest of all experiments."""
  try:
    entries = list_experiments(packages)
  except ImportError:
    return "."
  full = [entry.name.removeprefix("paxon.") for entry in entries]
  if not full:
    return "."
  # The class weighs as much as the path to it: either may be misspelled.
  wanted, last = name.removeprefix("paxon.").lower(), name.rpartition(".")[2]

  def likeness(candidate: str) -> float:
    own = candidate.rpartition(".")[2].lower()
    return (
      difflib.SequenceMatcher(None, wanted, candidate.lower()).ratio()
      + difflib.SequenceMatcher(None, last.lower(), own).ratio()
    )

  best = max(full, key=likeness)
  if likeness(best) > 0.8:
    return f"; did you mean {best!r}?"
  return f"; --list prints all {len(full)}, such as {best!r}."


ROOT = "paxon.runner.experiment.Experiment"
_REQUIRED_METHODS = frozenset({"task", "datasets"})
# Prefix of the name of an abstract method, which no definition can have.
_ABSTRACT = "abstract "
_REQUIRES = "run_requires"
_MESH_SIZE = re.compile(r"=(\d+)(?=,|$)")


@dataclasses.dataclass(frozen=True)
class Entry:
  """One experiment.

  Attributes:
    name: The full import path of its class.
    summary: The first line of its docstring, or an empty text.
    unset_knobs: Knobs without a value that a run requires.
    missing_libraries: Libraries that it requires and that are not installed.
    num_devices: Size of its mesh; 1 if the mesh fits any number.
  """

  name: str
  summary: str
  unset_knobs: tuple[str, ...] = ()
  missing_libraries: tuple[str, ...] = ()
  num_devices: int = 1

  def find_problem(self, num_devices: int) -> str:
    """Returns why it cannot run as it is on a machine, or an empty text."""
    reasons = [f"set --fdl.{name}" for name in self.unset_knobs]
    reasons += [f"install {name}" for name in self.missing_libraries]
    if self.num_devices > num_devices:
      reasons.append(f"{self.num_devices:,} devices, here {num_devices}")
    return "; ".join(reasons)


@dataclasses.dataclass(frozen=True)
class _Class:
  """A class statement; `bases` are full import paths."""

  bases: tuple[str, ...]
  methods: frozenset[str]
  summary: str
  values: dict[str, object]


def list_experiments(packages: Sequence[str]) -> list[Entry]:
  """Returns the runnable experiments of packages, sorted by name.

  Private classes, and base classes that lack a method, are omitted.

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
      required = _REQUIRED_METHODS.union(
        method.removeprefix(_ABSTRACT)
        for method in methods
        if method.startswith(_ABSTRACT)
      )
      if not name.startswith("_") and methods >= required:
        entries[full] = index.describe(full, statement.summary)
  return [entries[name] for name in sorted(entries)]


def _modules(package: str) -> Iterator[str]:
  """Yields a package or module and all modules below it, without tests."""
  if _find_source(package) is None and not _find_folders(package):
    raise ModuleNotFoundError(f"No module named {package!r}")
  yield package
  for folder in _find_folders(package):
    for path in sorted(folder.rglob("*.py")):
      parts = path.relative_to(folder).with_suffix("").parts
      is_test = path.stem.endswith("_test")
      if not is_test and all(part.isidentifier() for part in parts):
        yield ".".join((package, *parts)).removesuffix(".__init__")


class _Index:
  """Class statements by module, read when they are asked for."""

  @functools.cache  # noqa: B019  The index lives as long as its caller.
  def classes(self, module: str) -> dict[str, _Class]:
    """Returns the classes at the top level of a module; none if unreadable."""
    try:
      source = _find_source(module)
      body = ast.parse(source.read_bytes()).body if source else ()
    except (ImportError, OSError, SyntaxError, ValueError):
      return {}
    names = {
      node.name: f"{module}.{node.name}"
      for node in body
      if isinstance(node, ast.ClassDef)
    }
    imports: dict[str, str] = {}
    for node in body:
      imports.update(_find_bindings(node))
    return {
      node.name: _Class(
        bases=tuple(
          _resolve(base, {**imports, **names}) for base in node.bases
        ),
        methods=frozenset(_find_definitions(node)),
        summary=(ast.get_docstring(node) or "").partition("\n")[0],
        values=dict(_literals(node)),
      )
      for node in body
      if isinstance(node, ast.ClassDef)
    }

  @functools.cache  # noqa: B019
  def methods(self, name: str) -> frozenset[str]:
    """Returns the methods of an experiment; none if it is not one."""
    found = self._methods(name, frozenset())
    return found if ROOT in found else frozenset()

  def describe(self, name: str, summary: str) -> Entry:
    """Returns the entry of an experiment."""
    values = self._values(name, frozenset())
    required = values.get(_REQUIRES)
    names = required if isinstance(required, tuple) else ()
    mesh = values.get("mesh")
    sizes = _MESH_SIZE.findall(mesh) if isinstance(mesh, str) else []
    return Entry(
      name=name,
      summary=summary,
      unset_knobs=tuple(
        each for each in names if each in values and values[each] is None
      ),
      missing_libraries=tuple(
        each
        for each in names
        if each not in values and importlib.util.find_spec(each) is None
      ),
      num_devices=math.prod(map(int, sizes)),
    )

  def _values(self, name: str, above: frozenset[str]) -> dict[str, object]:
    """Returns the literal values of a class and its bases."""
    module, _, qualname = name.rpartition(".")
    statement = self.classes(module).get(qualname) if module else None
    if statement is None or name in above:
      return {}
    found: dict[str, object] = {}
    for base in reversed(statement.bases):
      found |= self._values(base, above | {name})
    return found | statement.values

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


def _find_folders(module: str) -> list[pathlib.Path]:
  """Returns the folders of a package; several, or none, may exist.

  Searches in files: `importlib` would import the packages above, and with a
  base class of flax also jax.
  """
  top, *below = module.split(".")
  spec = importlib.util.find_spec(top)
  roots = spec.submodule_search_locations if spec else None
  folders = [pathlib.Path(root, *below) for root in roots or ()]
  return [folder for folder in folders if folder.is_dir()]


def _find_source(module: str) -> pathlib.Path | None:
  """Returns the file of a module or package; None if there is none."""
  parent, _, name = module.rpartition(".")
  if not parent:
    spec = importlib.util.find_spec(module)
    return pathlib.Path(spec.origin) if spec and spec.origin else None
  files = [
    *(folder / f"{name}.py" for folder in _find_folders(parent)),
    *(folder / "__init__.py" for folder in _find_folders(module)),
  ]
  return next((file for file in files if file.is_file()), None)


def _find_bindings(node: ast.stmt) -> dict[str, str]:
  """Returns the bindings of an import: name to full import path."""
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


def _find_definitions(node: ast.ClassDef) -> Iterator[str]:
  for item in node.body:
    if isinstance(item, ast.FunctionDef):
      is_abstract = any(
        "abstract" in ast.dump(decorator) for decorator in item.decorator_list
      )
      yield f"{_ABSTRACT}{item.name}" if is_abstract else item.name


def _literals(node: ast.ClassDef) -> Iterator[tuple[str, object]]:
  """Yields the attributes of a class with literal values."""
  for item in node.body:
    match item:
      case ast.Assign(targets=[ast.Name(id=name)], value=value):
        pass
      case ast.AnnAssign(target=ast.Name(id=name), value=value) if value:
        pass
      case _:
        continue
    try:
      yield name, ast.literal_eval(value)
    except ValueError:
      continue
