"""Settings that a function carries: of `jax.jit`, `shard_map` and constants."""

from collections.abc import Mapping
from typing import Any

import jax
from jax.extend import core
from jax.sharding import NamedSharding


def read_jit(
  traced: jax.stages.Traced, count: int
) -> tuple[list[NamedSharding | None], set[int]]:
  """Returns the shardings and the donated inputs of a jitted function.

  Args:
    traced: A function that only calls it.
    count: Number of inputs.
  """
  jaxpr = traced.jaxpr.jaxpr
  shardings: list[NamedSharding | None] = [None] * count
  donated: set[int] = set()
  places = {variable: i for i, variable in enumerate(jaxpr.invars)}
  is_outermost = True
  # A function that is jitted twice has one equation inside another.
  while len(jaxpr.eqns) == 1 and "donated_invars" in jaxpr.eqns[0].params:
    (equation,) = jaxpr.eqns
    inner = equation.params["jaxpr"].jaxpr
    found = zip(
      equation.invars,
      inner.invars,
      equation.params["in_shardings"],
      equation.params["donated_invars"],
      strict=True,
    )
    jaxpr, outer, places = inner, places, {}
    for variable, inside, sharding, is_donated in found:
      place = _find_place(variable, outer)
      if place is None:
        continue
      places[inside] = place
      if isinstance(sharding, NamedSharding):
        shardings[place] = shardings[place] or sharding
      if is_donated and is_outermost:
        donated.add(place)
    is_outermost = False
  for place, sharding in _read_shard_maps(jaxpr, places).items():
    shardings[place] = shardings[place] or sharding
  return shardings, donated


def count_constants(jaxpr: core.ClosedJaxpr) -> int:
  """Returns the bytes of arrays that a function closes over.

  They are in the memory of each device, but the compiler's sizes leave them
  out.

  Args:
    jaxpr: Of the function.
  """
  seen: dict[int, int] = {}
  _add_constants(jaxpr, seen)
  return sum(seen.values())


def _add_constants(jaxpr: core.ClosedJaxpr, seen: dict[int, int]) -> None:
  for value in jaxpr.consts:
    seen[id(value)] = getattr(value, "nbytes", 0)
  for equation in jaxpr.jaxpr.eqns:
    for parameter in equation.params.values():
      parts = parameter if isinstance(parameter, tuple | list) else (parameter,)
      for part in parts:
        if isinstance(part, core.ClosedJaxpr):
          _add_constants(part, seen)


def _find_place(variable: Any, places: Mapping[Any, int]) -> int | None:
  """Returns which input a variable is; None if it is none."""
  is_constant = isinstance(variable, core.Literal)
  return None if is_constant else places.get(variable)


def _read_shard_maps(
  jaxpr: Any, places: Mapping[Any, int]
) -> dict[int, NamedSharding]:
  """Returns the shardings of inputs that only `shard_map` or `pmap` takes."""
  users: dict[int, list[NamedSharding | None]] = {}
  for equation in jaxpr.eqns:
    specs = equation.params.get("in_specs")
    is_map = equation.primitive.name == "shard_map" and specs is not None
    for i, variable in enumerate(equation.invars):
      place = _find_place(variable, places)
      if place is None:
        continue
      sharding = None
      if is_map:
        sharding = NamedSharding(equation.params["mesh"], specs[i])
      users.setdefault(place, []).append(sharding)
  return {
    place: found[0]
    for place, found in users.items()
    if found[0] is not None and all(each == found[0] for each in found)
  }
