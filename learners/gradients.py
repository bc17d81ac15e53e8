"""Gradients of the mean loss, optionally accumulated over microbatches.

The accumulated gradient equals that of the whole batch: gradients of the *sum*
of losses are added, then divided once by the total weight. Averaging the means
of microbatches would give tokens in microbatches with more padding a larger
weight.
"""

from collections.abc import Callable, Sequence
import dataclasses
from typing import Final, TypeAlias

import jax
import jax.numpy as jnp
import optax

from paxon.learners import (
  combining,
  loss_function,
  microbatches,
  optimizer_state,
  variable_groups,
)
from paxon.learners import metrics as metrics_lib
from paxon.sharding import checks, logical
from paxon.sharding import variables as variables_lib

_Group = variable_groups.Group
_Tree: TypeAlias = variable_groups.Tree

# Name of the metric.
NOISE_SCALE: Final = "gradient_noise_scale"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variables:
  """The variables of a model by update rule.

  Attributes:
    params: Optimized variables.
    overwritten: Variables whose gradient is their next value.
    constant: All other variables, replaced or frozen.
  """

  params: _Tree
  overwritten: _Tree
  constant: _Tree


def group_variables(
  variables: _Tree, *, specs: variable_groups.Specs
) -> Variables:
  """Returns all variables of a model by update rule."""

  def select(*groups: variable_groups.Group) -> _Tree:
    return variable_groups.select(variables, *groups, specs=specs)

  return Variables(
    params=select(_Group.OPTIMIZED),
    overwritten=select(_Group.OVERWRITTEN),
    constant=select(_Group.REPLACED, _Group.FROZEN),
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gradients:
  """Gradients, new values and metrics of one batch.

  Attributes:
    params: Gradients of the mean loss, float32.
    overwritten: Next values; zero if the loss did not depend on the variable.
    new_collections: Collections returned by the forward pass.
    metrics: Metrics of the batch.
  """

  params: _Tree
  overwritten: _Tree
  new_collections: _Tree
  metrics: loss_function.Metrics


GradientFn: TypeAlias = Callable[
  [Variables, metrics_lib.Batch, dict[str, jax.Array]], Gradients
]


def make_checked(gradient_fn: GradientFn) -> GradientFn:
  """Returns a function of a `learner.GradientRule` that checks its results."""

  def checked_fn(
    variables: Variables,
    batch: metrics_lib.Batch,
    rngs: dict[str, jax.Array],
  ) -> Gradients:
    result = gradient_fn(variables, batch, rngs)
    if not isinstance(result, Gradients):
      raise TypeError(
        "Learner.gradient_rule must return Gradients, got"
        f" {type(result).__name__}."
      )
    if "loss" not in result.metrics:
      raise ValueError(
        "Learner.gradient_rule must return Gradients with the metric 'loss',"
        f" got {', '.join(result.metrics) or 'none'}."
      )
    shapes, found = (
      {
        jax.tree_util.keystr(path, simple=True, separator="/"): x.shape
        for path, x in jax.tree_util.tree_leaves_with_path(tree)
      }
      for tree in (variables.params, result.params)
    )
    for name in shapes | found:
      if shapes.get(name) != found.get(name):
        raise ValueError(
          f"Learner.gradient_rule must return a gradient of the shape"
          f" {shapes.get(name)} for {name}, got {found.get(name)}."
        )
    params = optimizer_state.as_float32(result.params)
    return dataclasses.replace(result, params=params)

  return checked_fn


@dataclasses.dataclass(frozen=True, kw_only=True)
class SharpnessAware:
  """Gradients at the point of a ball around the parameters with largest loss.

    e = radius * g / |g|, with the gradient g at the parameters p
    gradient = that at p + e

  Foret et al. 2020, https://arxiv.org/abs/2010.01412, with a ball of the L2
  norm. A step takes two gradients; metrics are those at p + e, and
  `unperturbed_loss` is the loss at p.

  Attributes:
    radius: Radius of the ball over all optimized variables.
  """

  radius: float = 0.05

  def __post_init__(self) -> None:
    checks.check_positive(self, "radius")

  def make_gradient_fn(
    self,
    loss_fn: loss_function.LossFn,
    *,
    make_default: Callable[[loss_function.LossFn], GradientFn],
    specs: variable_groups.Specs,
  ) -> GradientFn:
    """Returns the gradient function (`learner.GradientRule`)."""
    del specs
    default = make_default(loss_fn)

    def gradient_fn(
      variables: Variables,
      batch: metrics_lib.Batch,
      rngs: dict[str, jax.Array],
    ) -> Gradients:
      first = default(variables, batch, rngs)
      norm = optax.tree.norm(first.params)
      # A gradient of zero has no direction.
      scale = self.radius / jnp.where(norm == 0, 1.0, norm)
      moved = jax.tree.map(
        lambda p, g: (p.astype(jnp.float32) + scale * g).astype(p.dtype),
        variables.params,
        first.params,
      )
      second = default(
        dataclasses.replace(variables, params=moved), batch, rngs
      )
      metrics = {**second.metrics, "unperturbed_loss": first.metrics["loss"]}
      return dataclasses.replace(second, metrics=metrics)

    return gradient_fn


def make_gradient_fn(
  loss_fn: loss_function.LossFn,
  *,
  metric_fns: Sequence[metrics_lib.MetricFn],
  num_microbatches: int,
  specs: variable_groups.Specs,
  measure_noise: bool = False,
) -> GradientFn:
  """Returns `(variables, batch, rngs) -> Gradients`.

  With several microbatches, run sequentially so that only one microbatch's
  activations are in memory, the random keys of `loss_fn` are those of the batch
  folded with the index of the microbatch.

  `measure_noise` adds the metric `gradient_noise_scale`, see
  `learner.Learner`, which needs several microbatches.
  """
  if num_microbatches == 1:
    return _make_whole(loss_fn, metric_fns, _average_loss)
  return _make_accumulated(
    loss_fn, metric_fns, num_microbatches, specs, measure_noise
  )


def _make_accumulated(
  loss_fn: loss_function.LossFn,
  metric_fns: Sequence[metrics_lib.MetricFn],
  num_microbatches: int,
  specs: variable_groups.Specs,
  measure_noise: bool,
) -> GradientFn:
  sum_gradient_fn = _make_whole(
    loss_fn, metric_fns, _sum_loss, measure_noise=measure_noise
  )

  def gradient_fn(
    variables: Variables,
    batch: metrics_lib.Batch,
    rngs: dict[str, jax.Array],
  ) -> Gradients:
    parts, shared = microbatches.split(batch, num_microbatches=num_microbatches)

    def add_one(
      total: _Tree, indexed: tuple[jax.Array, dict[str, jax.Array]]
    ) -> tuple[_Tree, tuple[_Tree, _Tree, loss_function.Metrics]]:
      index, part = indexed
      keys = {k: jax.random.fold_in(key, index) for k, key in rngs.items()}
      one = sum_gradient_fn(variables, part | shared, keys)
      total = jax.tree.map(jnp.add, total, one.params)
      new = variables_lib.unbox(one.new_collections)
      others = one.overwritten, new, one.metrics
      return _shard_like_params(total, specs), others

    zeros = jax.tree.map(
      lambda p: jnp.zeros(p.shape, jnp.float32), variables.params
    )
    total, (overwritten, new, metrics) = jax.lax.scan(
      add_one,
      _shard_like_params(zeros, specs),
      (jnp.arange(num_microbatches), parts),
    )
    metrics = metrics_lib.add(metrics)
    divisor = loss_function.divisor(metrics["loss"][1])
    mean = jax.tree.map(lambda x: x / divisor, total)
    if measure_noise:
      size = next(x.shape[0] for x in batch.values() if x.ndim)
      metrics[NOISE_SCALE] = _estimate_noise_scale(
        metrics[NOISE_SCALE], mean, size=size
      )
    return Gradients(
      params=mean,
      overwritten=combining.combine_overwritten(overwritten, specs=specs),
      new_collections=combining.combine_replaced(
        new, old=variables.constant, specs=specs
      ),
      metrics=metrics,
    )

  return gradient_fn


def _make_whole(
  loss_fn: loss_function.LossFn,
  metric_fns: Sequence[metrics_lib.MetricFn],
  reduce: Callable[[metrics_lib.Weighted], jax.Array],
  *,
  measure_noise: bool = False,
) -> GradientFn:
  """Returns gradients of `reduce(loss)` of a whole batch.

  With `measure_noise` the metric `gradient_noise_scale` is the squared norm of
  the gradient of the mean loss; `reduce` must then be `_sum_loss`.
  """

  def gradient_fn(
    variables: Variables,
    batch: metrics_lib.Batch,
    rngs: dict[str, jax.Array],
  ) -> Gradients:
    def objective(
      params: _Tree, overwritten: _Tree
    ) -> tuple[jax.Array, loss_function.LossOutput]:
      merged = variable_groups.merge(params, overwritten, variables.constant)
      result = loss_fn(merged, batch, rngs)
      return reduce(result.loss), result

    (params, overwritten), result = jax.grad(
      objective, argnums=(0, 1), has_aux=True
    )(variables.params, variables.overwritten)
    metrics = loss_function.measure(result, metric_fns=metric_fns, batch=batch)
    params = optimizer_state.as_float32(params)
    if measure_noise:
      weight = loss_function.divisor(result.loss[1])
      square = optax.tree.norm(params, squared=True) / jnp.square(weight)
      metrics[NOISE_SCALE] = metrics_lib.scalar(square)
    return Gradients(
      params=params,
      overwritten=overwritten,
      new_collections=result.new_collections,
      metrics=metrics,
    )

  return gradient_fn


def _average_loss(loss: metrics_lib.Weighted) -> jax.Array:
  total, weight = loss
  return total / loss_function.divisor(weight)


def _sum_loss(loss: metrics_lib.Weighted) -> jax.Array:
  return loss[0]


def _estimate_noise_scale(
  squares: metrics_lib.Weighted, mean: _Tree, *, size: int
) -> metrics_lib.Weighted:
  """Returns estimates of tr(covariance) and |gradient|^2.

  Their quotient is the noise scale; pairs of several steps are added, because
  estimates of one step are noisy and may be negative (McCandlish et al. 2018,
  https://arxiv.org/abs/1812.06162, appendix A.1).

  Args:
    squares: Sum of the squared norms of the gradients of microbatches, and
      their number.
    mean: Gradient of the batch.
    size: Number of sequences of the batch.
  """
  total, count = squares
  small = size / count
  small_sq_norm, large_sq_norm = (
    total / count,
    optax.tree.norm(mean, squared=True),
  )
  gradient = (size * large_sq_norm - small * small_sq_norm) / (size - small)
  noise = (small_sq_norm - large_sq_norm) / (1 / small - 1 / size)
  return noise, gradient


def _shard_like_params(params: _Tree, specs: variable_groups.Specs) -> _Tree:
  """Shards accumulated gradients like the parameters."""
  return variable_groups.map_paths(logical.constrain_stored, params, specs)
