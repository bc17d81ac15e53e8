"""Groups of variables by update rule.

  optimized     gradients go through clipping and the optimizer
  overwritten   the gradient itself is the next value (scales of fp8 training)
  replaced      the forward pass returns the next value (running statistics)
  frozen        never changed

A group is a pruned tree: nested dicts with the same paths that hold only the
group's leaves.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import enum
import re
from typing import Any, TypeAlias

from flax import traverse_util

from paxon.sharding import checks, suggestions, variables

# Nested dicts {collection: {module: ... {variable: VariableSpec}}}.
Specs: TypeAlias = Mapping[str, Any]
# Nested dicts with the same paths and any leaves, such as arrays.
Tree: TypeAlias = Mapping[str, Any]


class Group(enum.Enum):
  """The update rule of a variable in a train step."""

  OPTIMIZED = "optimized"
  OVERWRITTEN = "overwritten"
  REPLACED = "replaced"
  FROZEN = "frozen"


def find_group(spec: variables.VariableSpec) -> Group:
  """Returns the group of one variable."""
  match spec.update:
    case variables.UpdateRule.REPLACE:
      return Group.REPLACED
    case variables.UpdateRule.OVERWRITE_WITH_GRADIENT:
      return Group.OVERWRITTEN if spec.trainable else Group.FROZEN
    case variables.UpdateRule.OPTIMIZER:
      return Group.OPTIMIZED if spec.trainable else Group.FROZEN


def freeze(
  specs: Specs,
  *,
  trainable: Sequence[str] | None = None,
  frozen: Sequence[str] = (),
) -> dict[str, Any]:
  """Returns the specs with the variables of some patterns frozen.

  Frozen variables have no gradient and no optimizer state. Groups other than
  `OPTIMIZED` are unchanged.

  Args:
    specs: Specs of all variables.
    trainable: Regular expressions of the logical names of the variables to
      train, such as `.*/attention/.*`; the whole name must match. `None` trains
      all.
    frozen: Regular expressions of the variables to freeze, also among those of
      `trainable`.

  Raises:
    ValueError: A pattern is not a regular expression or matches no optimized
      variable, or no variable is left to train.
  """
  flat: dict[Any, Any] = traverse_util.flatten_dict(specs)
  optimized = {
    path: spec.name
    for path, spec in flat.items()
    if find_group(spec) is Group.OPTIMIZED
  }
  kept = set(optimized)
  if trainable is not None:
    kept = _find_matching(optimized, trainable, field="trainable")
  kept -= _find_matching(optimized, frozen, field="frozen")
  if optimized and not kept:
    raise ValueError(
      f"trainable={trainable} and frozen={tuple(frozen)} leave no variable to"
      " train."
    )
  for path in optimized.keys() - kept:
    flat[path] = dataclasses.replace(flat[path], trainable=False)
  return traverse_util.unflatten_dict(flat)


def _find_matching(
  names: Mapping[Any, str], patterns: Sequence[str], *, field: str
) -> set[Any]:
  """Returns the paths whose names match any pattern; each must match one."""
  found = set()
  for pattern in patterns:
    checks.check_pattern(field, pattern)
    matching = {p for p, name in names.items() if re.fullmatch(pattern, name)}
    if not matching:
      close = suggestions.find_closest(pattern, names.values(), count=3)
      shown = close or list(names.values())[:3]
      raise ValueError(
        f"{field}: {pattern!r} matches no trained variable; it must match a"
        f" whole name, such as {', '.join(shown)}."
      )
    found |= matching
  return found


def select(tree: Tree, *groups: Group, specs: Specs) -> dict[str, Any]:
  """Returns the leaves of `tree` that belong to any of `groups`.

  Returns:
    Nested dicts without the paths of other leaves. `specs` are those of all
    variables, which define their groups.
  """
  flat = traverse_util.flatten_dict(tree)
  kept: dict[Any, Any] = traverse_util.flatten_dict(specs)
  return traverse_util.unflatten_dict(
    {
      path: flat[path]
      for path, spec in kept.items()
      if find_group(spec) in groups
    }
  )


def merge(*trees: Tree) -> dict[str, Any]:
  """Returns the union of trees that share no path."""
  union: dict[Any, Any] = {}
  for tree in trees:
    flat = traverse_util.flatten_dict(tree)
    both = sorted("/".join(path) for path in flat.keys() & union.keys())
    if both:
      raise ValueError(f"Two trees have the variable {both[0]}.")
    union |= flat
  return traverse_util.unflatten_dict(union)


def map_paths(
  fn: Callable[..., Any], tree: Tree, *rest: Tree
) -> dict[str, Any]:
  """Returns `fn(leaf, *leaves of rest)` for each path of `tree`.

  Unlike `jax.tree.map`, `rest` may have more paths.
  """
  flats = [traverse_util.flatten_dict(other) for other in rest]
  return traverse_util.unflatten_dict(
    {
      path: fn(leaf, *(flat[path] for flat in flats))
      for path, leaf in traverse_util.flatten_dict(tree).items()
    }
  )
