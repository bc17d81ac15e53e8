"""Loss functions: their output, and the metrics of a step."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from paxon.learners import metrics as metrics_lib
from paxon.learners import variable_groups

Metrics: TypeAlias = dict[str, metrics_lib.Weighted]


class LossOutput(NamedTuple):
  """The output of a loss function.

  Attributes:
    loss: (sum, weight); the minimized loss is their quotient.
    metrics: Metrics of the model.
    outputs: Arrays per example, for metric functions.
    new_collections: Collections replaced by the forward pass.
  """

  loss: metrics_lib.Weighted
  metrics: Metrics
  outputs: metrics_lib.Outputs
  new_collections: variable_groups.Tree


LossFn: TypeAlias = Callable[
  [variable_groups.Tree, metrics_lib.Batch, dict[str, jax.Array]],
  LossOutput,
]


def measure(
  result: LossOutput,
  *,
  metric_fns: Sequence[metrics_lib.MetricFn],
  batch: metrics_lib.Batch,
) -> Metrics:
  """Returns the loss, the model's metrics and those of `metric_fns`.

  Raises:
    ValueError: Two metrics have the same name.
  """
  metrics: Metrics = {"loss": result.loss}
  for more in (
    result.metrics,
    *(metric_fn(batch, result.outputs) for metric_fn in metric_fns),
  ):
    if both := sorted(metrics.keys() & more.keys()):
      raise ValueError(
        f"Two metrics are called {both[0]!r}; rename one of them."
      )
    metrics |= more
  return metrics


def divisor(weight: jax.Array) -> jax.Array:
  """Returns the divisor of a sum of losses: its weight, or 1 if that is 0."""
  # A batch with only padding has weight 0 and must not make parameters NaN.
  return jnp.where(weight == 0, jnp.ones_like(weight), weight)
