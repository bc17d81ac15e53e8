"""One dtype for all parts that compute, where they do not say their own."""

import fiddle as fdl

from paxon.runner.configuration import annotations, tree


def set_where_unset(config: fdl.Buildable, dtype: str) -> list[str]:
  """Sets the field `dtype` of every configured class that has one, in place.

  A field that was set before, even to None, is left alone. Functions are too:
  the `dtype` of an initializer is not that of a computation.

  Args:
    config: The root; all parts below it are visited.
    dtype: The name of a dtype.

  Returns:
    The paths of the parts whose dtype was set.
  """
  value = annotations.to_dtype(dtype)
  changed = []
  for path, node in tree.nodes(config):
    if not isinstance(fdl.get_callable(node), type):
      continue
    if "dtype" in tree.field_names(node) and not tree.is_set(node, "dtype"):
      node.dtype = value
      changed.append(path)
  return changed
