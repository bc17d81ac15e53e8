"""Whether a checkpoint fits a model, told by names, shapes and dtypes."""

from collections.abc import Mapping
import difflib
from typing import Any

import jax

# Version 1 has no manifest and no time.
FORMAT_VERSION = 2
# More than these would bury the message.
_MAX_PROBLEMS = 5


class CheckpointMismatchError(ValueError):
  """A checkpoint does not hold what a configuration needs."""


def describe(specs: Any) -> dict[str, Any]:
  """Returns what a checkpoint's metadata says of its arrays, as JSON values.

  Args:
    specs: A pytree of `VariableSpec`.
  """
  return {
    spec.name: {
      "shape": list(spec.shape),
      "dtype": spec.dtype.name,
      "axes": list(spec.axes),
    }
    for spec in jax.tree.leaves(specs)
  }


def check_version(version: int, *, where: str) -> None:
  """Raises an error if a format is not one of those that are read.

  Args:
    version: The checkpoint's format.
    where: Names the checkpoint in the message.

  Raises:
    CheckpointMismatchError: A later version of this program has written it.
  """
  if not 1 <= version <= FORMAT_VERSION:
    raise CheckpointMismatchError(
      f"{where} has format version {version}; this program reads versions 1 to"
      f" {FORMAT_VERSION}."
    )


def check(
  stored: Mapping[str, Any], *, specs: Any, version: int, where: str
) -> None:
  """Raises an error if a checkpoint does not fit.

  Args:
    stored: What `describe` returned when the checkpoint was written.
    specs: A pytree of `VariableSpec`: what is wanted. It may leave out whole
      collections, such as the optimizer's state.
    version: The checkpoint's format.
    where: Names the checkpoint in the message.

  Raises:
    CheckpointMismatchError: The format is not ours, or a name is missing, not
      used, or has another shape or dtype. The message names the variables.
  """
  check_version(version, where=where)
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
    shown = problems[:_MAX_PROBLEMS]
    if len(problems) > len(shown):
      shown.append(f"and {len(problems) - len(shown)} more")
    raise CheckpointMismatchError(
      f"{where} does not match the configuration: {'; '.join(shown)}."
    )


def _missing(name: str, spec: Any, stored: Mapping[str, Any]) -> str:
  problem = f"{name} {spec.shape} is not in the checkpoint"
  close = difflib.get_close_matches(name, stored, n=1)
  return problem + (f" (which has {close[0]})" if close else "")
