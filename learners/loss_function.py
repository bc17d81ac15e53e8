"""Loss functions: their output, and the metrics of a step."""

from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from paxon.learners import learner as learner_lib
from paxon.learners import metrics as metrics_lib
from paxon.learners import variable_groups

Metrics: TypeAlias = dict[str, metrics_lib.Weighted]

# Metric of a model whose loss has a weight but may have nothing to learn from,
# such as answers with equal rewards: its sum is the number of targets.
TARGETS: Final = "targets"


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


def combine(
  loss_fn: LossFn, losses: learner_lib.Losses | None, *, step: ArrayLike
) -> LossFn:
  """Returns a loss function that minimizes a combination of metrics.

    loss = sum of factor * mean of the metric

  Its `loss` has the weight of the given one, which becomes the metric
  `model_loss`. Microbatches do not change the gradient if the weights of the
  metrics are proportional, such as numbers of tokens. Factors that depend on
  the step are reported as `loss_factor/<name>`.

  Args:
    loss_fn: Its metrics must be differentiable.
    losses: Factors by name of a metric of the model, or `loss` for its own
      loss; or a `learner.LossAggregator`; None for the loss as it is.
    step: Number of completed steps.
  """
  if losses is None:
    return loss_fn

  def compute_combined(
    variables: variable_groups.Tree,
    batch: metrics_lib.Batch,
    rngs: dict[str, jax.Array],
  ) -> LossOutput:
    result = loss_fn(variables, batch, rngs)
    known = {
      name: metric
      for name, metric in {"loss": result.loss, **result.metrics}.items()
      if not metric[0].ndim
    }
    try:
      loss, more = _aggregate(known, losses, step)
    except KeyError as error:
      raise ValueError(
        f"Learner.losses: {error.args[0]!r} is not a scalar metric of the"
        f" model, which has {', '.join(known)}."
      ) from None
    return result._replace(
      loss=loss,
      metrics={**result.metrics, **more, "model_loss": result.loss},
    )

  return compute_combined


def _aggregate(
  known: Metrics, losses: learner_lib.Losses, step: ArrayLike
) -> tuple[metrics_lib.Weighted, Metrics]:
  """Returns the minimized loss and the factors that depend on the step."""
  if not isinstance(losses, Mapping):
    found = losses.aggregate(known, step=step)
    shapes = [jnp.shape(x) for x in found]
    if shapes != [(), ()]:
      raise ValueError(
        f"Learner.losses: {type(losses).__name__}.aggregate must return two"
        f" scalars, (sum, weight), got the shapes {shapes}."
      )
    return found, {}
  weight = known["loss"][1]
  total, more = jnp.zeros_like(known["loss"][0]), {}
  for name, factor in losses.items():
    value, count = known[name]
    if callable(factor):
      factor = jnp.asarray(factor(step), jnp.float32)
      if factor.ndim:
        raise ValueError(
          f"Learner.losses[{name!r}] must return a scalar for a step, got the"
          f" shape {factor.shape}."
        )
      more[f"loss_factor/{name}"] = metrics_lib.scalar(factor)
    total += factor * value * (weight / divisor(count))
  return (total, weight), more


def find_targets(metrics: Metrics) -> tuple[jax.Array, Metrics]:
  """Returns whether a batch has targets, and its metrics.

  A batch without targets has no loss: the weight of the loss is zero.
  """
  total, weight = metrics["loss"]
  if TARGETS not in metrics:
    return weight != 0, metrics
  has_targets = (weight != 0) & (metrics[TARGETS][0] != 0)
  loss = total, jnp.where(has_targets, weight, 0)
  others = {name: x for name, x in metrics.items() if name != TARGETS}
  return has_targets, {**others, "loss": loss}


def divisor(weight: jax.Array) -> jax.Array:
  """Returns the divisor of a sum of losses: its weight, or 1 if that is 0."""
  # A batch with only padding has weight 0 and must not make parameters NaN.
  return jnp.where(weight == 0, jnp.ones_like(weight), weight)
