"""A compiled program as computations and instructions, parsed from its text.

Only what a plan needs: names, types, opcodes, operands by name, and attributes
as text. Types nest parentheses in layouts and hold comments in tuples, so
brackets are matched; nothing is split at a comma alone.
"""

from collections.abc import Iterator, Mapping
import dataclasses
import functools
import math
import re
from typing import Final

_OPEN, _CLOSE = "([{", ")]}"
_BRACKET = re.compile(r"[()\[\]{}]")
_BRACKET_OR_COMMA = re.compile(r"[()\[\]{},]")
_BRACKET_OR_SPACE = re.compile(r"[()\[\]{} ]")
_BRACKET_COMMA_OR_QUOTE = re.compile(r'[()\[\]{},"]')
_OPCODE = re.compile(r"\s*([\w\-]+)\(")
_COMMENT = re.compile(r"/\*.*?\*/")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) (?:\(.*\) -> .*)?\{\s*$")
# A computation may end with the name of the core that runs it.
_END = re.compile(r"^\}(?:, execution_thread=\"[^\"]*\")?\s*$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$")
_ARRAY = re.compile(r"^(\w+)\[([\d,<=]*)\](?:\{(.*)\})?$")
_SPACE = re.compile(r"S\((\d+)\)")

# Bits of an element; what is not here is a token or an opaque value.
_BITS = {
  "pred": 8, "s2": 2, "u2": 2, "s4": 4, "u4": 4, "s8": 8, "u8": 8,
  "s16": 16, "u16": 16, "s32": 32, "u32": 32, "s64": 64, "u64": 64,
  "f4e2m1fn": 4, "f8e3m4": 8, "f8e4m3": 8, "f8e4m3fn": 8, "f8e4m3b11fnuz": 8,
  "f8e4m3fnuz": 8, "f8e5m2": 8, "f8e5m2fnuz": 8, "f8e8m0fnu": 8, "f16": 16,
  "bf16": 16, "f32": 32, "f64": 64, "c64": 64, "c128": 128,
}  # fmt: skip


# Attributes that name computations. Those of a conditional stay in this order.
_CALLS = (
  "calls",
  "to_apply",
  "called_computations",
  "condition",
  "body",
  "branch_computations",
  "true_computation",
  "false_computation",
)
# `fusion-start` is the short form of an `async-start` of one fusion.
FUSIONS = ("fusion", "fusion-start", "async-start")
_RUN_CALLS = frozenset(("async", "call", "conditional", "fusion", "while"))
# Their computations combine two elements: a sum, a maximum, an order.
_COMBINE = frozenset(
  (
    "all-reduce",
    "map",
    "reduce",
    "reduce-scatter",
    "reduce-window",
    "scatter",
    "select-and-scatter",
    "sort",
    "topk",
  )
)


# Number of the memory space of the host.
HOST_SPACE: Final = 5


class ParseError(ValueError):
  """A text that is not understood."""


@dataclasses.dataclass(frozen=True)
class Type:
  """The type of a value: an array, or a tuple of types.

  Attributes:
    dtype: HLO's name of the element type; empty for a tuple.
    shape: Sizes; empty for a tuple.
    elements: Types of a tuple's elements.
    memory_space: Number in `S(n)`; 0 is the device's main memory.
  """

  dtype: str
  shape: tuple[int, ...] = ()
  elements: tuple["Type", ...] = ()
  memory_space: int = 0

  @property
  def bits(self) -> int:
    """Bits of an element; 0 for a tuple, a token or an opaque value."""
    return _BITS.get(self.dtype, 0)

  @functools.cached_property
  def size(self) -> int:
    """Number of elements; 1 for a scalar and for other types."""
    return math.prod(self.shape)

  @functools.cached_property
  def num_bytes(self) -> int:
    """Size without padding."""
    if self.elements:
      return sum(element.num_bytes for element in self.elements)
    return -(-self.size * self.bits // 8)

  @functools.cached_property
  def leaves(self) -> tuple["Type", ...]:
    """The arrays in it, tuples flattened."""
    if not self.elements:
      return (self,)
    return tuple(leaf for element in self.elements for leaf in element.leaves)


@dataclasses.dataclass(frozen=True)
class Instruction:
  """One instruction.

  Attributes:
    name: Its name, without the percent sign.
    type: Of its value.
    opcode: As HLO writes it, such as `all-gather-start`.
    operands: Names of other instructions; a constant's or parameter's text.
    attributes: The text behind the operands.
  """

  name: str
  type: Type
  opcode: str
  operands: tuple[str, ...]
  attributes: str

  def attribute(self, name: str) -> str | None:
    """Returns the text of one attribute, brackets included."""
    text, wanted = self.attributes, f"{name}="
    begin = text.find(wanted)
    while begin > 0 and text[begin - 2 : begin] != ", ":
      begin = text.find(wanted, begin + 1)
    return None if begin < 0 else _value(text[begin + len(wanted) :])

  def get_called(self, name: str) -> tuple[str, ...]:
    """Returns the computations that an attribute names."""
    text = self.attribute(name) or ""
    return tuple(re.findall(r"[\w.\-]+", text))

  @functools.cached_property
  def runs(self) -> tuple[str, ...]:
    """Names of the computations that it executes.

    Functions that combine two elements are left out. Any other instruction that
    calls a computation executes it, of a known opcode or not.
    """
    opcode = self.opcode.removesuffix("-start")
    if opcode in _COMBINE or opcode.endswith(("-done", "-update")):
      return ()
    return tuple(name for text in _CALLS for name in self.get_called(text))

  @property
  def is_unknown_call(self) -> bool:
    """Whether it executes computations in a way that is not known."""
    opcode = self.opcode.removesuffix("-start")
    return opcode not in _RUN_CALLS and bool(self.runs)

  @property
  def op_name(self) -> str:
    """JAX's name stack."""
    _, found, rest = self.attributes.partition('op_name="')
    return rest.partition('"')[0] if found else ""


@dataclasses.dataclass(frozen=True)
class Computation:
  """A named list of instructions, in the order of execution."""

  name: str
  instructions: Mapping[str, Instruction]
  root: Instruction


@dataclasses.dataclass(frozen=True)
class Program:
  """All computations of a module."""

  entry: Computation
  computations: Mapping[str, Computation]

  @functools.cached_property
  def callers(self) -> Mapping[str, list[tuple[Computation, Instruction]]]:
    """Where each computation is called; functions of reductions are not."""
    found: dict[str, list[tuple[Computation, Instruction]]] = {}
    for computation in self.computations.values():
      for instruction in computation.instructions.values():
        for name in instruction.runs:
          found.setdefault(name, []).append((computation, instruction))
    return found


def parse(text: str) -> Program:
  """Parses what `jax.stages.Compiled.as_text()` returns.

  Raises:
    ParseError: There is no entry computation, or a line has another form.
  """
  computations: dict[str, Computation] = {}
  entry = None
  lines = iter(text.splitlines())
  for line in lines:
    header = _HEADER.match(line)
    if header is None:
      continue
    body: dict[str, Instruction] = {}
    root = None
    for line in _body(lines):
      match = _INSTRUCTION.match(line)
      if match is None:
        raise ParseError(f"Not an instruction: {line[:120]!r}.")
      instruction = _instruction(match[2], match[3])
      body[instruction.name] = instruction
      if match[1] or root is None:
        root = instruction
    if root is None:
      raise ParseError(f"The computation {header[2]} is empty.")
    computation = Computation(header[2], body, root)
    computations[header[2]] = computation
    if header[1]:
      entry = computation
  if entry is None:
    raise ParseError("The text has no ENTRY computation.")
  return Program(entry, computations)


def _body(lines: Iterator[str]) -> Iterator[str]:
  """Yields the lines of a computation, joined with their continuation lines.

  The metadata of a Pallas kernel holds line breaks; what follows one is not
  indented, as instructions are.
  """
  held = ""
  for line in lines:
    if _END.match(line):
      break
    if line[:1].isspace() or not held:
      if held.strip():
        yield held
      held = line
    else:
      held += " " + line
  if held.strip():
    yield held


def _instruction(name: str, text: str) -> Instruction:
  if "/*" in text:
    text = _COMMENT.sub("", text)
  end = _end_of_type(text)
  match = _OPCODE.match(text, end)
  if match is None:
    raise ParseError(f"No opcode in {name} = {text[:120]!r}.")
  start = match.end()
  stop = _matching(text, start - 1)
  operands = tuple(
    part.strip().rpartition(" ")[2].removeprefix("%")
    for part in _split(text[start:stop])
  )
  return Instruction(
    name=name,
    type=parse_type(text[:end]),
    opcode=match[1],
    operands=operands,
    attributes=text[stop + 1 :].removeprefix(", "),
  )


def _end_of_type(text: str) -> int:
  """Where a leading type ends: the first space outside of brackets."""
  depth = 0
  for match in _BRACKET_OR_SPACE.finditer(text):
    char = match[0]
    if char in _OPEN:
      depth += 1
    elif char in _CLOSE:
      depth -= 1
    elif not depth:
      return match.start()
  raise ParseError(f"No instruction in {text[:120]!r}.")


def _matching(text: str, start: int) -> int:
  """The position of the bracket that closes the one at `start`."""
  depth = 0
  for match in _BRACKET.finditer(text, start):
    depth += 1 if match[0] in _OPEN else -1
    if not depth:
      return match.start()
  raise ParseError(f"Brackets do not match in {text[:120]!r}.")


def _split(text: str) -> list[str]:
  """Splits at commas outside of brackets."""
  parts, depth, begin = [], 0, 0
  for match in _BRACKET_OR_COMMA.finditer(text):
    char = match[0]
    if char in _OPEN:
      depth += 1
    elif char in _CLOSE:
      depth -= 1
    elif not depth:
      parts.append(text[begin : match.start()])
      begin = match.end()
  parts.append(text[begin:])
  return [part for part in parts if part.strip()]


def _value(text: str) -> str:
  """The attribute's value at the beginning of `text`."""
  depth, quoted = 0, False
  for match in _BRACKET_COMMA_OR_QUOTE.finditer(text):
    char, i = match[0], match.start()
    if char == '"' and text[i - 1 : i] != "\\":
      quoted = not quoted
    elif quoted:
      continue
    elif char in _OPEN:
      depth += 1
    elif char in _CLOSE:
      depth -= 1
    elif char == "," and not depth:
      return text[:i]
  return text


@functools.lru_cache(maxsize=4096)
def parse_type(text: str) -> Type:
  """Parses a type such as `(f32[2,3]{1,0:T(8,128)S(1)}, s32[])`.

  Raises:
    ParseError: The text has another form.
  """
  text = _COMMENT.sub("", text).strip()
  if text.startswith("("):
    return Type("", elements=tuple(map(parse_type, _split(text[1:-1]))))
  match = _ARRAY.match(text)
  if match is None:
    # `token[]` and the like hold no data.
    return Type(text)
  space = _SPACE.search(match[3] or "")
  shape = tuple(int(n.lstrip("<=")) for n in match[2].split(",") if n)
  return Type(match[1], shape, memory_space=int(space[1]) if space else 0)
