"""Names of functions and classes that survive an upgrade of their library.

Libraries define public functions in private modules (`jax._src.nn.functions`),
which move between versions. Such a function is named by the first public
module that has it. What has no name of its own, such as an initializer made by
a call, is named by the variable that holds it in the module of its user.
"""

import sys
from typing import Any

# Only those that are loaded are searched: whoever uses jax.nn.silu has it.
_PUBLIC = (
  *("jax.nn", "jax.nn.initializers", "jax.numpy", "jax.lax", "jax.random"),
  *("jax", "flax.linen", "flax.linen.initializers", "optax"),
)


def name_of(target: Any, *, user: str | None = None) -> str | None:
  """Returns the import path of a function or class, or None without one.

  Args:
    target: Something callable.
    user: The module of the class or function that has `target` as a default:
      searched for a variable that holds it.
  """
  module = getattr(target, "__module__", None)
  name = getattr(target, "__qualname__", None) or getattr(
    target, "__name__", None
  )
  is_defined = (
    isinstance(module, str)
    and isinstance(name, str)
    and _lookup(module, name) is target
  )
  if is_defined and not _is_private(module):
    return f"{module}.{name}"
  for public in _PUBLIC:
    alias = _variable(public, target, preferred=name)
    if alias:
      return f"{public}.{alias}"
  if is_defined:
    return f"{module}.{name}"
  if user:
    alias = _variable(user, target, preferred=None)
    return f"{user}.{alias}" if alias else None
  return None


def _is_private(module: str) -> bool:
  return any(part.startswith("_") for part in module.split("."))


def _lookup(module: str, qualname: str) -> Any:
  """Returns what the dotted name stands for, or None."""
  value: Any = sys.modules.get(module)
  for part in qualname.split("."):
    value = getattr(value, part, None)
  return value


def _variable(module: str, target: Any, *, preferred: str | None) -> str | None:
  """Returns the name of a module's variable that holds `target`, if any."""
  variables = vars(sys.modules[module]) if module in sys.modules else {}
  if preferred and variables.get(preferred) is target:
    return preferred
  # Sorted, so that the choice does not depend on the order of definition.
  found = sorted(name for name, value in variables.items() if value is target)
  return found[0] if found else None


def is_function_or_class(value: Any) -> bool:
  """Whether something callable is named by where it is defined.

  Not so an object with `__call__`, whose fields matter.
  """
  if isinstance(value, type):
    return True
  return hasattr(value, "__qualname__") or (
    # numpy's and jax's ufuncs have a name and no fields.
    type(value).__name__ == "ufunc" and hasattr(value, "__name__")
  )
