"""Rewriting of one experiment class.

Constants become knobs where they stand, with their comments; what `task()` sets
becomes knobs or properties at the end of the body.
"""

import ast
from collections.abc import Iterable, Iterator, Mapping, Sequence
import re
import textwrap
from typing import Final, cast

import libcst as cst

from paxon.sharding import suggestions
from paxon.tools.pax_migration import class_tables, project, values

_REGISTER: Final = "register"
_TASK: Final = "task"
_DATASETS: Final = "datasets"
_EXPERIMENT: Final = "experiment.Experiment"
_ANNOTATIONS: Final[Mapping[type, str]] = {
  bool: "bool",
  int: "int",
  float: "float",
  str: "str",
}
_MESH_SOURCES: Final = (*class_tables.SHAPES, "NUM_STAGES")


class Rename(cst.CSTTransformer):
  """Replaces names of constants by names of knobs.

  Variables of the module that are not attributes remain.
  """

  def __init__(
    self, names: Mapping[str, str], variables: Iterable[str] = ()
  ) -> None:
    self._names, self._variables = names, frozenset(variables)
    self._attributes: set[cst.CSTNode] = set()

  def visit_Attribute(self, node: cst.Attribute) -> None:  # noqa: N802
    """Remembers the name of an attribute."""
    self._attributes.add(node.attr)

  def leave_Name(  # noqa: N802
    self, original_node: cst.Name, updated_node: cst.Name
  ) -> cst.Name:
    """Returns the new name."""
    is_variable = original_node.value in self._variables
    if is_variable and original_node not in self._attributes:
      return updated_node
    name = self._names.get(original_node.value, original_node.value)
    return updated_node.with_changes(value=name)


def find_names(code: str) -> set[str]:
  """Returns the names and attributes in a source."""
  tree = ast.parse(textwrap.dedent(code))
  return {
    getattr(node, "id", None) or getattr(node, "attr", "")
    for node in ast.walk(tree)
    if isinstance(node, ast.Name | ast.Attribute)
  }


def find_reason(
  made: project.Project, node: ast.FunctionDef, gone: set[str]
) -> str:
  """Returns why a method does not remain as it is; empty if it does."""
  if node.name in made.followed:
    return "its effects are knobs"
  code = ast.unparse(node)
  used = sorted(find_names(code) & (gone | {"task_p"}))
  return f"{node.name}() uses {used[0]} of Pax" if used else ""


def to_comments(reason: str, source: str) -> list[str]:
  """Returns the marker of a construct that is left, and its source."""
  lines = textwrap.dedent(source).strip("\n").splitlines()
  return [
    f"# {project.MARKER}: {reason}",
    *(f"#   {each}".rstrip() for each in lines),
  ]


