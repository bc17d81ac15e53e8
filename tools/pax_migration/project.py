"""Modules of Pax that are rewritten together, and what their classes inherit.

A class may derive from a class of another module; then its constants, methods
and mesh are found there. Constants have the values that Python would give them:
the classes are made again as plain ones, with the constants only.
"""

import ast
from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import functools
import inspect
import pathlib
import pkgutil
from typing import Any, Final

import libcst as cst
from libcst import metadata

from paxon.runner import user_error
from paxon.runner.configuration import annotations
from paxon.tools.pax_migration import (
  class_tables,
  data_methods,
  task_methods,
  values,
)

MARKER: Final = "MIGRATE"
PAX: Final = ("paxml", "praxis")
# Libraries of Pax's inputs, which a module does not need without them.
INPUTS: Final = ("seqio", "t5", "tensorflow", "tensorflow_datasets")
_ROOTS: Final = ("object", "ABC")
_STAGES: Final = "NUM_STAGES"


@dataclasses.dataclass(frozen=True)
class Entry:
  """A line of the report.

  Attributes:
    path: The file.
    line: The line in it.
    text: The construct, and what to do.
    is_open: Whether a person has to do it.
  """

  path: pathlib.Path
  line: int
  text: str
  is_open: bool


@dataclasses.dataclass
class File:
  """A module.

  Attributes:
    path: Its path.
    tree: Its statements, for analysis.
    module: Its statements with comments, for rewriting.
    positions: Their positions.
  """

  path: pathlib.Path
  tree: ast.Module
  module: cst.Module
  positions: Mapping[cst.CSTNode, Any]

  @property
  def name(self) -> str:
    """The name of the module, without its package."""
    return self.path.stem

  def get_line(self, node: cst.CSTNode) -> int:
    """Returns the line of a statement."""
    return self.positions[node].start.line


@dataclasses.dataclass
class Class:
  """A class of a module.

  Attributes:
    name: Its name.
    file: Its module.
    tree: Its statements.
    bases: Names of its bases, without modules.
    constants: Source of the values of the constants in its body.
    lines: Their lines.
    paxs: A plain class with the constants, in Pax's order of bases.
    ours: The same in our order of bases.
    effects: Effects of its methods `task()` and `datasets()`.
    inputs: Classes of ours with the data of its method `datasets()`.
    data_problem: Reason why `datasets()` has no counterpart.
  """

  name: str
  file: File
  tree: ast.ClassDef
  bases: tuple[str, ...]
  constants: dict[str, str] = dataclasses.field(default_factory=dict)
  lines: dict[str, int] = dataclasses.field(default_factory=dict)
  paxs: type = object
  ours: type = object
  effects: task_methods.Effects = dataclasses.field(
    default_factory=task_methods.Effects
  )
  inputs: tuple[str, ...] = ()
  data_problem: str = ""

  def get_method(self, name: str) -> ast.FunctionDef | None:
    """Returns a method of the body, or None."""
    for node in self.tree.body:
      if isinstance(node, ast.FunctionDef) and node.name == name:
        return node
    return None


def read(path: pathlib.Path) -> File:
  """Returns a parsed module.

  Raises:
    user_error.UserError: It cannot be read, or is no Python module of Pax.
  """
  try:
    text = path.read_text(encoding="utf-8-sig")
    tree = ast.parse(text)
  except OSError as error:
    raise user_error.UserError(f"{path}: {error.strerror}.") from error
  except UnicodeDecodeError as error:
    raise user_error.UserError(
      f"{path} is not a text file in UTF-8."
    ) from error
  except (SyntaxError, ValueError) as error:
    line = getattr(error, "lineno", None) or 1
    what = getattr(error, "msg", None) or str(error)
    raise user_error.UserError(f"{path}:{line}: not Python: {what}.") from error
  if not any(root in PAX for root in _imported_roots(tree)):
    raise user_error.UserError(
      f"{path} has no code of Pax: it imports neither paxml nor praxis."
    )
  wrapper = metadata.MetadataWrapper(cst.parse_module(text))
  positions = wrapper.resolve(metadata.PositionProvider)
  return File(path, tree, wrapper.module, positions)


def _imported_roots(tree: ast.Module) -> Iterator[str]:
  for node in ast.walk(tree):
    if isinstance(node, ast.Import):
      yield from (each.name.partition(".")[0] for each in node.names)
    elif isinstance(node, ast.ImportFrom):
      yield (node.module or "").partition(".")[0]


