"""The dtypes that parts compute in and store their parameters in."""

import fiddle as fdl

from paxon.runner import user_error
from paxon.runner.configuration import annotations, tree

_FIELDS = ("dtype", "param_dtype")
# Float64 and narrower kinds are no dtypes of a whole layer: jax truncates the
# one, and the others need scales, which are quantization's matter.
_ALLOWED = ("float32", "bfloat16", "float16")


def check(config: fdl.Buildable) -> None:
  """Checks the fields `dtype` and `param_dtype` of all linen modules.

  Args:
    config: The root; all parts below it are visited.

  Raises:
    user_error.UserError: One is no floating dtype that layers compute in.
  """
  for path, node in tree.nodes(config):
    if not tree.is_linen(fdl.get_callable(node)):
      continue
    for field in _FIELDS:
      if not tree.is_set(node, field):
        continue
      value = tree.value_of(node, field)
      if value is None:
        continue
      name = annotations.to_dtype(value).name
      if name not in _ALLOWED:
        raise user_error.UserError(
          f"{tree.join(path, field)} must be {', '.join(_ALLOWED[:-1])} or"
          f" {_ALLOWED[-1]}, got {name}."
        )


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
