"""Loss functions: their output, and the metrics of a step."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from paxon.learners import metrics as metrics_lib
from paxon.learners import variable_groups

Metrics: TypeAlias = dict[str, metrics_lib.Weighted]


class LossOutput(NamedTuple):
  """What a loss function returns.

  Attributes:
    loss: Sum and weight; what is minimized is their quotient.
    metrics: The model's own metrics.
    outputs: Arrays per example, for metric functions.
    new_collections: The collections that the forward pass replaced.
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

  Args:
    result: What the loss function returned.
    metric_fns: Evaluated on the batch and the result's outputs.
    batch: What the loss function was given.

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
  """Returns what a sum of losses of this weight is divided by."""
  # A batch of padding only has weight 0 and must not make NaNs of parameters.
  return jnp.where(weight == 0, jnp.ones_like(weight), weight)
