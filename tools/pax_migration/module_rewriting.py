"""Rewriting of a module: its imports, functions and classes."""

import ast
import textwrap

import libcst as cst

from paxon.tools.pax_migration import class_rewriting, class_tables, project


def rewrite(
  made: project.Project, file: project.File, package: str = ""
) -> str:
  """Returns the source of a module for Paxon; adds to the project's report.

  Args:
    made: The modules.
    file: One of them.
    package: Import path of the output's folder, where the modules import each
      other; empty if the folder is on the search path.
  """
  return _ModuleRewriter(made, file, package).rewrite()


def find_own_knobs(made: project.Project, gone: set[str]) -> dict[str, str]:
  """Returns annotations of the user's constants that remaining code reads.

  Those that instances read are knobs, with an empty annotation here; others are
  constants of classes.
  """
  own: set[str] = set()
  of_instances: list[str] = []
  of_classes: dict[str, str] = {}
  for cls in made.get_experiments():
    table = made.get_constants(cls)
    own |= set(cls.constants) - set(table) - set(class_tables.SHAPES)
    effects = cls.effects
    of_instances += [*effects.knobs.values(), *effects.constants.values()]
    of_instances += effects.checks
    for node in cls.tree.body:
      is_method = isinstance(node, ast.FunctionDef)
      if is_method and not class_rewriting.find_reason(made, node, gone):
        of_instances.append(ast.unparse(node))
    for name, code in cls.constants.items():
      if name not in class_tables.SHAPES:
        of_classes[f"{cls.name}.{name}"] = code
  found: dict[str, str] = {}
  for code in of_instances:
    names = class_rewriting.find_names(code)
    found.update(dict.fromkeys(own & names, ""))
  size = -1
  while size != len(found):
    size = len(found)
    for key, code in of_classes.items():
      name = key.rpartition(".")[2]
      if name in found or name not in own:
        for each in own & class_rewriting.find_names(code):
          found.setdefault(each, "ClassVar")
  return found