class Project:
  """Modules, their classes and the entries of the report.

  Attributes:
    files: The modules.
    classes: Their classes by name; the first module wins.
    aliases: Constants of the user that only hold the value of a knob.
    entries: The report.
  """

  def __init__(self, files: Sequence[File]) -> None:
    self.files = files
    self.entries: list[Entry] = []
    self.aliases: dict[str, task_methods.Alias] = {}
    self.classes: dict[str, Class] = {}
    for file in files:
      for node in file.tree.body:
        if isinstance(node, ast.ClassDef):
          bases = tuple(_last_name(base) for base in node.bases)
          self.classes.setdefault(
            node.name, Class(node.name, file, node, bases)
          )
    for cls in self.classes.values():
      self._read_constants(cls)
    for cls in self._in_order():
      self._make_plain(cls)
    # Once more, with the constants that the first pass found.
    for _ in range(2):
      for cls in self.get_experiments():
        self._interpret(cls)

  def add(self, file: File, line: int, text: str, *, is_open: bool) -> None:
    """Adds a line to the report."""
    entry = Entry(file.path, line, text, is_open)
    if entry not in self.entries:
      self.entries.append(entry)

  def get_experiments(self) -> list[Class]:
    """Returns the classes of experiments and their mixins, bases first."""
    names = {c.name for c in self.classes.values() if self.find_bases(c)}
    for cls in self.classes.values():
      if cls.name in names:
        names |= {base.name for base in self._get_ancestors(cls)}
    return [cls for cls in self._in_order() if cls.name in names]

  def find_bases(self, cls: Class) -> list[class_tables.Base]:
    """Returns the classes of Pax that a class derives from."""
    found = []
    for each in (cls, *self._get_ancestors(cls)):
      for base in each.bases:
        known = class_tables.BASES.get(base)
        if base not in self.classes and known is not None:
          found.append(known)
    return found

  def find_owners(self, cls: Class) -> list[class_tables.Base]:
    """Returns the classes of Pax whose constants a class may set.

    Those of a mixin without bases of Pax are the bases of its subclasses.
    """
    return self.find_bases(cls) or [
      base
      for each in self.classes.values()
      if cls in self._get_ancestors(each)
      for base in self.find_bases(each)
    ]

  def is_data(self, name: str) -> bool:
    """Whether a base class has data and no model."""
    if name not in self.classes:
      known = class_tables.BASES.get(name)
      return known is not None and known.is_data
    cls = self.classes[name]
    methods = {
      node.name
      for each in (cls, *self._get_ancestors(cls))
      for node in each.tree.body
      if isinstance(node, ast.FunctionDef)
    }
    bases = self.find_bases(cls)
    has_model = any(
      not base.is_data and base.ours != "experiment.Experiment"
      for base in bases
    )
    has_data = "datasets" in methods or any(base.is_data for base in bases)
    return has_data and not has_model

  def get_constants(self, cls: Class) -> dict[str, class_tables.Constant]:
    """Returns the constants that a class may set, with the user's aliases."""
    found: dict[str, class_tables.Constant] = {}
    for base in self.find_owners(cls):
      found.update(base.constants)
    found.update(class_tables.BASES["BaseExperiment"].constants)
    for name, alias in self.aliases.items():
      found.setdefault(name, class_tables.Constant(alias.knob, alias.convert))
    return found

  def find_method(self, cls: Class, name: str) -> ast.FunctionDef | None:
    """Returns a method of a class or of its bases."""
    for each in (cls, *self._get_ancestors(cls)):
      if (found := each.get_method(name)) is not None:
        return found
    return None

  def find_function(self, file: File, name: str) -> ast.FunctionDef | None:
    """Returns a function of a module, or of another one by that name."""
    for each in (file, *self.files):
      for node in each.tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
          return node
    return None

  def find_decided(self) -> dict[str, Any]:
    """Returns the switches that have one value in all classes."""
    found: dict[str, list[Any]] = {
      name: [value] for name, value in class_tables.DEFAULTS.items()
    }
    for cls in self.classes.values():
      for name, value in self.get_values(cls).items():
        found.setdefault(name, []).append(value)
    return {
      name: seen[0]
      for name, seen in found.items()
      if isinstance(seen[0], bool) and all(each is seen[0] for each in seen)
    }

  def find_shape_knobs(self, cls: Class) -> dict[str, Any]:
    """Returns the knobs that depend on the shape of a class's mesh."""
    shapes = set(class_tables.SHAPES)
    scope = {name: getattr(cls.paxs, name) for name in dir(cls.paxs)}
    found = {}
    for each in (cls, *self._get_ancestors(cls)):
      if each is not cls and not shapes & set(cls.constants):
        continue
      for knob, code in each.effects.knobs.items():
        value = values.evaluate(code, scope)
        if any(shape in code for shape in shapes):
          if value is not values.UNKNOWN:
            found.setdefault(knob, value)
          else:
            line = each.effects.lines.get(knob, each.tree.lineno)
            self.add(each.file, line, f"{knob} = {code}", is_open=True)
    return found

  def find_problem(self, cls: Class, knob: str, value: Any) -> str:
    """Returns why a knob of a class cannot have a value; empty if it can."""
    names = {base.ours for base in self.find_owners(cls)}
    for each in (cls, *self._get_ancestors(cls)):
      names.update((*each.inputs, *each.effects.mixins))
    known = {}
    for name in names:
      known.update(find_ours(name).knobs())
    if knob not in known:
      return f"no base class has a knob {knob}"
    if value is values.UNKNOWN:
      return ""
    try:
      annotations.coerce(value, known[knob].annotation)
    except annotations.MismatchError as error:
      return f"{knob}: {error}"
    return ""

  @functools.cached_property
  def followed(self) -> set[str]:
    """Returns the methods that `task()` and `datasets()` call, with these."""
    followed = {"task", "datasets"}
    size = -1
    while size != len(followed):
      size = len(followed)
      for cls in self.get_experiments():
        for name in sorted(followed):
          method = cls.get_method(name)
          if method is None or (name == "datasets" and cls.data_problem):
            continue
          followed |= {
            node.func.attr
            for node in ast.walk(method)
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and ast.unparse(node.func.value) in ("self", "cls")
          }
    return followed

  @functools.cached_property
  def read_names(self) -> set[str]:
    """Returns the names that functions, methods and expressions read."""
    return {
      getattr(node, "attr", getattr(node, "id", ""))
      for file in self.files
      for node in ast.walk(file.tree)
      if isinstance(node, ast.Attribute | ast.Name)
      and isinstance(node.ctx, ast.Load)
    }

  def get_forced(self, cls: Class) -> dict[str, str]:
    """Returns the knobs that methods of bases set, with the base's name.

    A constant of the class for such a knob has no effect in Pax.
    """
    found: dict[str, str] = {}
    for each in reversed(self._get_ancestors(cls)):
      for knob, code in each.effects.knobs.items():
        # A conditional value may be that of the constant.
        if f"super().{knob}" not in code:
          found[knob] = each.name
    return found

  def find_mesh(self, plain: type) -> str | None:
    """Returns our mesh of a plain class; None without shapes.

    Raises:
      values.UntranslatableError: The shapes have other axes.
    """
    ici = getattr(plain, "ICI_MESH_SHAPE", None)
    ici = getattr(plain, "MESH_SHAPE", None) if ici is None else ici
    dcn = getattr(plain, "DCN_MESH_SHAPE", None)
    if ici is None:
      return None
    has_stages = getattr(plain, _STAGES, None) is not None
    size = 0 if ici is values.UNKNOWN else len(ici)
    return values.to_mesh(
      ici, dcn, has_stages=has_stages, has_experts=size == 4 + has_stages
    )

  def _get_ancestors(self, cls: Class) -> list[Class]:
    """Returns the bases in these modules, the nearest first."""
    found: list[Class] = []
    queue = list(cls.bases)
    while queue:
      name = queue.pop(0)
      base = self.classes.get(name)
      if base is not None and base is not cls and base not in found:
        found.append(base)
        queue += base.bases
    return found

  def _in_order(self) -> list[Class]:
    """Returns all classes, bases first."""
    found: list[Class] = []
    for cls in self.classes.values():
      for each in (*reversed(self._get_ancestors(cls)), cls):
        if each not in found:
          found.append(each)
    return found

  def _read_constants(self, cls: Class) -> None:
    for node in self.flatten(cls, cls.tree.body):
      if isinstance(node, ast.Assign | ast.AnnAssign) and node.value:
        targets = (
          node.targets if isinstance(node, ast.Assign) else [node.target]
        )
        for target in targets:
          if isinstance(target, ast.Name):
            cls.constants[target.id] = ast.unparse(node.value)
            cls.lines[target.id] = node.lineno

  def flatten(self, cls: Class, body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yields the statements of a class body, with decided branches."""
    scope = self.get_globals(cls.file)
    for node in body:
      for name, code in cls.constants.items():
        scope[name] = values.evaluate(code, scope)
      if isinstance(node, ast.If):
        test = values.evaluate(ast.unparse(node.test), scope)
        if test is not values.UNKNOWN:
          yield from self.flatten(cls, node.body if test else node.orelse)
          continue
      yield node

  def get_globals(self, file: File) -> dict[str, Any]:
    """Returns the values of the variables of a module."""
    scope: dict[str, Any] = {}
    for node in file.tree.body:
      if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        code = ast.unparse(node.value)
        scope[node.targets[0].id] = values.evaluate(code, scope)
    return scope

  def get_values(self, cls: Class) -> dict[str, Any]:
    """Returns the values of the constants in the body of a class."""
    scope = self.get_globals(cls.file)
    found = {}
    for name, code in cls.constants.items():
      found[name] = scope[name] = values.evaluate(code, scope)
    return found

  def _make_plain(self, cls: Class) -> None:
    body = self.get_values(cls)
    ordered = self.order_bases(cls)
    for field, names in (("paxs", cls.bases), ("ours", ordered)):
      bases = tuple(self._get_plain(name, field) for name in names)
      bases = tuple(dict.fromkeys(base for base in bases if base is not object))
      try:
        made = type(cls.name, bases, dict(body))
      except TypeError as error:
        raise user_error.UserError(
          f"{cls.file.path}:{cls.tree.lineno}: {cls.name}: {error}."
        ) from error
      setattr(cls, field, made)

  def order_bases(self, cls: Class) -> tuple[str, ...]:
    """Returns the bases of a class, data first, as ours require."""
    return tuple(sorted(cls.bases, key=lambda name: not self.is_data(name)))

  def _get_plain(self, name: str, field: str) -> type:
    if name in self.classes:
      return getattr(self.classes[name], field)
    known = class_tables.BASES.get(name)
    if known is None or name in _ROOTS:
      return object
    return _make_known(name)

  def _interpret(self, cls: Class) -> None:
    find: dict[str, Any] = {
      "constants": self.get_constants(cls),
      "decided": self.find_decided(),
      "find_function": lambda name: self.find_function(cls.file, name),
      "find_method": lambda name: self.find_method(cls, name),
    }
    effects = task_methods.Effects()
    if (task := cls.get_method("task")) is not None:
      effects = task_methods.interpret(task, **find)
    if (datasets := cls.get_method("datasets")) is not None:
      try:
        found, inputs = data_methods.interpret(datasets, **find)
      except values.UntranslatableError as error:
        cls.data_problem = str(error)
      else:
        cls.inputs, cls.data_problem = tuple(inputs), ""
        effects.knobs.update(found.knobs)
        effects.aliases.update(found.aliases)
        effects.notes += found.notes
        effects.problems += found.problems
    cls.effects = effects
    for name, alias in effects.aliases.items():
      self.aliases.setdefault(name, alias)


def find_ours(name: str) -> Any:
  """Returns an experiment class of ours by module and name."""
  module, _, cls = name.partition(".")
  statement = class_tables.IMPORTS[module]
  package = statement.split()[1]
  return pkgutil.resolve_name(f"{package}.{module}:{cls}")


@functools.cache
def _make_known(name: str) -> type:
  """Returns a plain class with the constants of a base class of Pax."""
  base = class_tables.BASES[name]
  ours = find_ours(base.ours)
  data = class_tables.BASES["BaseExperiment"].constants
  body = {}
  for constant, known in base.constants.items():
    value = inspect.getattr_static(ours, known.knob or "-", property())
    is_model_only = constant in data and not base.is_data
    if not is_model_only and not isinstance(value, property):
      body[constant] = value
  return type(name, (), body)


def _last_name(node: ast.expr) -> str:
  return ast.unparse(node).rpartition(".")[2]
