"""Trees of arrays by logical names.

A checkpoint stores nested dicts made from the `name` of each `VariableSpec`
(`params/decoder/...`, `opt_state/0/mu/...`), so that its names do not depend
on the Python types that hold a state.
"""

from typing import Any

import jax


def to_named(tree: Any, *, specs: Any) -> dict[str, Any]:
  """Returns the leaves of `tree` as nested dicts.

  Args:
    tree: Any pytree.
    specs: The same pytree of `VariableSpec`, whose names say where each leaf
      goes.

  Raises:
    ValueError: Two specs have the same name, or one is a prefix of another.
  """
  names = [spec.name for spec in jax.tree.leaves(specs)]
  leaves = jax.tree.structure(specs).flatten_up_to(tree)
  named: dict[str, Any] = {}
  for name, leaf in zip(names, leaves, strict=True):
    *folders, last = name.split("/")
    place = named
    for folder in folders:
      place = place.setdefault(folder, {})
      if not isinstance(place, dict):
        raise ValueError(f"The name {name!r} continues another one's name.")
    if last in place:
      raise ValueError(f"Two values have the name {name!r}.")
    place[last] = leaf
  return named


def from_named(named: dict[str, Any], *, specs: Any) -> Any:
  """Returns the pytree whose `to_named` is `named`.

  Args:
    named: Nested dicts that hold at least the names of `specs`.
    specs: The wanted pytree, of `VariableSpec`.
  """

  def find(spec: Any) -> Any:
    place: Any = named
    for part in spec.name.split("/"):
      place = place[part]
    return place

  return jax.tree.map(find, specs)
