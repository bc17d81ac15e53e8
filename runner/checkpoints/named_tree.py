"""Trees of arrays by logical names, and whether a checkpoint fits a model.

A checkpoint stores nested dicts by the `name` of each `VariableSpec`
(`params/decoder/...`, `opt_state/0/mu/...`), independent of the Python types
that hold a state. Shapes and dtypes are compared before any array is read.
"""

from collections.abc import Mapping
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from paxon.sharding import suggestions

FORMAT_VERSION = 2


class CheckpointMismatchError(ValueError):
  """A checkpoint does not fit a configuration."""


def to_named(tree: Any, *, specs: Any) -> dict[str, Any]:
  """Returns the leaves of `tree` as nested dicts, by the names of its specs.

  Raises:
    ValueError: Two specs have the same name, or one is a prefix of another.
  """
  names = [spec.name for spec in jax.tree.leaves(specs)]
  leaves = jax.tree.structure(specs).flatten_up_to(tree)
  named: dict[str, Any] = {}
  for name, leaf in zip(names, leaves, strict=True):
    *folders, last = name.split("/")
    node = named
    for folder in folders:
      node = node.setdefault(folder, {})
      if not isinstance(node, dict):
        raise ValueError(f"Another value's name is a prefix of {name!r}.")
    if last in node:
      raise ValueError(f"Two values have the name {name!r}.")
    node[last] = leaf
  return named


def from_named(named: dict[str, Any], *, specs: Any) -> Any:
  """Returns the pytree whose `to_named` is `named`, which may hold more."""

  def find(spec: Any) -> Any:
    node: Any = named
    for key in spec.name.split("/"):
      node = node[key]
    return node

  return jax.tree.map(find, specs)


def describe(specs: Any) -> dict[str, Any]:
  """Returns shape, dtype and axes by name, as JSON values for the metadata."""
  return {
    spec.name: {
      "shape": list(spec.shape),
      "dtype": spec.dtype.name,
      "axes": list(spec.axes),
    }
    for spec in jax.tree.leaves(specs)
  }


def use_stored_dtypes(stored: Mapping[str, Any], *, specs: Any) -> Any:
  """Returns specs with the dtypes of stored floating-point arrays.

  Args:
    stored: Arrays as `describe` returns them.
    specs: A pytree of `VariableSpec`; those that are not stored, or are not
      floating-point, are unchanged.
  """

  def change(spec: Any) -> Any:
    if spec.name not in stored:
      return spec
    dtype = jnp.dtype(stored[spec.name]["dtype"])
    if not all(jnp.issubdtype(x, jnp.floating) for x in (dtype, spec.dtype)):
      return spec
    return dataclasses.replace(spec, dtype=dtype)

  return jax.tree.map(change, specs)


def check_version(version: int, *, where: str) -> None:
  """Raises CheckpointMismatchError for another format version."""
  if version != FORMAT_VERSION:
    raise CheckpointMismatchError(
      f"{where} has format version {version}, but this program reads version"
      f" {FORMAT_VERSION} only."
    )


def check(stored: Mapping[str, Any], *, specs: Any, where: str) -> None:
  """Checks that stored arrays, as `describe` returns them, fit a model.

  `specs` may omit whole collections, such as the optimizer state.

  Raises:
    CheckpointMismatchError: A name is missing or unused, or has another shape
      or dtype. The message names the variables.
  """
  wanted = {spec.name: spec for spec in jax.tree.leaves(specs)}
  problems = []
  for name, spec in wanted.items():
    if name not in stored:
      problems.append(_missing(name, spec, stored))
      continue
    shape, dtype = tuple(stored[name]["shape"]), stored[name]["dtype"]
    if shape != spec.shape:
      problems.append(
        f"{name} has shape {shape} in the checkpoint and {spec.shape} in the"
        f" configuration (axes {spec.axes})"
      )
    elif dtype != spec.dtype.name:
      problems.append(
        f"{name} has dtype {dtype} in the checkpoint and {spec.dtype.name} in"
        " the configuration"
      )
  collections = {name.partition("/")[0] for name in wanted}
  problems += [
    f"{name} is in the checkpoint and not in the configuration"
    for name in stored
    if name.partition("/")[0] in collections and name not in wanted
  ]
  if problems:
    raise CheckpointMismatchError(
      f"{where} does not match the configuration:"
      f" {suggestions.limit(problems)}."
    )


def _missing(name: str, spec: Any, stored: Mapping[str, Any]) -> str:
  close = suggestions.find_closest(name, list(stored))
  similar = f" (did you mean {close[0]}?)" if close else ""
  return f"{name} {spec.shape} is not in the checkpoint{similar}"
