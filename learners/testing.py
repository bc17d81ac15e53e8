"""Specs of small models, for tests of this package."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from paxon.sharding import variables


def spec(
  name: str, shape: Sequence[int], **fields: Any
) -> variables.VariableSpec:
  """Returns a spec; matrices are regularized and no axis has a name.

  Args:
    name: Logical name.
    shape: Of the stored array.
    **fields: Other fields of `VariableSpec`.
  """
  given: dict[str, Any] = {
    "dtype": jnp.dtype(jnp.float32),
    "axes": (None,) * len(shape),
    "regularized": len(shape) >= 2,
  } | fields
  return variables.VariableSpec(name=name, shape=tuple(shape), **given)
