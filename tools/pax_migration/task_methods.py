"""Interpreter of the method `task()` of a Pax experiment.

The method changes a tree of configurations by statements. Their effects are
found without running them: each assignment to a field of the tree becomes the
value of a knob, as an expression of `self`. Helper functions and methods are
followed. A condition on constants becomes a conditional expression; a condition
on the tree itself is taken as true.
"""

import ast
from collections.abc import Callable, Mapping, Sequence
import copy
import dataclasses
from typing import Any, Final, NamedTuple, cast

from paxon.tools.pax_migration import class_tables, task_tables, values

_CONFIGS: Final = ("Config", "template_field", "LayerTpl")
_OLD_CONFIGS: Final = ("HParams", "Params")
_UNWRAPPED: Final = ("cast", "clone", "deepcopy", "get_callable")
_SETTERS: Final = ("Set", "set")
_DEEPEST: Final = 20
# Of a condition after which its block continues.
_CONTINUES: Final = object()


class Path(NamedTuple):
  """A field of the tree, such as `task.model.lm_tpl`."""

  text: str


@dataclasses.dataclass
class Node:
  """A configuration that is not part of the tree yet.

  Attributes:
    cls: Source of its class.
    fields: Its values.
  """

  cls: str
  fields: dict[str, Any]


class Code(NamedTuple):
  """An expression of `self`."""

  tree: ast.expr

  @property
  def text(self) -> str:
    """Its source."""
    return ast.unparse(self.tree)


class Owner(NamedTuple):
  """The object `self`."""


class Problem(NamedTuple):
  """A statement that has no counterpart.

  Attributes:
    line: Its line.
    source: Its source.
    reason: Why.
  """

  line: int
  source: str
  reason: str


class Alias(NamedTuple):
  """A constant of the user that is the value of one knob."""

  knob: str
  convert: values.Convert


@dataclasses.dataclass
class Effects:
  """Effects of a method.

  Attributes:
    knobs: Source of the value by knob.
    lines: Line of the last assignment by knob.
    constants: Source of the value by constant of Pax, for `self.X = ...`.
    aliases: Constants of the user that only hold the value of a knob.
    mixins: Classes of ours that become bases.
    checks: Sources of asserted conditions.
    problems: Statements without a counterpart.
    notes: Lines, and what is not needed there.
  """

  knobs: dict[str, str] = dataclasses.field(default_factory=dict)
  lines: dict[str, int] = dataclasses.field(default_factory=dict)
  constants: dict[str, str] = dataclasses.field(default_factory=dict)
  aliases: dict[str, Alias] = dataclasses.field(default_factory=dict)
  mixins: list[str] = dataclasses.field(default_factory=list)
  checks: list[str] = dataclasses.field(default_factory=list)
  problems: list[Problem] = dataclasses.field(default_factory=list)
  notes: list[tuple[int, str]] = dataclasses.field(default_factory=list)


class _NotCodeError(Exception):
  """An expression depends on the tree."""


# The function or method of a name, or None.
Find = Callable[[str], ast.FunctionDef | None]
_Env = dict[str, Any]


def interpret(
  method: ast.FunctionDef,
  *,
  constants: Mapping[str, class_tables.Constant],
  decided: Mapping[str, Any],
  find_function: Find,
  find_method: Find,
) -> Effects:
  """Returns the effects of a method `task()`.

  Args:
    method: The method.
    constants: Constants of Pax and their knobs.
    decided: Constants with one value in all classes.
    find_function: Returns a function of the module.
    find_method: Returns a method of the class.
  """
  run = Run(constants, decided, find_function, find_method, Effects())
  run.block(method.body, {method.args.args[0].arg: Owner()})
  return run.effects


