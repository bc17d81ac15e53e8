"""Detection of accidentally shared parameters.

Linen silently shares the parameters of one module object in two fields, such as
a norm that is created once and passed twice. Here sharing is explicit
(`layers.stacks.shared`), so this is an error.

One object in two fields is harmless without parameters (dropout) or if it is
copied anyway (blocks of a stack). So each such object is replaced by separate
copies; if the model then has additional variables, the object was shared.
"""

from collections.abc import Callable, Mapping
import dataclasses
from typing import Any

from flax import linen as nn
import jax

from paxon.layers.stacks import shared

# Objects of a module's tree, by id.
_Objects = dict[int, nn.Module]


class TiedError(ValueError):
  """One module object with parameters is in two fields of a model."""


def check(
  model: nn.Module, variables_of: Callable[[nn.Module], Mapping[str, Any]]
) -> None:
  """Raises an error if an unbound model shares parameters accidentally.

  `variables_of` returns the abstract variables of such a model; it is called
  only if an object is in several fields.

  Raises:
    TiedError: One object with parameters is in two fields.
  """
  places = _places(model)
  several = {i: p for i, p in places.items() if len(p) > 1}
  if not several:
    return
  tied = _names(variables_of(model))
  for target, where in several.items():
    apart = _names(variables_of(_separate(model, target, {})))
    if apart - tied:
      kind = where[0][1]
      names = " and ".join(name for name, _ in where)
      own = sorted(apart - tied)[0]
      raise TiedError(
        f"One {kind} object is in two fields, {names}, so they share their"
        f" parameters ({own} is missing). Create one for each, or mark both"
        " with layers.stacks.shared.shared(name, module)."
      )


def _places(model: nn.Module) -> dict[int, list[tuple[str, str]]]:
  """Returns the fields that contain each object, and its class."""
  places: dict[int, list[tuple[str, str]]] = {}
  seen: set[int] = set()

  def visit(module: nn.Module, path: str) -> None:
    if id(module) in seen:
      return
    seen.add(id(module))
    edges = set()
    for field, part in shared.iterate_submodules(module):
      at = f"{path}.{field}" if path else field
      # One object several times in one field is a pattern of blocks.
      if (field, id(part)) not in edges:
        edges.add((field, id(part)))
        found = places.setdefault(id(part), [])
        found.append((at, type(part).__name__))
      visit(part, at)

  visit(model, "")
  return places


def _separate(module: nn.Module, target: int, done: _Objects) -> nn.Module:
  """Returns a copy of a model with separate copies of the object `target`.

  Other objects in several fields remain one object.
  """
  if id(module) in done:
    return done[id(module)]

  def part(leaf: Any) -> Any:
    return (
      _separate(leaf, target, done) if isinstance(leaf, nn.Module) else leaf
    )

  updates = {
    field.name: jax.tree.map(part, getattr(module, field.name))
    for field in dataclasses.fields(module)
    if field.name not in ("parent", "name")
    and any(f == field.name for f, _ in shared.iterate_submodules(module))
  }
  copied = module.clone(**updates)
  if id(module) != target:
    done[id(module)] = copied
  return copied


def _names(variables: Mapping[str, Any]) -> set[str]:
  leaves = jax.tree_util.tree_leaves_with_path(variables)
  return {
    "/".join(str(k.key) for k in path if hasattr(k, "key"))
    for path, _ in leaves
  }
