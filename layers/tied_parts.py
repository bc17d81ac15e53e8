"""Finds parameters that are tied by accident.

Linen gives one module object in two fields one set of parameters, without a
word: a norm that was made once and passed twice, or one node of a configuration
in two places. Sharing is asked for here (`layers.shared`), so this is an error.

An object in two places is harmless where it has no parameters (dropout), and
where the places are copied anyway (two blocks of a stack). So each such object
is put into each place as a copy of its own; only if the model then has
variables that it had not before, the object was tied.
"""

from collections.abc import Callable, Mapping
import dataclasses
from typing import Any

from flax import linen as nn
import jax

from paxon.layers import shared

# Objects of a module's tree, by id.
_Objects = dict[int, nn.Module]


class TiedError(ValueError):
  """One object with parameters stands in two places of a model."""


def check(
  model: nn.Module, variables_of: Callable[[nn.Module], Mapping[str, Any]]
) -> None:
  """Raises an error if two places of a model share parameters unasked.

  Args:
    model: Not bound.
    variables_of: Returns the tree of abstract variables of a model like this
      one; called only where an object stands in several places.

  Raises:
    TiedError: One object stands in two places.
  """
  places = _places(model)
  several = {i: p for i, p in places.items() if len(p) > 1}
  if not several:
    return
  tied = _names(variables_of(model))
  for target, where in several.items():
    apart = _names(variables_of(_apart(model, target, {})))
    if apart - tied:
      kind = where[0][1]
      names = " and ".join(name for name, _ in where)
      own = sorted(apart - tied)[0]
      raise TiedError(
        f"One {kind} stands in two places, {names}, but its parameters belong "
        f"to one of them only ({own} is missing). Make one for each, or mark "
        "both with layers.shared.shared(name, part)."
      )


def _places(model: nn.Module) -> dict[int, list[tuple[str, str]]]:
  """Returns the places of each object: the field that has it, and its class."""
  places: dict[int, list[tuple[str, str]]] = {}
  seen: set[int] = set()

  def visit(module: nn.Module, path: str) -> None:
    if id(module) in seen:
      return
    seen.add(id(module))
    edges = set()
    for field, part in shared.iterate_submodules(module):
      at = f"{path}.{field}" if path else field
      # One object several times in one field is a pattern of templates.
      if (field, id(part)) not in edges:
        edges.add((field, id(part)))
        found = places.setdefault(id(part), [])
        found.append((at, type(part).__name__))
      visit(part, at)

  visit(model, "")
  return places


def _apart(module: nn.Module, target: int, done: _Objects) -> nn.Module:
  """Returns a copy in which `target` is another object in each of its places.

  All other objects stay one where they were one.
  """
  if id(module) in done:
    return done[id(module)]

  def part(leaf: Any) -> Any:
    return _apart(leaf, target, done) if isinstance(leaf, nn.Module) else leaf

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
