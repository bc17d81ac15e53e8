"""Targets of a BUILD file in our style, read with Python's own parser.

A BUILD file here is a list of calls whose arguments are literals. Names bound
to literals at the top, `+` and `select` (every branch counts) are understood;
anything computed is an error, because it would hide an edge.
"""

import ast
from collections.abc import Mapping
import dataclasses

TEST_KINDS = frozenset({"py_test"})
PYTHON_KINDS = TEST_KINDS | {"py_library", "py_binary", "paxon_main"}

# Calls that make no target.
_NO_TARGET = frozenset({"load", "package", "exports_files", "licenses"})
_PUBLIC = "//visibility:public"

# Arguments that a macro fills in.
_DEFAULTS: Mapping[str, Mapping[str, object]] = {
  "paxon_main": {"deps": ["//runner:lib"]},
}


class BuildFileError(ValueError):
  """A BUILD file holds something that only Bazel can evaluate."""

  def __init__(self, line: int, message: str) -> None:
    super().__init__(message)
    self.line = line


@dataclasses.dataclass(frozen=True)
class Target:
  """One rule of a BUILD file.

  Attributes:
    label: `//package:name`.
    kind: The rule or macro, such as `py_library`.
    package: The folder of the BUILD file, empty for the root.
    line: Where it begins.
    srcs: Source files, relative to the package.
    deps: Full labels of its sources' imports.
    runtime_deps: Full labels of modules imported by name at run time.
    optional: The `deps` that only a setting other than the default adds.
    visibility: Labels as written, or the package's default.
    has_size: Whether it sets `size`.
    testonly: Whether it sets `testonly`, or is a test.
  """

  label: str
  kind: str
  package: str
  line: int
  srcs: tuple[str, ...] = ()
  deps: tuple[str, ...] = ()
  runtime_deps: tuple[str, ...] = ()
  optional: frozenset[str] = frozenset()
  visibility: tuple[str, ...] = ()
  has_size: bool = False
  testonly: bool = False

  @property
  def name(self) -> str:
    """The part of the label after the colon."""
    return self.label.rpartition(":")[2]

  @property
  def build_path(self) -> str:
    """The path of the BUILD file."""
    return f"{self.package}/BUILD".lstrip("/")

  @property
  def edges(self) -> tuple[str, ...]:
    """All direct dependencies."""
    return self.deps + self.runtime_deps

  @property
  def is_test(self) -> bool:
    """Whether `bazel test` runs it."""
    return self.kind in TEST_KINDS

  @property
  def is_python(self) -> bool:
    """Whether its sources are Python."""
    return self.kind in PYTHON_KINDS

  @property
  def is_public(self) -> bool:
    """Whether another repository may use it."""
    return _PUBLIC in self.visibility and not self.is_test

  def source_paths(self) -> tuple[str, ...]:
    """Returns the sources, relative to the workspace."""
    return tuple(f"{self.package}/{src}".lstrip("/") for src in self.srcs)


def full_label(label: str, package: str) -> str:
  """Returns `label` as `//package:name` or `@repository//package:name`."""
  if label.startswith(":"):
    return f"//{package}{label}"
  if "//" not in label:
    return f"//{package}:{label}"
  repository, _, rest = label.partition("//")
  if ":" not in rest:
    rest = f"{rest}:{rest.rpartition('/')[2]}"
  return f"{repository}//{rest}"


def parse(text: str, package: str) -> list[Target]:
  """Returns the targets of a BUILD file.

  Raises:
    BuildFileError: It is not a list of calls with literal arguments.
  """
  try:
    tree = ast.parse(text)
  except SyntaxError as error:
    raise BuildFileError(error.lineno or 0, f"syntax: {error.msg}") from error
  names: dict[str, object] = {}
  default_visibility: list[str] = []
  targets = []
  for statement in tree.body:
    match statement:
      case ast.Assign(targets=[ast.Name(id=name)], value=value):
        names[name] = _literal(value, names)
      case ast.Expr(value=ast.Constant()):
        pass  # A docstring.
      case ast.Expr(value=ast.Call(func=ast.Name(id="package")) as call):
        arguments = _arguments(call, names)
        default_visibility = _strings(arguments, "default_visibility", call)
      case ast.Expr(value=ast.Call(func=ast.Name(id=kind)) as call):
        if kind not in _NO_TARGET:
          targets.append(
            _target(kind, call, package, names, default_visibility)
          )
      case _:
        raise BuildFileError(
          statement.lineno,
          "a BUILD file holds only calls of rules with literal arguments;"
          " write the targets out.",
        )
  return targets