class _ModuleRewriter:
  """The rewriting of one module."""

  def __init__(
    self, made: project.Project, file: project.File, package: str
  ) -> None:
    self._project, self._file, self._package = made, file, package
    self._experiments = {cls.name for cls in made.get_experiments()}
    self._constants = {
      name
      for cls in made.get_experiments()
      for name, known in made.get_constants(cls).items()
      if known.knob
    } | set(class_tables.SHAPES)
    self._gone = self._find_gone()
    self._own = find_own_knobs(made, self._gone)
    self._defined: set[str] = set()
    self._body: list[cst.BaseStatement] = []
    self._pending: list[str] = []
    self._used: set[str] = set()

  def rewrite(self) -> str:
    """Returns the source."""
    for statement in self._file.module.body:
      self._statement(statement)
    module = self._file.module.with_changes(
      body=self._body,
      footer=[
        *self._file.module.footer,
        *(cst.EmptyLine(comment=cst.Comment(t)) for t in self._pending),
      ],
    )
    return self._add_imports(module).code

  def _find_gone(self) -> set[str]:
    """Returns the names that need Pax, directly or not."""
    gone: set[str] = set()
    size = -1
    while size != len(gone):
      size = len(gone)
      for node in self._file.tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
          gone |= self._find_pax_imports(node)
        elif isinstance(node, ast.ClassDef) and node.name in self._experiments:
          continue
        elif class_rewriting.find_names(ast.unparse(node)) & gone or (
          self._find_constant(node)
        ):
          gone |= _bound_names(node)
    return gone

  def _find_constant(self, node: ast.AST) -> str:
    """Returns a constant that code outside of experiments uses, or nothing.

    That is an attribute, a text such as `setattr` takes, or an assignment in a
    class that is not at the top of the module.
    """
    for each in ast.walk(node):
      name = getattr(each, "attr", getattr(each, "value", None))
      if isinstance(each, ast.Attribute | ast.Constant) and (
        isinstance(name, str) and name in self._constants
      ):
        return name
      if isinstance(each, ast.ClassDef):
        for bound in _bound_names(ast.Module(each.body, [])):
          if bound in self._constants:
            return bound
    return ""

  def _find_pax_imports(self, node: ast.Import | ast.ImportFrom) -> set[str]:
    found = set()
    for each in node.names:
      module = getattr(node, "module", None) or each.name
      root = module.partition(".")[0]
      bound = each.asname or each.name.partition(".")[0]
      is_class = each.name in self._project.classes
      if each.name == "*":
        continue
      is_theirs = root in (*project.PAX, *project.INPUTS) and not is_class
      if is_theirs and self._find_file(node, each.name) is None:
        found.add(bound)
    return found

  def _find_file(
    self, node: ast.Import | ast.ImportFrom, name: str
  ) -> project.File | None:
    """Returns the module among ours that an import names, or None."""
    module = getattr(node, "module", None) or ""
    for file in self._project.files:
      if (
        file.name in (name, module.rpartition(".")[2])
        and file is not self._file
      ):
        return file
    return None

  def _statement(self, statement: cst.BaseStatement) -> None:
    line = self._file.get_line(statement)
    if isinstance(statement, cst.ClassDef):
      self._class(statement, line)
      return
    code = _code(statement)
    tree = ast.parse(textwrap.dedent(code))
    if all(isinstance(n, ast.Import | ast.ImportFrom) for n in tree.body):
      self._import(statement, tree, line)
      return
    names = class_rewriting.find_names(code)
    constant = self._find_constant(tree)
    if not names & self._gone and not constant:
      self._keep(statement)
    elif isinstance(statement, cst.FunctionDef) and self._is_followed(
      statement.name.value
    ):
      self._note(line, f"{statement.name.value}(): its effects are knobs")
    elif isinstance(statement, cst.SimpleStatementLine) and _is_name(tree):
      self._note(line, f"{_shorten(code)}: a name of Pax")
    elif constant:
      self._leave(statement, line, f"{constant} is a knob, with another name")
    else:
      self._leave(statement, line, f"it uses {sorted(names & self._gone)[0]}")

  def _is_followed(self, name: str) -> bool:
    for cls in self._project.get_experiments():
      for node in cls.tree.body:
        is_task = isinstance(node, ast.FunctionDef) and node.name == "task"
        if is_task and name in class_rewriting.find_names(ast.unparse(node)):
          return True
    return False

  def _import(
    self, statement: cst.BaseStatement, tree: ast.Module, line: int
  ) -> None:
    """Keeps an import of other code; drops Pax's."""
    kept = []
    for node in tree.body:
      assert isinstance(node, ast.Import | ast.ImportFrom)
      module = getattr(node, "module", None) or ""
      is_pax = module.partition(".")[0] in (*project.PAX, *project.INPUTS)
      is_star = node.names[0].name == "*"
      if is_star and is_pax and self._find_file(node, "*") is None:
        self._leave(statement, line, "import names of Pax one by one")
        return
      names = [
        each
        for each in node.names
        if (each.asname or each.name.partition(".")[0]) not in self._gone
      ]
      if names:
        kept.append((node, names))
      if len(names) < len(node.names):
        dropped = sorted({n.name for n in node.names} - {n.name for n in names})
        self._note(line, f"import of {', '.join(dropped)}")
    for node, names in kept:
      if self._move(node, names):
        continue
      if len(names) == len(node.names) and len(kept) == 1:
        self._keep(statement)
      else:
        node.names = names
        self._keep(cst.parse_statement(ast.unparse(node)))

  def _move(
    self, node: ast.Import | ast.ImportFrom, names: list[ast.alias]
  ) -> bool:
    """Imports modules that are rewritten too from the output's package."""
    root = (getattr(node, "module", None) or node.names[0].name).partition(".")
    if root[0] not in project.PAX or not isinstance(node, ast.ImportFrom):
      return False
    prefix = f"{self._package}." if self._package else ""
    for each in names:
      bound = f" as {each.asname}" if each.asname else ""
      if (file := self._find_file(node, each.name)) is None:
        return False
      if file.name == each.name:
        start = f"from {self._package} " if self._package else ""
        text = f"{start}import {each.name}{bound}"
      else:
        text = f"from {prefix}{file.name} import {each.name}{bound}"
      self._keep(cst.parse_statement(text))
    return True

  def _class(self, node: cst.ClassDef, line: int) -> None:
    name = node.name.value
    cls = self._project.classes[name]
    if name in self._defined:
      self._leave(node, line, f"{name} is defined above, too")
      return
    self._defined.add(name)
    if name in self._experiments and cls.file is self._file:
      rewriter = class_rewriting.ClassRewriter(
        self._project, cls, own=self._own, gone=self._gone
      )
      self._keep(rewriter.rewrite(node))
      self._used |= rewriter.used_modules
      return
    if bases := self._find_pax_bases(cls):
      reason = f"base class {bases[0]}: pass the module that defines it, too"
    elif constant := self._find_constant(cls.tree):
      reason = f"{constant} is a knob, with another name"
    elif class_rewriting.find_names(_code(node)) & self._gone:
      reason = f"{name} is no experiment; rewrite it by hand"
    else:
      self._keep(node)
      return
    self._leave(node, line, reason)

  def _find_pax_bases(self, cls: project.Class) -> list[str]:
    """Returns the bases of a class that are experiments of Pax."""
    modules = {
      each.asname or each.name
      for node in self._file.tree.body
      if isinstance(node, ast.ImportFrom) and ".params" in (node.module or "")
      for each in node.names
    }
    bases = map(ast.unparse, cls.tree.bases)
    return [each for each in bases if each.partition(".")[0] in modules]

  def _keep(self, statement: cst.BaseStatement) -> None:
    lines = [cst.EmptyLine(comment=cst.Comment(t)) for t in self._pending]
    self._pending = []
    old = list(getattr(statement, "leading_lines", ()))
    self._body.append(statement.with_changes(leading_lines=[*old, *lines]))

  def _leave(
    self, statement: cst.BaseStatement, line: int, reason: str
  ) -> None:
    source = _code(statement.with_changes(leading_lines=[]))
    self._pending += class_rewriting.to_comments(reason, source)
    self._project.add(
      self._file, line, f"{reason}: {_shorten(source)}", is_open=True
    )
    for at, hint in class_tables.find_hints(source, line):
      self._project.add(self._file, at, hint, is_open=True)

  def _note(self, line: int, text: str) -> None:
    self._project.add(self._file, line, text, is_open=False)

  def _add_imports(self, module: cst.Module) -> cst.Module:
    """Adds imports of our modules, and removes imports that are unused."""
    names = class_rewriting.find_names(module.code)
    body = []
    bound: set[str] = set()
    place = 0
    for statement in module.body:
      tree = ast.parse(textwrap.dedent(_code(statement)))
      nodes = [
        n for n in tree.body if isinstance(n, ast.Import | ast.ImportFrom)
      ]
      imported = {
        each.asname or each.name.partition(".")[0]
        for node in nodes
        for each in node.names
      }
      if (
        nodes
        and not imported & {*names, "*"}
        and "__future__" not in _code(statement)
      ):
        continue
      bound |= imported
      body.append(statement)
      if nodes or _is_docstring(statement, body):
        place = len(body)
    new = sorted(
      class_tables.IMPORTS[name]
      for name in class_tables.IMPORTS
      if name in names - bound
    )
    added = [cst.parse_statement(text) for text in new]
    if added and place == 1:
      empty = cst.EmptyLine(indent=False)
      added[0] = added[0].with_changes(leading_lines=[empty])
    body[place:place] = added
    return module.with_changes(body=body)


def _bound_names(node: ast.AST) -> set[str]:
  if isinstance(node, ast.FunctionDef | ast.ClassDef):
    return {node.name}
  return {
    each.id
    for each in ast.walk(node)
    if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
  }


def _is_name(tree: ast.Module) -> bool:
  """Whether a statement gives a name of Pax another name."""
  return all(
    isinstance(node, ast.Assign)
    and isinstance(node.value, ast.Attribute | ast.Name)
    for node in tree.body
  )


def _is_docstring(statement: cst.BaseStatement, body: list) -> bool:
  if len(body) > 1 or not isinstance(statement, cst.SimpleStatementLine):
    return False
  return isinstance(statement.body[0], cst.Expr)


def _code(node: cst.CSTNode) -> str:
  return cst.Module([]).code_for_node(node)


def _shorten(source: str) -> str:
  first, _, rest = source.strip().partition("\n")
  return f"{first} ..." if rest else first
