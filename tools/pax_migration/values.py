"""Conversions of values of Pax: from a source text to ours.

A conversion takes the expression's source and, if it is known without running
the module, its value. It raises `UntranslatableError` with the reason.
"""

import ast
from collections.abc import Callable, Iterator, Mapping, Sequence
import math
from typing import Any, Final, NamedTuple


class _Unknown:
  """The value of an expression that only a run of the module would show."""

  def __repr__(self) -> str:
    return "UNKNOWN"


UNKNOWN: Final = _Unknown()

_FUNCTIONS: Final[Mapping[str, Callable[..., Any]]] = {
  "abs": abs,
  "float": float,
  "int": int,
  "len": len,
  "list": list,
  "max": max,
  "min": min,
  "prod": math.prod,
  "round": round,
  "sum": sum,
  "tuple": tuple,
}
_ALLOWED: Final = (
  ast.BinOp,
  ast.BoolOp,
  ast.Call,
  ast.Compare,
  ast.Constant,
  ast.Expression,
  ast.IfExp,
  ast.Slice,
  ast.List,
  ast.Load,
  ast.Name,
  ast.Subscript,
  ast.Tuple,
  ast.UnaryOp,
  ast.boolop,
  ast.cmpop,
  ast.operator,
  ast.unaryop,
)
# `2**10**9` must not keep the tool busy.
_LARGEST_EXPONENT: Final = 64


class UntranslatableError(ValueError):
  """A construct without a counterpart; the message is the reason."""


class Value(NamedTuple):
  """An expression.

  Attributes:
    code: Its source.
    value: Its value, or `UNKNOWN`.
  """

  code: str
  value: Any = UNKNOWN


Convert = Callable[[Value], str]


def evaluate(code: str, scope: Mapping[str, Any]) -> Any:
  """Returns the value of an expression of constants, or `UNKNOWN`.

  Args:
    code: Source of the expression; attributes of `self` and `cls` are names.
    scope: Values of names.
  """
  try:
    tree = ast.parse(code.strip(), mode="eval")
  except SyntaxError:
    return UNKNOWN
  tree = ast.fix_missing_locations(_NameSelf().visit(tree))
  for node in ast.walk(tree):
    if not isinstance(node, _ALLOWED):
      return UNKNOWN
    name = getattr(node, "id", "len")
    if scope.get(name, _FUNCTIONS.get(name, UNKNOWN)) is UNKNOWN:
      return UNKNOWN
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
      power = getattr(node.right, "value", None)
      if not isinstance(power, int | float) or abs(power) > _LARGEST_EXPONENT:
        return UNKNOWN
  names = {"__builtins__": {}, **_FUNCTIONS, **scope}
  try:
    return eval(compile(tree, "<constant>", "eval"), names)
  except Exception:
    return UNKNOWN


class _NameSelf(ast.NodeTransformer):
  """Turns `self.X`, `cls.X` and `np.prod` into names."""

  def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
    owner = ast.unparse(node.value)
    is_function = owner in ("np", "math") and node.attr in _FUNCTIONS
    if owner in ("self", "cls") or is_function:
      return ast.Name(node.attr, ast.Load())
    return self.generic_visit(node)


def convert_branches(convert: Convert, given: Value) -> str:
  """Applies a conversion to each branch of a conditional expression."""
  try:
    tree = ast.parse(given.code.strip(), mode="eval").body
  except SyntaxError:
    return convert(given)
  if not isinstance(tree, ast.IfExp):
    return convert(given)
  parts = [
    convert_branches(convert, Value(text, evaluate(text, {})))
    if not text.startswith("super().")
    else text
    for text in map(ast.unparse, (tree.body, tree.orelse))
  ]
  return f"{parts[0]} if {ast.unparse(tree.test)} else {parts[1]}"


def same(given: Value) -> str:
  """Returns the expression unchanged."""
  return given.code


def positive(given: Value) -> str:
  """Returns None for numbers that are not positive, which disable a cap."""
  if given.value is not UNKNOWN and (given.value is None or given.value <= 0):
    return "None"
  return given.code


def more_than_one(given: Value) -> str:
  """Returns nothing for 1, the layers of one repetition."""
  return "" if given.value == 1 else given.code


def steps(given: Value) -> str:
  """Returns a number of steps, which must be positive."""
  if given.value is not UNKNOWN and not given.value:
    raise UntranslatableError(
      "training has at least one step; --mode=eval evaluates without training"
    )
  return given.code


def nonzero(default: float) -> Convert:
  """Returns a conversion of 0 and None, which Pax replaced by its default."""

  def convert(given: Value) -> str:
    if given.value is not UNKNOWN and not given.value:
      return repr(default)
    return given.code

  return convert