@dataclasses.dataclass
class Run:
  """The interpretation of one method."""

  constants: Mapping[str, class_tables.Constant]
  decided: Mapping[str, Any]
  find_function: Find
  find_method: Find
  effects: Effects
  depth: int = 0

  def block(self, body: Sequence[ast.stmt], env: _Env) -> Any:
    """Runs statements; returns the returned value."""
    for i, statement in enumerate(body):
      if isinstance(statement, ast.Return):
        value = statement.value
        return None if value is None else self.resolve(value, env)
      if isinstance(statement, ast.If):
        rest = body[i + 1 :]
        returned = self._if(statement, rest, env)
        if returned is not _CONTINUES:
          return returned
        continue
      self._statement(statement, env)
    return None

  def _statement(self, statement: ast.stmt, env: _Env) -> None:
    try:
      self._run_statement(statement, env)
    except (values.UntranslatableError, _NotCodeError) as error:
      reason = str(error) or "it depends on Pax's configuration"
      self._problem(statement, reason)

  def _run_statement(self, statement: ast.stmt, env: _Env) -> None:
    match statement:
      case ast.Assign(targets=targets):
        for target in targets:
          value = self.resolve(statement.value, env)
          self._assign(target, value, statement, env)
      case ast.AnnAssign(target=target, value=ast.expr() as given):
        self._assign(target, self.resolve(given, env), statement, env)
      case ast.Assert(test=test):
        self._assert(test, statement, env)
      case ast.Expr(value=ast.Constant()) | ast.Pass() | ast.Continue():
        pass
      case ast.Expr(value=ast.Call() as call):
        self._call_statement(call, statement, env)
      case ast.For(target=ast.Name(id=name), iter=iterated):
        if not isinstance(iterated, ast.Tuple | ast.List):
          raise values.UntranslatableError("a loop over a computed sequence")
        for each in iterated.elts:
          env[name] = self.resolve(each, env)
          self.block(statement.body, env)
      case ast.Raise():
        pass
      case _:
        raise values.UntranslatableError("not an assignment of one field")

  def _if(self, statement: ast.If, rest: Sequence[ast.stmt], env: _Env) -> Any:
    """Runs both branches; returns _CONTINUES if the block does."""
    try:
      test = self._code(statement.test, env)
    except _NotCodeError:
      self.effects.notes.append(
        (statement.lineno, f"taken as true: {ast.unparse(statement.test)}")
      )
      self.block(statement.body, env)
      return _CONTINUES
    decided = values.evaluate(test.text, self.decided)
    if decided is not values.UNKNOWN:
      taken = statement.body if decided else statement.orelse
      text = f"if {test.text}: it is {bool(decided)} in all classes"
      if "self." in text:
        self.effects.notes.append((statement.lineno, text))
      value = self.block(taken, env)
      if any(isinstance(each, ast.Return) for each in taken):
        return value
      return _CONTINUES
    returns = any(isinstance(each, ast.Return) for each in statement.body)
    otherwise = [*statement.orelse, *rest] if returns else statement.orelse
    before, mine = self.effects, dict(env)
    self.effects = copy.deepcopy(before)
    first = self.block(statement.body, mine)
    then = self.effects
    self.effects = copy.deepcopy(before)
    second = self.block(otherwise, env)
    self._merge(before, then, test)
    for name in env.keys() & mine.keys():
      a, b = mine[name], env[name]
      if isinstance(a, Code) and isinstance(b, Code) and a.text != b.text:
        env[name] = Code(ast.IfExp(test.tree, a.tree, b.tree))
      elif not isinstance(a, Code):
        env[name] = a
    for name in mine.keys() - env.keys():
      env[name] = mine[name]
    if returns:
      return second if first is None else first
    return _CONTINUES

  def _merge(self, before: Effects, then: Effects, test: Code) -> None:
    """Joins the effects of a branch with those of the other one."""
    merged = self.effects
    for ours, theirs in (
      (merged.knobs, then.knobs),
      (merged.constants, then.constants),
    ):
      for name in ours.keys() | theirs.keys():
        a = theirs.get(name, f"super().{name}")
        b = ours.get(name, f"super().{name}")
        ours[name] = a if a == b else f"{a} if {test.text} else {b}"
    for name in ("aliases", "lines"):
      getattr(merged, name).update(getattr(then, name))
    for name in ("mixins", "checks", "problems", "notes"):
      known = len(getattr(before, name))
      new = getattr(then, name)[known:]
      if name == "problems":
        new = [p._replace(reason=f"{p.reason} (if {test.text})") for p in new]
      if name == "checks":
        new = [f"not ({test.text}) or ({each})" for each in new]
      kept = getattr(merged, name)
      kept[known:known] = [each for each in new if each not in kept]

  def resolve(self, node: ast.expr, env: _Env) -> Any:
    """Returns a path, a node, or an expression of `self`."""
    match node:
      case ast.Name(id=name) if name in env:
        return env[name]
      case ast.Attribute(value=value, attr=attr):
        owner = self.resolve(value, env)
        if isinstance(owner, Path):
          return _field(owner, attr)
        if isinstance(owner, Node):
          return owner.fields.setdefault(attr, Node("", {}))
      case ast.Call():
        return self._call(node, env)
    return self._code(node, env)

  def _code(self, node: ast.expr, env: _Env) -> Code:
    return Code(_Substitution(self, env).visit(copy.deepcopy(node)))

  def _call(self, call: ast.Call, env: _Env) -> Any:
    text = ast.unparse(call.func)
    name = text.rpartition(".")[2]
    if text == "super().task":
      return Path("task")
    if name in _UNWRAPPED:
      inner = call.args[-1] if call.args else call.func.value  # pyrefly: ignore[missing-attribute]
      return copy.deepcopy(self.resolve(inner, env))
    if name in _SETTERS and isinstance(call.func, ast.Attribute):
      made = self.resolve(call.func.value, env)
      if isinstance(made, Node):
        made.fields.update(self._keywords(call, env))
      return made
    if name in _CONFIGS and call.args:
      cls = self.resolve(call.args[0], env)
      cls_text = cls.text if isinstance(cls, Code | Path) else ""
      return self._make_node(cls_text, call, env)
    if name in _OLD_CONFIGS:
      return self._make_node(text.rpartition(".")[0], call, env)
    if any(cls == name for _, cls in task_tables.NODES):
      return Node(text, self._keywords(call, env))
    if name in task_tables.CALLS:
      return self._known_call(task_tables.CALLS[name], call, env)
    found = None
    if text.startswith(("self.", "cls.")) and text.count(".") == 1:
      found = self.find_method(name)
    elif isinstance(call.func, ast.Name):
      found = self.find_function(name)
    if found is None or self.depth >= _DEEPEST:
      return self._code_of_call(call, env)
    return self._follow(found, call, env, is_method="." in text)

  def _make_node(self, cls: str, call: ast.Call, env: _Env) -> Node | Path:
    """Returns a configuration, or its path if its class has one only."""
    fields = self._keywords(call, env)
    place = task_tables.PLACES.get(cls.rpartition(".")[2])
    if place is None:
      return Node(cls, fields)
    self.effects.knobs.update(place.sets)
    self.effects.lines.update(dict.fromkeys(place.sets, call.lineno))
    for name, value in fields.items():
      if name != "name":
        path = _field(Path(place.path), name)
        self._assign_path(path, value, call.lineno)
    return Path(place.path)

  def _code_of_call(self, call: ast.Call, env: _Env) -> Code:
    code = _Substitution(self, env).generic_visit(copy.deepcopy(call))
    return Code(cast(ast.expr, code))

  def _keywords(self, call: ast.Call, env: _Env) -> dict[str, Any]:
    if any(each.arg is None for each in call.keywords):
      raise values.UntranslatableError("** in a configuration")
    return {
      str(each.arg): self.resolve(each.value, env) for each in call.keywords
    }

  def _follow(
    self, found: ast.FunctionDef, call: ast.Call, env: _Env, *, is_method: bool
  ) -> Any:
    """Runs a function of the module."""
    names = [each.arg for each in (*found.args.args, *found.args.kwonlyargs)]
    inner: _Env = {}
    given = [self.resolve(each, env) for each in call.args]
    if is_method:
      given.insert(0, Owner())
    inner.update(zip(names, given, strict=False))
    inner.update(self._keywords(call, env))
    defaults = found.args.defaults
    last = names[: len(found.args.args)][-len(defaults) :] if defaults else []
    for name, default in zip(last, defaults, strict=True):
      inner.setdefault(name, Code(default))
    self.depth += 1
    try:
      return self.block(found.body, inner)
    finally:
      self.depth -= 1

  def _known_call(
    self, known: task_tables.Call, call: ast.Call, env: _Env
  ) -> Any:
    given = [self.resolve(each, env) for each in call.args]
    keywords = self._keywords(call, env)
    first = [each for each in (*given, *keywords.values()) if _is_tree(each)]
    if known.note:
      self.effects.notes.append((call.lineno, known.note))
    self.effects.knobs.update(known.sets)
    arguments = list(known.arguments)
    named = dict(zip(arguments, given[1:], strict=False)) | keywords
    for name, value in named.items():
      if name in known.arguments and isinstance(value, Code):
        field = task_tables.Field(known.arguments[name])
        self.set_field(field, value, call.lineno)
    return first[0] if first else None

  def _call_statement(
    self, call: ast.Call, statement: ast.stmt, env: _Env
  ) -> None:
    name = ast.unparse(call.func).rpartition(".")[2]
    owner = ast.unparse(call.func).rpartition(".")[0]
    if owner.rpartition(".")[2] == "logging":
      return
    if owner.rpartition(".")[2] == "asserts":
      self._praxis_assert(name, call, statement, env)
      return
    if name == "copy_fields_from" and isinstance(call.func, ast.Attribute):
      return
    if name in _SETTERS and isinstance(call.func, ast.Attribute):
      target = self.resolve(call.func.value, env)
      if isinstance(target, Path):
        for field, value in self._keywords(call, env).items():
          self._assign_path(_field(target, field), value, statement.lineno)
        return
    try:
      value = self._call(call, env)
    except _NotCodeError:
      value = None
      is_known = name in task_tables.CALLS
    else:
      is_known = not isinstance(value, Code)
    if not is_known:
      raise values.UntranslatableError(f"{name}() is not known")

  def _assert(self, test: ast.expr, statement: ast.stmt, env: _Env) -> None:
    try:
      self.effects.checks.append(self._code(test, env).text)
    except _NotCodeError:
      self.effects.notes.append(
        (statement.lineno, "an assertion on Pax's configuration")
      )

  def _praxis_assert(
    self, name: str, call: ast.Call, statement: ast.stmt, env: _Env
  ) -> None:
    if name not in task_tables.ASSERTS or len(call.args) < 2:
      raise values.UntranslatableError(f"asserts.{name} is not known")
    text = f" {task_tables.ASSERTS[name]} ".join(
      ast.unparse(each) for each in call.args[:2]
    )
    self._assert(ast.parse(text, mode="eval").body, statement, env)

  def _assign(
    self, target: ast.expr, value: Any, statement: ast.stmt, env: _Env
  ) -> None:
    if isinstance(target, ast.Name):
      env[target.id] = value
      return
    if not isinstance(target, ast.Attribute):
      raise values.UntranslatableError("not an assignment of one field")
    owner = self.resolve(target.value, env)
    if isinstance(owner, Node):
      owner.fields[target.attr] = value
    elif isinstance(owner, Path):
      self._assign_path(_field(owner, target.attr), value, statement.lineno)
    elif isinstance(owner, Owner) and isinstance(value, Code):
      self.effects.constants[target.attr] = value.text
    else:
      raise values.UntranslatableError("not a field of the configuration")

  def _assign_path(self, path: Path, value: Any, line: int) -> None:
    """Sets the knobs of a field.

    Raises:
      values.UntranslatableError: It has no counterpart.
    """
    text = path.text
    for part, note in task_tables.UNNEEDED.items():
      if part in text:
        self.effects.notes.append((line, f"{text}: {note}"))
        return
    if isinstance(value, Path):
      if value.text != text:
        raise values.UntranslatableError(f"{text} is another field")
      return
    field = task_tables.FIELDS.get(text)
    if isinstance(value, Node):
      self._assign_node(text, value, field, line)
      return
    if isinstance(value, Code):
      node = task_tables.NODES.get((text, value.text))
      if node is not None:
        self._assign_node(text, Node(value.text, {}), None, line)
        return
      if field is not None:
        self.set_field(field, value, line, text)
        return
    raise values.UntranslatableError(f"no counterpart of {text}")

  def _assign_node(
    self, text: str, made: Node, field: task_tables.Field | None, line: int
  ) -> None:
    name = made.cls.rpartition(".")[2]
    known = None
    for key in ((text, name), (text, "*"), ("*", name)):
      known = known or task_tables.NODES.get(key)
    if known is None:
      if field is None:
        raise values.UntranslatableError(f"no counterpart of {text} = {name}")
      self.set_field(
        field, Code(ast.parse(made.cls, mode="eval").body), line, text
      )
      known = task_tables.Node()
    if known.unsupported:
      raise values.UntranslatableError(known.unsupported)
    for knob, code in known.sets.items():
      self._put(knob, code, line)
    self._mix(known.mixin)
    problems = []
    for field_name, value in made.fields.items():
      try:
        if field_name in known.fields and isinstance(value, Code):
          where = f"{text}.{field_name}"
          self.set_field(known.fields[field_name], value, line, where)
        elif field_name != "name":
          self._assign_path(_field(Path(text), field_name), value, line)
      except values.UntranslatableError as error:
        problems.append(str(error))
    if problems:
      raise values.UntranslatableError("; ".join(problems))

  def set_field(
    self, field: task_tables.Field, value: Code, line: int, path: str = ""
  ) -> None:
    """Sets the knob of a field."""
    self._mix(field.mixin)
    code = value.text
    if not field.knob:
      name = code.removeprefix("self.")
      if name in self.constants and not self.constants[name].knob:
        # Reported where it is assigned.
        return
      field.convert(values.Value(code, values.evaluate(code, {})))
      self.effects.notes.append((line, f"{path}: {field.note}"))
      return
    if self._is_constant(field, code, field.convert):
      return
    given = values.Value(code, values.evaluate(code, {}))
    converted = values.convert_branches(field.convert, given)
    if converted and not self._is_constant(field, converted, values.same):
      self._put(field.knob, converted, line)

  def _is_constant(
    self, field: task_tables.Field, code: str, convert: values.Convert
  ) -> bool:
    """Whether the value is a constant that has the knob's name here."""
    name = code.removeprefix("self.")
    if not code.startswith("self.") or not name.isidentifier():
      return False
    if name not in self.constants:
      self.effects.aliases.setdefault(name, Alias(field.knob, convert))
    elif self.constants[name].knob != field.knob:
      return False
    # The constant is the knob, unless a statement before set another value.
    self.effects.knobs.pop(field.knob, None)
    return True

  def _put(self, knob: str, code: str, line: int) -> None:
    self.effects.knobs[knob] = code
    self.effects.lines[knob] = line

  def _mix(self, mixin: str) -> None:
    if mixin and mixin not in self.effects.mixins:
      self.effects.mixins.append(mixin)

  def _problem(self, statement: ast.stmt, reason: str) -> None:
    self.effects.problems.append(
      Problem(statement.lineno, ast.unparse(statement), reason)
    )


