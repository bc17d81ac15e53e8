"""Weighted sums: every metric and loss is a (sum, weight) pair.

A pair is divided only when it is shown. Pairs of several batches, microbatches
or hosts are added, so that the mean over all of them is exact, whatever each
part's share of padding.

A metric may have several values at once, such as one for each layer: an array
of sums with one weight. Its name says where their numbers go (`indexed`).
"""

from collections.abc import Iterator, Mapping
import math
import re
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

# A sum and its weight, both float32; scalars but for `indexed` sums.
Weighted: TypeAlias = tuple[jax.Array, jax.Array]

_INDEXED = re.compile(r"\[(\d+)::(\d+)\]")


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


def indexed(start: int, step: int) -> str:
  """Returns the part of a metric's name that stands for its values' numbers.

  A metric `layers/[1::2]/rms` of the sums [a, b] is shown as the two metrics
  `layers/1/rms` and `layers/3/rms`. With several such parts, each stands for
  one dimension.

  Args:
    start: The number of the first value.
    step: From one number to the next.
  """
  return f"[{start}::{step}]"


class Totals:
  """Adds up metrics of many steps on the host, without rounding.

  Each float32 pair is kept as a float64 number and summed by `math.fsum`, so
  the result does not depend on the order of the batches.
  """

  def __init__(self) -> None:
    self._parts: dict[str, tuple[list[float], list[float]]] = {}

  def add(self, metrics: Mapping[str, Weighted]) -> None:
    """Adds one step's metrics; waits until they are computed."""
    for group, (value, weight) in jax.device_get(dict(metrics)).items():
      for name, each in _singly(group, value):
        values, weights = self._parts.setdefault(name, ([], []))
        values.append(float(each))
        weights.append(float(weight))

  def means(self) -> dict[str, float]:
    """Returns each metric's mean; NaN where the weights add up to zero."""
    return {
      name: _sum(values) / _sum(weights) if _sum(weights) else math.nan
      for name, (values, weights) in self._parts.items()
    }

  def weight(self, name: str) -> float:
    """Returns the sum of a metric's weights; zero for one never added."""
    return _sum(self._parts.get(name, ([], []))[1])


def _sum(values: list[float]) -> float:
  """Returns the sum; NaN, which `fsum` refuses, of infinities of both signs."""
  if math.inf in values and -math.inf in values:
    return math.nan
  return math.fsum(values)


def _singly(name: str, value: Any) -> Iterator[tuple[str, Any]]:
  """Yields the name and number of each of a metric's values."""
  found = _INDEXED.search(name)
  if found is None or not value.ndim:
    yield name, value
    return
  start, step = int(found[1]), int(found[2])
  for i, each in enumerate(value):
    number = str(start + i * step)
    yield from _singly(
      name[: found.start()] + number + name[found.end() :], each
    )