def _target(
  kind: str,
  call: ast.Call,
  package: str,
  names: dict[str, object],
  default_visibility: list[str],
) -> Target:
  """Returns the target that one call of a rule makes."""
  arguments = {**_DEFAULTS.get(kind, {}), **_arguments(call, names)}
  name = arguments.get("name")
  if not isinstance(name, str):
    raise BuildFileError(call.lineno, f"{kind} needs a literal name.")

  def labels(key: str) -> tuple[str, ...]:
    values = _strings(arguments, key, call)
    return tuple(full_label(value, package) for value in values)

  return Target(
    label=f"//{package}:{name}",
    kind=kind,
    package=package,
    line=call.lineno,
    srcs=tuple(_strings(arguments, "srcs", call)),
    deps=labels("deps"),
    # The experiments of a main are imported when one is asked for by name.
    runtime_deps=labels("runtime_deps") + labels("experiments"),
    optional=frozenset(
      full_label(label, package) for label in _optional(call, names)
    ),
    visibility=tuple(
      _strings(arguments, "visibility", call) or default_visibility
    ),
    has_size="size" in arguments,
    testonly=bool(arguments.get("testonly")) or kind in TEST_KINDS,
  )


def _arguments(call: ast.Call, names: dict[str, object]) -> dict[str, object]:
  if call.args or any(keyword.arg is None for keyword in call.keywords):
    raise BuildFileError(call.lineno, "name every argument of a rule.")
  return {
    str(keyword.arg): _literal(keyword.value, names)
    for keyword in call.keywords
  }


def _strings(
  arguments: dict[str, object], key: str, call: ast.Call
) -> list[str]:
  value = arguments.get(key, [])
  if not isinstance(value, list) or not all(
    isinstance(item, str) for item in value
  ):
    raise BuildFileError(call.lineno, f"{key} must be a list of strings.")
  return value


def _literal(node: ast.expr, names: dict[str, object]) -> object:
  """Returns the value of a literal expression."""
  match node:
    case ast.Constant(value=value):
      return value
    case ast.Name(id=name) if name in names:
      return names[name]
    case ast.List(elts=items) | ast.Tuple(elts=items):
      return [_literal(item, names) for item in items]
    case ast.Dict(keys=keys, values=values):
      return {
        str(_literal(key, names)): _literal(value, names)
        for key, value in zip(keys, values, strict=True)
        if key is not None
      }
    case ast.BinOp(op=ast.Add(), left=left, right=right):
      first, second = _literal(left, names), _literal(right, names)
      if isinstance(first, list) and isinstance(second, list):
        return first + second
      if isinstance(first, str) and isinstance(second, str):
        return first + second
    case ast.Call(func=ast.Name(id="select"), args=[branches]):
      return _union(_literal(branches, names), node.lineno)
    case ast.Call(func=ast.Name(id="glob")):
      raise BuildFileError(node.lineno, "glob hides files; list them.")
  raise BuildFileError(
    node.lineno, f"`{ast.unparse(node)}` is computed; write it out."
  )


def _optional(call: ast.Call, names: dict[str, object]) -> set[str]:
  """Returns the deps that are not in the default branch of a select."""
  found: set[str] = set()
  for keyword in call.keywords:
    for node in ast.walk(keyword.value) if keyword.arg == "deps" else ():
      match node:
        case ast.Call(func=ast.Name(id="select"), args=[argument]):
          branches = _literal(argument, names)
          assert isinstance(branches, dict)  # It was read as a union before.
          usual = branches.get("//conditions:default", [])
          found.update(*branches.values())
          found.difference_update(usual)
  return found


def _union(branches: object, line: int) -> list[object]:
  """Returns the union of the branches of a select."""
  if not isinstance(branches, dict):
    raise BuildFileError(line, "select needs a literal dict.")
  union: list[object] = []
  for values in branches.values():
    if not isinstance(values, list):
      raise BuildFileError(line, "select may choose between lists only.")
    union += [value for value in values if value not in union]
  return union
