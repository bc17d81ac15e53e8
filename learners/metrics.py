"""Metrics and losses as (sum, weight) pairs.

A pair is divided only when it is reported. Pairs of batches, microbatches and
hosts are added, so the mean is exact for any distribution of padding.

A metric may have several values, such as one per layer: an array of sums with
one weight, and a name with a placeholder for their indices (`indexed`).
"""

from collections.abc import Callable, Iterator, Mapping
import math
import re
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

# A sum and its weight, both float32 scalars; the sums of an `indexed` metric
# are an array.
Weighted: TypeAlias = tuple[jax.Array, jax.Array]
Batch: TypeAlias = Mapping[str, jax.Array]
Outputs: TypeAlias = Mapping[str, jax.Array]
MetricFn: TypeAlias = Callable[[Batch, Outputs], dict[str, Weighted]]

_INDEXED = re.compile(r"\[(\d+)::(\d+)\]")


def total(values: jax.Array, *, weights: jax.Array) -> Weighted:
  """Returns the sum of `values * weights` and of `weights`, in float32."""
  weights = weights.astype(jnp.float32)
  return jnp.sum(values.astype(jnp.float32) * weights), jnp.sum(weights)


def scalar(value: jax.Array) -> Weighted:
  """Returns a value with weight 1, such as a learning rate."""
  return value.astype(jnp.float32), jnp.float32(1.0)


def indexed(start: int, step: int) -> str:
  """Returns a placeholder for the indices start, start + step ... of a metric.

  A metric `layers/[1::2]/rms` with the sums [a, b] is reported as
  `layers/1/rms` and `layers/3/rms`. Several placeholders index several
  dimensions.
  """
  return f"[{start}::{step}]"


class Totals:
  """Sums of metrics over many steps, on the host and without rounding.

  `math.fsum` adds the float32 values, so the result does not depend on the
  order of the batches.
  """

  def __init__(self) -> None:
    self._parts: dict[str, tuple[list[float], list[float]]] = {}

  def add(self, metrics: Mapping[str, Weighted]) -> None:
    """Adds the metrics of one step; blocks until they are computed."""
    for group, (value, weight) in jax.device_get(dict(metrics)).items():
      for name, each in expand(group, value):
        values, weights = self._parts.setdefault(name, ([], []))
        values.append(float(each))
        weights.append(float(weight))

  def means(self) -> dict[str, float]:
    """Returns the mean of each metric; NaN if its total weight is zero."""
    return {
      name: _sum(values) / _sum(weights) if _sum(weights) else math.nan
      for name, (values, weights) in self._parts.items()
    }

  def weight(self, name: str) -> float:
    """Returns the total weight of a metric; zero if it was never added."""
    return _sum(self._parts.get(name, ([], []))[1])


def _sum(values: list[float]) -> float:
  """Returns the sum; NaN for infinities of both signs (`fsum` raises)."""
  if math.inf in values and -math.inf in values:
    return math.nan
  return math.fsum(values)


def expand(name: str, value: Any) -> Iterator[tuple[str, Any]]:
  """Yields the name and the value for each index of a metric.

  The values of a metric of arrays are arrays.
  """
  found = _INDEXED.search(name)
  if found is None or not value.ndim:
    yield name, value
    return
  start, step = int(found[1]), int(found[2])
  for i, each in enumerate(value):
    number = str(start + i * step)
    yield from expand(
      name[: found.start()] + number + name[found.end() :], each
    )


def bits_per_byte(batch: Batch, outputs: Outputs) -> dict[str, Weighted]:
  """Returns the metric `bits_per_byte`: (bits, bytes) of one batch.

  Args:
    batch: Has `weights` float32 [B, T] and `target_bytes` int32 [B, T], the
      number of bytes that each target encodes.
    outputs: Has `token_nll` float32 [B, T], in nats.
  """
  weights = batch["weights"].astype(jnp.float32)
  nats = jnp.sum(outputs["token_nll"].astype(jnp.float32) * weights)
  source = jnp.sum(batch["target_bytes"].astype(jnp.float32) * weights)
  return {"bits_per_byte": (nats / math.log(2), source)}


def cut_tokens(batch: Batch, outputs: Outputs) -> dict[str, Weighted]:
  """Returns the shares of tokens and of examples that inputs have cut.

  Args:
    batch: Has `segment_ids` and `positions` int32 [B, T], and `cut_tokens` [B,
      T], tokens that an example has lost, at its first token. Batches without
      `cut_tokens` have no such metrics.
    outputs: Unused.
  """
  del outputs
  if "cut_tokens" not in batch:
    return {}
  cut = batch["cut_tokens"].astype(jnp.float32)
  is_token = batch["segment_ids"] > 0
  is_first = is_token & (batch["positions"] == 0)
  lost = jnp.sum(cut)
  return {
    "cut_tokens": (lost, lost + jnp.sum(is_token, dtype=jnp.float32)),
    "cut_chats": total(cut > 0, weights=is_first),
  }
