"""Norms of gradients and parameters by groups of variables."""

from collections.abc import Mapping, Sequence
import re
from typing import Any, TypeAlias

from flax import traverse_util
import optax

from paxon.learners import variable_groups, weighted

# Paths in a tree of variables, by the name of their group.
Groups: TypeAlias = Mapping[str, Sequence[tuple[str, ...]]]


def of_patterns(
  patterns: Mapping[str, str], *, specs: variable_groups.Specs
) -> Groups:
  """Returns the optimized variables by group.

  Args:
    patterns: Regular expressions that match whole logical names (such as
      "params/stack/layers/blocks_0/attention/query") by the group's name; a
      variable may be in several groups or in none. An empty mapping groups by
      the modules at the top, such as `embedding` and `stack`.
    specs: Of all variables.

  Raises:
    ValueError: A pattern is no regular expression or matches nothing.
  """
  optimized = variable_groups.select(
    specs, variable_groups.Group.OPTIMIZED, specs=specs
  )
  flat: dict[Any, Any] = traverse_util.flatten_dict(optimized)
  groups: dict[str, list[Any]] = {}
  if not patterns:
    for path in flat:
      groups.setdefault(path[1], []).append(path)
    return groups
  for name, pattern in patterns.items():
    try:
      paths = [p for p, s in flat.items() if re.fullmatch(pattern, s.name)]
    except re.error as error:
      raise ValueError(
        f"The pattern of the norm group {name!r} must be a regular expression,"
        f" got {pattern!r}: {error}."
      ) from error
    if not paths:
      raise ValueError(
        f"The pattern {pattern!r} of the norm group {name!r} matches no"
        " variable; it must match a whole name, such as"
        f" {next(iter(flat.values())).name!r}."
      )
    groups[name] = paths
  return groups


def norms(
  tree: variable_groups.Tree, *, groups: Groups, prefix: str
) -> dict[str, weighted.Weighted]:
  """Returns the metric `<prefix>/<group>` for each group, on the devices.

  Args:
    tree: Gradients or parameters in float32, with the paths of the groups.
    groups: From `of_patterns`.
    prefix: Such as `grad_norm`.
  """
  flat: Any = traverse_util.flatten_dict(tree)
  return {
    f"{prefix}/{name}": weighted.scalar(
      optax.tree.norm([flat[path] for path in paths])
    )
    for name, paths in groups.items()
  }