class ClassRewriter:
  """The rewriting of one class.

  Attributes:
    used_modules: Modules of ours that the output names.
  """

  def __init__(
    self,
    made: project.Project,
    cls: project.Class,
    *,
    own: Mapping[str, str],
    gone: set[str],
  ) -> None:
    """Prepares the rewriting.

    Args:
      made: The modules.
      cls: The class.
      own: Constants of the user that code reads, with their annotations.
      gone: Names of the module that the output does not define.
    """
    self._project, self._cls, self._gone = made, cls, gone
    self._own = own
    self._constants = made.get_constants(cls)
    self._body: list[cst.BaseStatement] = []
    self._pending: list[str] = []
    # Source and constant of each knob that is assigned so far.
    self._assigned: dict[str, str] = {}
    self._sources: dict[str, str] = {}
    self._values = made.get_values(cls)
    self._has_mesh = False
    self._globals = set(made.get_globals(cls.file))
    # Those that the current statement reads, rather than constants.
    self._variables = self._globals
    self._lines: dict[cst.CSTNode, int] = {}
    self.used_modules: set[str] = set()
    self._names = {
      **{name: name.lower() for name in own},
      **{n: c.knob for n, c in self._constants.items() if c.knob},
    }

  def rewrite(self, node: cst.ClassDef) -> cst.ClassDef:
    """Returns the class."""
    footer: list[cst.EmptyLine] = []
    body: Iterable[cst.BaseStatement] = ()
    if isinstance(node.body, cst.IndentedBlock):
      body, footer = node.body.body, list(node.body.footer)
    elif isinstance(node.body, cst.SimpleStatementSuite):
      body = self._split(node.body)
    for statement in self._flatten(body):
      self._statement(statement)
    self._variables = self._globals
    self._finish()
    footer = [*map(_comment, self._pending), *footer]
    if not self._body:
      self._body.append(cst.parse_statement("pass"))
    block = cst.IndentedBlock(body=self._body, footer=footer)
    decorators = [d for d in node.decorators if not self._is_registry(d)]
    if len(decorators) < len(node.decorators):
      self._note(self._cls.tree.lineno, "--exp takes the path of the class")
    return node.with_changes(
      bases=self._bases(), body=block, decorators=decorators
    )

  def _is_registry(self, decorator: cst.Decorator) -> bool:
    code = _code(decorator.decorator).partition("(")[0]
    return code.rpartition(".")[2] == _REGISTER

  def _bases(self) -> Sequence[cst.Arg]:
    names = [*self._cls.inputs, *self._cls.effects.mixins]
    for name in self._project.order_bases(self._cls):
      known = class_tables.BASES.get(name)
      if name not in self._project.classes and known is not None:
        names.append(known.ours)
      elif name not in self._project.classes and name not in ("ABC", "object"):
        self._todo(
          self._cls.tree.lineno,
          f"base class {name}: pass the module that defines it, too",
        )
      elif name in self._project.classes:
        names.append(self._qualify(name))
    if len(names) > 1 and _EXPERIMENT in names:
      names.remove(_EXPERIMENT)
    for name in names:
      if "." in name:
        self.used_modules.add(name.partition(".")[0])
    return [cst.Arg(cst.parse_expression(name)) for name in names]

  def _qualify(self, name: str) -> str:
    """Returns the name of a base as the source has it."""
    for base in self._cls.tree.bases:
      text = ast.unparse(base)
      if text.rpartition(".")[2] == name:
        return text
    return name

  def _flatten(
    self, body: Iterable[cst.BaseStatement]
  ) -> Iterable[cst.BaseStatement]:
    """Yields statements, with branches that constants decide."""
    for statement in body:
      if (
        isinstance(statement, cst.SimpleStatementLine)
        and len(statement.body) > 1
      ):
        yield from self._split(statement)
        continue
      if isinstance(statement, cst.If):
        scope = {**self._values}
        test = values.evaluate(_code(statement.test), scope)
        if test is not values.UNKNOWN:
          line = self._line(statement)
          self._note(line, f"if {_code(statement.test)} is {bool(test)}")
          branch = statement.body if test else statement.orelse
          if isinstance(branch, cst.Else):
            branch = branch.body
          if isinstance(branch, cst.IndentedBlock):
            yield from self._flatten(branch.body)
          elif isinstance(branch, cst.If):
            yield from self._flatten([branch])
          continue
      yield statement

  def _split(
    self, several: cst.SimpleStatementLine | cst.SimpleStatementSuite
  ) -> Iterator[cst.SimpleStatementLine]:
    """Yields the statements of one line, which semicolons separate."""
    leading = getattr(several, "leading_lines", ())
    for small in several.body:
      alone = small.with_changes(semicolon=cst.MaybeSentinel.DEFAULT)
      made = cst.SimpleStatementLine([alone], leading_lines=leading)
      self._lines[made] = self._cls.file.get_line(small)
      leading = ()
      yield made

  def _statement(self, statement: cst.BaseStatement) -> None:
    line, lines = self._line(statement), self._cls.lines
    self._variables = {
      name
      for name in self._globals
      if isinstance(statement, cst.FunctionDef) or lines.get(name, line) >= line
    }
    if isinstance(statement, cst.FunctionDef):
      self._method(statement)
      return
    if isinstance(statement, cst.SimpleStatementLine):
      (small, *_) = statement.body
      name = _target(small)
      if name is not None:
        self._constant(name, statement, line)
        return
      if isinstance(small, cst.Expr | cst.Pass) and not self._uses_gone(
        statement
      ):
        self._keep(statement)
        return
      if isinstance(small, cst.Assert) and not self._uses_gone(statement):
        self._assertion(statement, line)
        return
    self._leave(statement, line, "not a constant or a method")

  def _assertion(self, statement: cst.SimpleStatementLine, line: int) -> None:
    names = find_names(_code(statement.body[0]))
    unbound = [n for n in names if n in self._names and n not in self._values]
    if unbound:
      self._leave(statement, line, f"{unbound[0]} is not set in this class")
      return
    self._keep(statement)

  def _constant(
    self, name: str, statement: cst.SimpleStatementLine, line: int
  ) -> None:
    """Rewrites an assignment to a constant."""
    has_shape = set(class_tables.SHAPES) & set(self._cls.constants)
    if name in class_tables.SHAPES:
      self._keep_comments(statement)
    if name in (class_tables.SHAPES if has_shape else _MESH_SOURCES):
      self._mesh(name, line)
    if name in class_tables.SHAPES:
      return
    known = self._constants.get(name)
    if known is None:
      self._own_constant(name, statement, line)
      return
    code = _value_code(statement)
    given = values.Value(code, values.evaluate(code, self._values))
    try:
      code = known.convert(given)
    except values.UntranslatableError as error:
      self._leave(statement, line, str(error))
      return
    if known.knob and find_names(code) & self._gone:
      self._leave(statement, line, "the value needs Pax")
      return
    if not known.knob:
      self._note(line, f"{name}: {known.note}")
      self._keep_comments(statement)
      return
    if given.value in (None, 0, False, -1) and code != given.code:
      self._note(line, f"{name} = {given.code} is {known.knob} = {code}")
    self._knob(name, known.knob, code, statement, line)

  def _knob(
    self,
    name: str,
    knob: str,
    code: str,
    statement: cst.SimpleStatementLine,
    line: int,
  ) -> None:
    effects = self._cls.effects
    forced = self._project.get_forced(self._cls)
    inherited = f"super().{knob}"
    if inherited in effects.knobs.get(knob, ""):
      # The branch of task() that reads the constant.
      own = effects.knobs[knob].replace(inherited, code)
      effects.knobs[knob] = own
      self._keep_comments(statement)
      return
    if knob in effects.knobs:
      own = re.sub(rf"\bself\.{name}\b", f"({code})", effects.knobs[knob])
      if own != effects.knobs[knob]:
        effects.knobs[knob] = own
        self._keep_comments(statement)
        return
      self._note(line, f"{name}: task() sets {knob}")
      self._keep_comments(statement)
      return
    if knob in forced:
      where = f"task() of {forced[knob]} sets {knob}, so Pax ignored {name}"
      self._leave(statement, line, where)
      return
    other = self._sources.setdefault(knob, name)
    if other != name and self._assigned.get(knob, code) != code:
      self._leave(statement, line, f"{knob} is set twice, to other values")
      return
    if other != name and knob in self._assigned:
      self._note(line, f"{name}: {knob} is set above, to the same value")
      return
    value = values.evaluate(code, self._values)
    problem = self._project.find_problem(self._cls, knob, value)
    if problem and value is None:
      self._note(line, f"{name}: None is set in subclasses")
      return
    if problem:
      self._leave(statement, line, problem)
      return
    renamed = self._rename(code)
    unbound = self._find_unbound(code)
    if unbound:
      self._property(knob, renamed, unbound)
      return
    self._assigned[knob] = code
    self._keep(_assign(statement, knob, renamed))

  def _find_unbound(self, code: str) -> set[str]:
    """Returns knobs in an expression that the body does not assign before."""
    bound = set(self._names.values())
    names = find_names(self._rename(code)) & bound
    return {n for n in names if n not in self._assigned} - {""}

  def _own_constant(
    self, name: str, statement: cst.SimpleStatementLine, line: int
  ) -> None:
    if name not in self._own:
      if name in self._project.read_names:
        self._note(line, f"{name}: what reads it is decided or left")
        self._keep_comments(statement)
        return
      close = suggestions.suggest(name, self._constants)
      close = close if "did you mean" in close else ""
      reason = f"nothing reads {name}{close}"
      if self._is_in_mesh(name):
        self._note(line, f"{name}: its value is in the mesh")
        self._keep_comments(statement)
        return
      self._leave(statement, line, reason.rstrip("."))
      return
    code = _value_code(statement)
    if find_names(code) & self._gone:
      self._leave(statement, line, "the value needs Pax")
      return
    knob = self._names[name]
    self._assigned[knob] = code
    inherited = any(name in vars(base) for base in self._cls.paxs.__mro__[1:])
    annotation = "" if inherited else self._annotate(name)
    if annotation and self._own[name]:
      annotation = f"{self._own[name]}[{annotation}]"
    self._keep(_assign(statement, knob, self._rename(code), annotation))

  def _annotate(self, name: str) -> str:
    value = self._values.get(name)
    if type(value) in _ANNOTATIONS:
      return _ANNOTATIONS[type(value)]
    if isinstance(value, list | tuple):
      return f"{type(value).__name__}"
    return "object"

  def _is_in_mesh(self, name: str) -> bool:
    return any(
      name in find_names(code)
      for shape, code in self._cls.constants.items()
      if shape in class_tables.SHAPES
    )

  def _mesh(self, name: str, line: int) -> None:
    """Adds the mesh, once."""
    if self._has_mesh:
      return
    try:
      mesh = self._project.find_mesh(self._cls.paxs)
    except values.UntranslatableError as error:
      if name in class_tables.SHAPES:
        self._todo(line, f"{name}: {error}")
      return
    if mesh is None:
      return
    self._has_mesh = True
    self._keep(cst.parse_statement(f'mesh = "{mesh}"'))

  def _method(self, node: cst.FunctionDef) -> None:
    name, line = node.name.value, self._line(node)
    if name == _TASK:
      self._keep_comments(node)
      return
    if name == _DATASETS and self._cls.data_problem:
      self._leave(node, line, self._cls.data_problem)
      return
    if name == _DATASETS and self._cls.inputs:
      self._keep_comments(node)
      return
    tree = self._cls.get_method(name)
    reason = ""
    if tree is not None:
      reason = find_reason(self._project, tree, self._gone)
    if not reason:
      self._keep(node)
    elif "Pax" in reason:
      self._leave(node, line, reason)
    else:
      self._note(line, f"{name}(): {reason}")

  def _report_effects(self) -> None:
    effects = self._cls.effects
    for line, text in effects.notes:
      self._note(line, text)
    for problem in effects.problems:
      self._todo(problem.line, f"{problem.reason}: {_shorten(problem.source)}")
      self._pending += to_comments(problem.reason, problem.source)

  def _finish(self) -> None:
    """Adds what `task()` sets, and knobs that our order of bases needs."""
    effects = self._cls.effects
    self._report_effects()
    self._fix_order()
    shape_knobs = self._project.find_shape_knobs(self._cls)
    knobs = {
      **{
        knob: code
        for knob, code in effects.knobs.items()
        if not find_names(code) & set(class_tables.SHAPES)
      },
      **{knob: repr(value) for knob, value in shape_knobs.items()},
    }
    # Properties, which are longer, last.
    for knob, code in sorted(knobs.items(), key=lambda k: _is_dynamic(k[1])):
      self._add_knob(knob, code)
    if effects.checks:
      lines = [f"  assert {self._rename(each)}" for each in effects.checks]
      text = "\n".join(["def task(self):", *lines, "  return super().task()"])
      self._keep(_parse_definition(text))
    for name, code in effects.constants.items():
      known = self._constants.get(name)
      if known is not None and known.knob:
        self._add_knob(known.knob, code)

  def _fix_order(self) -> None:
    """Sets knobs of data that our order of bases would change."""
    for name, constant in class_tables.BASES[
      "BaseExperiment"
    ].constants.items():
      pax = getattr(self._cls.paxs, name, None)
      if pax is None or not constant.knob or constant.knob in self._assigned:
        continue
      if getattr(self._cls.ours, name, None) != pax:
        self._keep(cst.parse_statement(f"{constant.knob} = {pax!r}"))
        setattr(self._cls.ours, name, pax)

  def _add_knob(self, knob: str, code: str) -> None:
    if _is_dynamic(code):
      # Its own value is that of the bases.
      value = re.sub(
        rf"\bself\.{knob}\b", f"super().{knob}", self._rename(code)
      )
      text = f"@property\ndef {knob}(self):\n  return {value}"
      self._keep(_parse_definition(text))
      return
    self._assigned[knob] = code
    self._keep(cst.parse_statement(f"{knob} = {code}"))

  def _property(self, knob: str, code: str, names: set[str]) -> None:
    tree = ast.parse(code, mode="eval")
    for node in ast.walk(tree):
      if isinstance(node, ast.Name) and node.id in names:
        node.id = f"self.{node.id}"
    text = f"@property\ndef {knob}(self):\n  return {ast.unparse(tree)}"
    self._keep(_parse_definition(text))

  def _rename(self, code: str) -> str:
    tree = cst.parse_expression(code).visit(
      Rename(self._names, self._variables)
    )
    return _code(cast(cst.BaseExpression, tree))

  def _uses_gone(self, statement: cst.BaseStatement) -> bool:
    return bool(find_names(_code(statement)) & self._gone)

  def _keep(self, statement: cst.BaseStatement) -> None:
    visited = statement.visit(Rename(self._names, self._variables))
    renamed = cast(cst.BaseStatement, visited)
    lines = [*map(_comment, self._pending)]
    self._pending = []
    old = list(getattr(renamed, "leading_lines", ()))
    self._body.append(renamed.with_changes(leading_lines=[*old, *lines]))
    for name in find_names(_code(renamed)) & set(class_tables.IMPORTS):
      self.used_modules.add(name)

  def _keep_comments(self, statement: cst.BaseStatement) -> None:
    for each in getattr(statement, "leading_lines", ()):
      if each.comment is not None:
        self._pending.append(each.comment.value)

  def _leave(
    self, statement: cst.BaseStatement, line: int, reason: str
  ) -> None:
    self._keep_comments(statement)
    source = _code(statement.with_changes(leading_lines=[]))
    self._pending += to_comments(reason, source)
    self._todo(line, f"{reason}: {_shorten(source)}")
    for at, hint in class_tables.find_hints(source, line):
      self._todo(at, hint)

  def _line(self, statement: cst.CSTNode) -> int:
    known = self._lines.get(statement)
    return known or self._cls.file.get_line(statement)

  def _note(self, line: int, text: str) -> None:
    self._project.add(self._cls.file, line, text, is_open=False)

  def _todo(self, line: int, text: str) -> None:
    self._project.add(self._cls.file, line, text, is_open=True)


