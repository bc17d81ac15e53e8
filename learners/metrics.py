"""Metrics and losses as (sum, weight) pairs.

A pair is divided only when it is reported. Pairs of batches, microbatches and
hosts are added, so the mean is exact for any distribution of padding.

A metric may have several values, such as one per layer: an array of sums with
one weight, and a name with a placeholder for their indices (`make_indexed`).

Two other kinds are recognized by their names. A maximum has the largest value
in place of the sum; a histogram has the weights of bins. `add` combines all of
them, so microbatches, batches and shards change neither.
"""

from collections.abc import Callable, Iterator, Mapping
import dataclasses
import math
import re
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

# A sum and its weight, both float32 scalars; the sums of an indexed metric are
# an array.
Weighted: TypeAlias = tuple[jax.Array, jax.Array]
Batch: TypeAlias = Mapping[str, jax.Array]
Outputs: TypeAlias = Mapping[str, jax.Array]
MetricFn: TypeAlias = Callable[[Batch, Outputs], dict[str, Weighted]]

_INDEXED = re.compile(r"\[(\d+)::(\d+)\]")
_MAXIMUM = "[max]"
_HISTOGRAM = re.compile(r"\[bins:([^:\]]+):([^:\]]+)\]$")


def total(values: jax.Array, *, weights: jax.Array) -> Weighted:
  """Returns the sum of `values * weights` and of `weights`, in float32."""
  weights = weights.astype(jnp.float32)
  return jnp.sum(values.astype(jnp.float32) * weights), jnp.sum(weights)


def scalar(value: jax.Array) -> Weighted:
  """Returns a value with weight 1, such as a learning rate."""
  return value.astype(jnp.float32), jnp.float32(1.0)


def make_indexed(start: int, step: int) -> str:
  """Returns a placeholder for the indices start, start + step ... of a metric.

  A metric `layers/[1::2]/rms` with the sums [a, b] is reported as
  `layers/1/rms` and `layers/3/rms`. Several placeholders index several
  dimensions.
  """
  return f"[{start}::{step}]"


def maximum(
  name: str, values: jax.Array, *, weights: jax.Array
) -> dict[str, Weighted]:
  """Returns the metric `<name>/max`, the largest of the weighted values.

  Args:
    name: Of the metric.
    values: Of any shape.
    weights: Of the same shape; values of weight 0 do not count. Without any
      other, the batch has no maximum.
  """
  counts = weights != 0
  largest = jnp.max(
    jnp.where(counts, values.astype(jnp.float32), -jnp.inf), initial=-jnp.inf
  )
  return {f"{name}/{_MAXIMUM}": (largest, jnp.sum(counts, dtype=jnp.float32))}


def histogram(
  name: str,
  values: jax.Array,
  *,
  weights: jax.Array,
  low: float,
  high: float,
  bins: int = 30,
) -> dict[str, Weighted]:
  """Returns a metric with the distribution of values, for TensorBoard.

  Args:
    name: Of the metric.
    values: Of any shape, finite.
    weights: Of the same shape.
    low: Lower limit of the first bin, which also has smaller values.
    high: Upper limit of the last bin, which also has larger values.
    bins: Number of bins of equal width.

  Raises:
    ValueError: The limits or the number are not valid.
  """
  if not low < high or bins < 1:
    raise ValueError(
      f"The histogram {name!r} needs low < high and bins >= 1, got {low},"
      f" {high} and {bins}."
    )
  x = values.astype(jnp.float32).reshape(-1)
  weights = weights.astype(jnp.float32).reshape(-1)
  places = jnp.floor((x - low) * (bins / (high - low)))
  index = jnp.clip(places, 0, bins - 1).astype(jnp.int32)
  sums = jnp.zeros(bins + 2, jnp.float32).at[index].add(weights)
  moments = jnp.stack([jnp.sum(x * weights), jnp.sum(x * x * weights)])
  key = f"{name}/[bins:{float(low)!r}:{float(high)!r}]"
  return {key: (sums.at[bins:].set(moments), jnp.sum(weights))}


def add(metrics: Mapping[str, Weighted]) -> dict[str, Weighted]:
  """Returns the metrics of several parts, stacked along a first axis, as one.

  Sums and weights are added, and of maxima the largest is taken.
  """
  return {
    name: (
      (jnp.max if is_maximum(name) else jnp.sum)(value, axis=0),
      jnp.sum(weight, axis=0),
    )
    for name, (value, weight) in metrics.items()
  }


def empty(shapes: Mapping[str, Any]) -> dict[str, Weighted]:
  """Returns metrics that change nothing by `add`; `shapes` are abstract."""
  return {
    name: (
      jnp.full(value.shape, -jnp.inf if is_maximum(name) else 0.0, value.dtype),
      jnp.zeros(weight.shape, weight.dtype),
    )
    for name, (value, weight) in shapes.items()
  }


def is_maximum(name: str) -> bool:
  """Whether a metric with this name is a `maximum`."""
  return name.endswith(_MAXIMUM)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Distribution:
  """The total of a `histogram`.

  Attributes:
    limits: Limits of the bins, ascending, one more than bins.
    counts: Weight of each bin.
    total: Sum of the weighted values.
    total_squares: Sum of their weighted squares.
  """

  limits: tuple[float, ...]
  counts: tuple[float, ...]
  total: float
  total_squares: float


class Totals:
  """Sums of metrics over many steps, on the host and without rounding.

  `math.fsum` adds the float32 values, so the result does not depend on the
  order of the batches.
  """

  def __init__(self) -> None:
    self._parts: dict[str, tuple[list[float], list[float]]] = {}
    self._bins: dict[str, list[Any]] = {}

  def add(self, metrics: Mapping[str, Weighted]) -> None:
    """Adds the metrics of one step; blocks until they are computed."""
    for group, (value, weight) in jax.device_get(dict(metrics)).items():
      if _HISTOGRAM.search(group):
        self._bins.setdefault(group, []).append(value)
        continue
      for name, each in expand(group, value):
        values, weights = self._parts.setdefault(name, ([], []))
        values.append(float(each))
        weights.append(float(weight))

  def means(self) -> dict[str, float]:
    """Returns the mean, or the maximum, of each metric that has a weight."""
    found = {}
    for name, (values, weights) in self._parts.items():
      total = _sum(weights)
      if not total:
        continue
      if is_maximum(name):
        name = name.removesuffix(_MAXIMUM) + "max"
        # Unlike `max`, it keeps a NaN wherever it is.
        largest = math.nan if any(map(math.isnan, values)) else max(values)
        found[name] = largest
      else:
        found[name] = _sum(values) / total
    return found

  def distributions(self) -> dict[str, Distribution]:
    """Returns the total of each histogram."""
    found = {}
    for key, parts in self._bins.items():
      match = _HISTOGRAM.search(key)
      assert match is not None
      sums = [
        _sum([float(x) for x in each]) for each in zip(*parts, strict=True)
      ]
      low, high = float(match[1]), float(match[2])
      bins = len(sums) - 2
      width = (high - low) / bins
      found[key[: match.start()].removesuffix("/")] = Distribution(
        limits=(*(low + i * width for i in range(bins)), high),
        counts=tuple(sums[:bins]),
        total=sums[bins],
        total_squares=sums[bins + 1],
      )
    return found

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
