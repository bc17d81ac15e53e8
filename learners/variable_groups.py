"""Groups of variables by update rule.

  optimized     gradients go through clipping and the optimizer
  overwritten   the gradient itself is the next value (scales of fp8 training)
  replaced      the forward pass returns the next value (running statistics)
  frozen        never changed

A group is a pruned tree: nested dicts with the same paths that hold only the
group's leaves.
"""

from collections.abc import Callable, Mapping
import enum
from typing import Any, TypeAlias

from flax import traverse_util

from paxon.sharding import variables

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


def group_of(spec: variables.VariableSpec) -> Group:
  """Returns the group of one variable."""
  match spec.update:
    case variables.UpdateRule.REPLACE:
      return Group.REPLACED
    case variables.UpdateRule.OVERWRITE_WITH_GRADIENT:
      return Group.OVERWRITTEN if spec.trainable else Group.FROZEN
    case variables.UpdateRule.OPTIMIZER:
      return Group.OPTIMIZED if spec.trainable else Group.FROZEN


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
      if group_of(spec) in groups
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