class _Substitution(ast.NodeTransformer):
  """Replaces local names by their values."""

  def __init__(self, run: Run, env: _Env) -> None:
    self._run, self._env = run, env

  def visit_Name(self, node: ast.Name) -> ast.AST:
    if node.id not in self._env:
      return node
    value = self._env[node.id]
    if isinstance(value, Code):
      return copy.deepcopy(value.tree)
    if isinstance(value, Owner):
      return ast.Name("self", ast.Load())
    raise _NotCodeError

  def visit_Call(self, node: ast.Call) -> ast.AST:
    value = self._run.resolve(node, self._env)
    if isinstance(value, Code):
      return value.tree
    raise _NotCodeError


def _field(owner: Path, name: str) -> Path:
  """Returns the path of a field, with the short names of the tables."""
  text = f"{owner.text}.{name}"
  if f".{name}" in task_tables.SAME_LAYER:
    return owner
  for path, short in task_tables.SHORT:
    if text == path:
      return Path(short)
  # Paths of short names are those of the longer ones.
  for path, short in task_tables.SHORT:
    for longer, prefix in task_tables.SHORT:
      if path.startswith(f"{longer}.") and text == prefix + path[len(longer) :]:
        return Path(short)
  return Path(text)


def _is_tree(value: Any) -> bool:
  return isinstance(value, Path | Node)