def map_name(kind: str, names: Mapping[str, str]) -> Convert:
  """Returns a conversion by the last name of a dotted path or a text."""

  def convert(given: Value) -> str:
    if given.value is None:
      return "None"
    text = given.value if isinstance(given.value, str) else given.code
    name = text.strip().removesuffix("()").rpartition(".")[2]
    if name not in names:
      raise UntranslatableError(f"{kind} {given.code} has no counterpart")
    return names[name]

  return convert


def switch(on: str, off: str) -> Convert:
  """Returns a conversion of a switch to one of two values."""

  def convert(given: Value) -> str:
    if given.value is UNKNOWN:
      return f"{on} if {given.code} else {off}"
    return on if given.value else off

  return convert


def only(*expected: object, why: str) -> Convert:
  """Returns a conversion to nothing, of values that hold here anyway."""

  def convert(given: Value) -> str:
    if not any(given.value == each for each in expected):
      raise UntranslatableError(why)
    return ""

  return convert


def inside(function: str, convert_argument: Convert = same) -> Convert:
  """Returns a conversion of the first argument of a call of `function`."""

  def convert(given: Value) -> str:
    tree = ast.parse(given.code.strip(), mode="eval").body
    name = ast.unparse(tree.func) if isinstance(tree, ast.Call) else ""
    if name.rpartition(".")[2] != function or not isinstance(tree, ast.Call):
      raise UntranslatableError(f"only {function}(...) has a counterpart")
    arguments = [*tree.args, *(each.value for each in tree.keywords)]
    text = ast.unparse(arguments[0])
    return convert_argument(Value(text, evaluate(text, {})))

  return convert


def total(given: Value) -> str:
  """Returns the sum of the values of a dict."""
  tree = ast.parse(given.code.strip(), mode="eval").body
  if not isinstance(tree, ast.Dict):
    raise UntranslatableError("only a dict of lengths has a counterpart")
  number, terms = 0, []
  for sign, term in _split_sum(tree.values):
    if isinstance(term, ast.Constant) and isinstance(term.value, int):
      number += sign * term.value
    else:
      terms.append(f"{'+' if sign > 0 else '-'} {ast.unparse(term)}")
  if number or not terms:
    terms.append(f"{'+' if number >= 0 else '-'} {abs(number)}")
  return " ".join(terms).removeprefix("+ ")


def _split_sum(
  nodes: Sequence[ast.expr], sign: int = 1
) -> Iterator[tuple[int, ast.expr]]:
  """Yields the terms of sums and differences with their signs."""
  for node in nodes:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
      yield from _split_sum([node.left], sign)
      right = -sign if isinstance(node.op, ast.Sub) else sign
      yield from _split_sum([node.right], right)
    else:
      yield sign, node


def map_call(names: Mapping[str, str]) -> Convert:
  """Returns a conversion of a call by the name of the function."""
  convert_name = map_name("the function", names)

  def convert(given: Value) -> str:
    tree = ast.parse(given.code.strip(), mode="eval").body
    if not isinstance(tree, ast.Call):
      raise UntranslatableError(f"{given.code} is not a call")
    return convert_name(Value(ast.unparse(tree.func)))

  return convert


def in_tuple(given: Value) -> str:
  """Returns a tuple with the value."""
  return f"({given.code},)"


def to_mesh(ici: Any, dcn: Any, *, has_stages: bool, has_experts: bool) -> str:
  """Returns our mesh for Pax's shapes.

  Args:
    ici: Sizes of the axes in a slice.
    dcn: Sizes between slices, or None.
    has_stages: Whether the first axis is that of the pipeline.
    has_experts: Whether the axis before the last one is that of experts.

  Raises:
    UntranslatableError: The shapes are not known, or have other axes.
  """
  axes = ["data", "fsdp", "tensor"]
  if has_stages:
    axes.insert(0, "stage")
  if has_experts:
    axes.insert(-1, "expert")
  parts = []
  for prefix, shape in (("", ici), ("dcn.", dcn)):
    if shape is None:
      continue
    if shape is UNKNOWN or not all(isinstance(n, int) for n in shape):
      raise UntranslatableError("the shape of the mesh is not known")
    if prefix and math.prod(shape) == 1:
      continue
    if len(shape) != len(axes):
      raise UntranslatableError(
        f"{list(shape)} has {len(shape)} axes, but {', '.join(axes)} are"
        f" {len(axes)}"
      )
    parts += [
      f"{prefix}{a}={n}" for a, n in zip(axes, shape, strict=True) if n > 1
    ]
  return ",".join(parts) or "fsdp=1"
