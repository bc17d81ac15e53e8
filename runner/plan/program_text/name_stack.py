"""Module of an operation, from JAX's name stack.

The compiled text carries the name stack as `op_name`. Where the compiler joined
operations, it lists what differs in parentheses: `a/b/(c/dot:d/mul)`.
"""

import fractions
import itertools
import re

from paxon.layers.moe import grouped_matmul
from paxon.quantization import scopes

_TRANSFORM = re.compile(
  r"\b(?:jvp|transpose|vmap|custom_jvp|custom_vjp|remat|checkpoint)\("
)
# The branch of a mixture of experts whose counts fit into its buffers.
_USUAL = "usual_branch"
# What moves tokens to the devices of their experts and back.
_EXPERT_PARALLEL = "expert_parallel"
_ALL = fractions.Fraction(1)
# Names that JAX adds for control flow, and quantized matmuls for a plan.
_NO_PARTS = frozenset(
  (
    "",
    "body",
    "checkpoint",
    "closed_call",
    "cond",
    "eval_jaxpr",
    "remat",
    "rematted_computation",
    "scan",
    "shard_map",
    _EXPERT_PARALLEL,
    _USUAL,
    "while",
    *scopes.DESCRIPTIONS,
  )
)
_QUANTIZED = re.compile("|".join(scopes.DESCRIPTIONS))
# Number of executions of a pipeline that are on a microbatch.
LIVE = re.compile(r"\blive_(\d+)_of_(\d+)\b")
_USED_ROWS = re.compile(r"\brows_(\d+)_of_(\d+)\b")
_OTHER_SCOPE = re.compile(r"(?:live|rows)_\d+_of_\d+|branch_\d+_fun")
_FOURIER = re.compile(r"(?:/|^)(?:jit\(fft\)|fft)$")
_GROUPED = re.compile(
  rf"\bp?jit\((?:{grouped_matmul.PRODUCT}|{grouped_matmul.GROUPED_MATMUL_TRANSPOSED})\)"
)


def part(stack: str) -> str:
  """Returns the path of modules, such as `DecoderLm/stack/layers/blocks_0`.

  Transforms, methods, einsums, control flow, repetitions and the operation
  itself are left out.
  """
  begin = _begin_of_list(stack)
  if begin is None:
    return module(stack.rpartition("/")[0])
  paths = [
    module(f"{stack[:begin]}{text}".rpartition("/")[0]).split("/")
    for text in _alternatives(stack[begin + 1 : -1])
  ]
  shared = itertools.takewhile(
    lambda names: len(set(names)) == 1, zip(*paths, strict=False)
  )
  return "/".join(names[0] for names in shared)


def module(stack: str) -> str:
  """Returns `part` of a stack that does not end with an operation."""
  names: list[str] = []
  # Operations inside a kernel belong to its layer.
  for piece in _GROUPED.split(stack, maxsplit=1)[0].split("/"):
    if piece.startswith(("jit(", "pjit(")):
      continue
    name = _TRANSFORM.sub("", piece).replace(")", "").partition(".")[0]
    skipped = "->" in piece or name in _NO_PARTS
    skipped = skipped or _OTHER_SCOPE.fullmatch(name)
    if not skipped and (not names or names[-1] != name):
      names.append(name)
  # A model's name comes back where transforms are nested.
  return "/".join(dict.fromkeys(names))


def is_backward(stack: str) -> bool:
  """Returns whether an operation is of the backward pass."""
  return "transpose(" in stack


def is_recomputed(stack: str) -> bool:
  """Returns whether an operation is done again for the backward pass."""
  return "rematted_computation" in stack


def is_grouped(stack: str) -> bool:
  """Returns whether an operation is part of a grouped matmul."""
  return _GROUPED.search(stack) is not None


def is_fourier(stack: str) -> bool:
  """Returns whether an operation is a Fourier transform."""
  return _FOURIER.search(stack) is not None


def used_rows(stack: str) -> fractions.Fraction:
  """Returns the share of a grouped matmul's rows that is not padding."""
  found = _USED_ROWS.search(stack)
  return fractions.Fraction(*map(int, found.groups())) if found else _ALL


def is_usual(stack: str) -> bool:
  """Returns whether an operation is of a branch that a plan assumes."""
  return _USUAL in stack


def is_expert_parallel(stack: str) -> bool:
  """Returns whether an operation moves tokens to experts by intention."""
  return _EXPERT_PARALLEL in stack


def find_quantized(stack: str) -> str:
  """Returns which matmul of a quantized einsum an operation is.

  Args:
    stack: Of the operation.

  Returns:
    `forward`, `input gradient` or `weight gradient`; empty for any other
    operation. Of several that the compiler joined, the first.
  """
  found = _QUANTIZED.search(stack)
  return scopes.DESCRIPTIONS[found[0]] if found else ""


def _begin_of_list(stack: str) -> int | None:
  """Where the parenthesis of a list of operations opens, at the end."""
  if not stack.endswith(")"):
    return None
  depth = 0
  for i in reversed(range(len(stack))):
    depth += (stack[i] == ")") - (stack[i] == "(")
    if not depth:
      # `jvp(` and the like are transforms.
      return i if not i or stack[i - 1] == "/" else None
  return None


def _alternatives(text: str) -> list[str]:
  """Splits at colons outside of brackets."""
  found, depth, begin = [], 0, 0
  for i, char in enumerate(text):
    if char == "(":
      depth += 1
    elif char == ")":
      depth -= 1
    elif char == ":" and not depth:
      found.append(text[begin:i])
      begin = i + 1
  return [*found, text[begin:]]