def _code(node: cst.CSTNode) -> str:
  return cst.Module([]).code_for_node(node)


def _comment(text: str) -> cst.EmptyLine:
  return cst.EmptyLine(comment=cst.Comment(text))


def _is_dynamic(code: str) -> bool:
  """Whether an expression reads the instance."""
  return "self." in code or "super()" in code


def _parse_definition(text: str) -> cst.BaseStatement:
  """Returns a definition after an empty line."""
  made = cst.parse_statement(text)
  return made.with_changes(leading_lines=[cst.EmptyLine(indent=False)])


def _shorten(source: str) -> str:
  first, _, rest = source.strip().partition("\n")
  return f"{first} ..." if rest else first


def _target(small: cst.BaseSmallStatement) -> str | None:
  """Returns the name that a statement assigns, or None."""
  if isinstance(small, cst.AnnAssign) and small.value is not None:
    target = small.target
  elif isinstance(small, cst.Assign) and len(small.targets) == 1:
    target = small.targets[0].target
  else:
    return None
  return target.value if isinstance(target, cst.Name) else None


def _value_code(statement: cst.SimpleStatementLine) -> str:
  (small, *_) = statement.body
  assert isinstance(small, cst.Assign | cst.AnnAssign)
  assert small.value is not None
  return _code(small.value)


def _assign(
  statement: cst.SimpleStatementLine, name: str, code: str, annotation: str = ""
) -> cst.SimpleStatementLine:
  """Returns an assignment with the comments of another one."""
  text = f"{name}: {annotation} = {code}" if annotation else f"{name} = {code}"
  made = cst.parse_statement(text)
  assert isinstance(made, cst.SimpleStatementLine)
  return statement.with_changes(body=made.body)
