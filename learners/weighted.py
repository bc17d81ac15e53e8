"""Weighted sums: every metric and loss is a (sum, weight) pair.

A pair is divided only when it is shown. Pairs of several batches, microbatches
or hosts are added, so that the mean over all of them is exact, whatever each
part's share of padding.
"""

from collections.abc import Mapping
import math
from typing import TypeAlias

import jax
import jax.numpy as jnp

# A sum and its weight, both float32 scalars.
Weighted: TypeAlias = tuple[jax.Array, jax.Array]


def total(values: jax.Array, *, weights: jax.Array) -> Weighted:
  """Returns the sum of `values * weights` and of `weights`, in float32.

  Args:
    values: Any shape.
    weights: The same shape.
  """
  weights = weights.astype(jnp.float32)
  return jnp.sum(values.astype(jnp.float32) * weights), jnp.sum(weights)


def scalar(value: jax.Array) -> Weighted:
  """Returns a value that counts once a step, such as a learning rate."""
  return value.astype(jnp.float32), jnp.float32(1.0)


class Totals:
  """Adds up metrics of many steps on the host, without rounding.

  Each float32 pair is kept as a float64 number and summed by `math.fsum`, so
  the result does not depend on the order of the batches.
  """

  def __init__(self) -> None:
    self._parts: dict[str, tuple[list[float], list[float]]] = {}

  def add(self, metrics: Mapping[str, Weighted]) -> None:
    """Adds one step's metrics; waits until they are computed."""
    for name, (value, weight) in jax.device_get(dict(metrics)).items():
      values, weights = self._parts.setdefault(name, ([], []))
      values.append(float(value))
      weights.append(float(weight))

  def means(self) -> dict[str, float]:
    """Returns each metric's mean; NaN where the weights add up to zero."""
    return {
      name: math.fsum(values) / math.fsum(weights)
      if math.fsum(weights)
      else math.nan
      for name, (values, weights) in self._parts.items()
    }

  def weight(self, name: str) -> float:
    """Returns the sum of a metric's weights; zero for one never added."""
    return math.fsum(self._parts.get(name, ((), ()))[1])
