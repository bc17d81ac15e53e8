"""Gradients with differential privacy: clipping per example, and noise.

DP-SGD (Abadi et al. 2016, https://arxiv.org/abs/1607.00133): the gradient of
each example, of its mean loss, is clipped to the norm C, and the mean over the
N examples of a batch gets Gaussian noise,

  g = (sum_i g_i min(1, C / |g_i|) + noise_multiplier C z) / N,   z ~ N(0, I)

so that no example changes a model by much. Everything after that, such as an
optimizer, needs no further care. Ways to clip:

  PER_EXAMPLE        all gradients of a microbatch are in memory
  PER_LAYER          each of M variables of a layer is clipped to C / sqrt(M)
  PER_LAYER_SCALED   to C sqrt(size of the variable / size of all)
  GHOST              two backward passes: norms without gradients, see
                     `layers.ghost_norms`, then one gradient of the weighted sum

A group of `examples_per_clip` successive examples, such as augmented copies of
one, can be clipped as one example.

The noise is derived from the seed and the step, like all random keys. How much
privacy this gives is computed by `privacy_accounting`.
"""

from collections.abc import Callable, Mapping, Sequence
import math
import re
from typing import Any, TypeAlias
import zlib

from flax import traverse_util
import jax
import jax.numpy as jnp

from paxon.learners import gradients as gradients_lib
from paxon.learners import loss_function, optimizer_state, variable_groups
from paxon.learners import metrics as metrics_lib
from paxon.learners import privacy as privacy_lib
from paxon.sharding import axes, logical, shards
from paxon.sharding import variables as variables_lib

_Clipping = privacy_lib.Clipping
_Group = variable_groups.Group
_Path: TypeAlias = tuple[str, ...]
_Flat: TypeAlias = dict[_Path, Any]
_UnitLoss: TypeAlias = Callable[
  [Sequence[variable_groups.Tree], dict[str, jax.Array], dict[str, jax.Array]],
  tuple[jax.Array, loss_function.Metrics],
]


def make_gradient_fn(
  loss_fn: loss_function.LossFn,
  *,
  metric_fns: Sequence[metrics_lib.MetricFn],
  privacy: privacy_lib.Privacy,
  num_microbatches: int,
  specs: variable_groups.Specs,
) -> gradients_lib.GradientFn:
  """Returns `(variables, batch, rngs) -> Gradients`, clipped and with noise.

  The random keys must have the stream `privacy.STREAM`. The result does not
  depend on `num_microbatches`, except for rounding. There are two more metrics:
  `privacy/grad_norm`, the mean norm of the gradients of examples before
  clipping, and `privacy/clipped`, the share of clipped ones. Neither they nor
  the loss are private.

  Raises:
    ValueError: A variable is updated without an optimizer, or has no ghost
      norm.
  """
  _check_variables(specs)
  clip = _Clip(privacy, specs)
  unit_size = privacy.examples_per_clip

  def gradient_fn(
    variables: gradients_lib.Variables,
    batch: metrics_lib.Batch,
    rngs: dict[str, jax.Array],
  ) -> gradients_lib.Gradients:
    rngs = dict(rngs)
    noise_key = rngs.pop(privacy_lib.STREAM)
    parts, shared, count = _split(batch, unit_size, num_microbatches)
    loss = _make_unit_loss(loss_fn, metric_fns, variables.constant, shared)

    def clip_one(
      indexed: tuple[jax.Array, dict[str, jax.Array]],
    ) -> tuple[_Flat, loss_function.Metrics]:
      indices, units = indexed
      # Of the whole batch, so microbatches change no key.
      keys = {
        name: jax.vmap(jax.random.fold_in, (None, 0))(key, indices)
        for name, key in rngs.items()
      }
      return clip(loss, variables, units, keys)

    microbatches = jnp.arange(count).reshape(-1, num_microbatches).T, parts
    if num_microbatches == 1:
      total, metrics = clip_one(jax.tree.map(lambda x: x[0], microbatches))
    else:
      total, metrics = _sum_microbatches(
        clip_one, microbatches, params=variables.params, place=clip.place
      )
    total = clip.add_noise(total, noise_key, count)
    return gradients_lib.Gradients(
      params=traverse_util.unflatten_dict(total),
      overwritten=jax.tree.map(jnp.zeros_like, variables.overwritten),
      new_collections={},
      metrics=metrics,
    )

  return gradient_fn


def _make_unit_loss(
  loss_fn: loss_function.LossFn,
  metric_fns: Sequence[metrics_lib.MetricFn],
  constant: variable_groups.Tree,
  shared: dict[str, jax.Array],
) -> _UnitLoss:
  """Returns `(trees, unit, keys) -> (mean loss, metrics)` of one unit.

  The variables are `constant` and the trees; `shared` are the scalars of the
  batch.
  """

  def compute_loss(
    trees: Sequence[variable_groups.Tree],
    unit: dict[str, jax.Array],
    keys: dict[str, jax.Array],
  ) -> tuple[jax.Array, loss_function.Metrics]:
    unit = unit | shared
    result = loss_fn(variable_groups.merge(*trees, constant), unit, keys)
    total, weight = result.loss
    metrics = loss_function.measure(result, metric_fns=metric_fns, batch=unit)
    return total / loss_function.divisor(weight), metrics

  return compute_loss


def _sum_microbatches(
  clip_one: Callable[[Any], tuple[_Flat, loss_function.Metrics]],
  microbatches: Any,
  *,
  params: variable_groups.Tree,
  place: Callable[[_Flat], _Flat],
) -> tuple[_Flat, loss_function.Metrics]:
  """Returns the sums of `clip_one` over stacked microbatches.

  `place` shards the gradients of `params`.
  """

  def add_one(total: _Flat, microbatch: Any) -> tuple[_Flat, Any]:
    clipped, metrics = clip_one(microbatch)
    total = {path: total[path] + clipped[path] for path in total}
    return place(total), metrics

  zeros = {
    path: jnp.zeros(p.shape, jnp.float32)
    for path, p in _flatten(params).items()
  }
  total, metrics = jax.lax.scan(add_one, place(zeros), microbatches)
  return total, metrics_lib.add(metrics)


class _Clip:
  """Sums of clipped gradients of the units of a microbatch."""

  def __init__(
    self, privacy: privacy_lib.Privacy, specs: variable_groups.Specs
  ) -> None:
    self._privacy = privacy
    optimized = variable_groups.select(specs, _Group.OPTIMIZED, specs=specs)
    self._specs: _Flat = traverse_util.flatten_dict(optimized)
    self._materialized: frozenset[_Path] = frozenset()
    if privacy.clipping is _Clipping.GHOST:
      self._materialized = _find_materialized(privacy, self._specs, specs)

  def __call__(
    self,
    loss: _UnitLoss,
    variables: gradients_lib.Variables,
    units: dict[str, jax.Array],
    keys: dict[str, jax.Array],
  ) -> tuple[_Flat, loss_function.Metrics]:
    """Returns the sum over units, float32, and the metrics."""
    if self._privacy.clipping is _Clipping.GHOST:
      return self._clip_by_ghost_norms(loss, variables, units, keys)

    def gradient(
      params: variable_groups.Tree, unit: Any, keys: Any
    ) -> tuple[variable_groups.Tree, loss_function.Metrics]:
      return jax.grad(
        lambda params: loss((params, variables.overwritten), unit, keys),
        has_aux=True,
      )(params)

    found, metrics = shards.map_examples(gradient, in_axes=(None, 0, 0))(
      variables.params, units, keys
    )
    found = _flatten(optimizer_state.as_float32(found))
    squares = {path: self._sum_squares(path, g) for path, g in found.items()}
    total = jnp.sum(jnp.concatenate(list(squares.values()), axis=1), axis=1)
    norms = jnp.sqrt(total)
    limits = self._limits()
    if limits is None:
      factor = _clip_factor(norms, self._privacy.clip_norm)
      factors = dict.fromkeys(found, factor)
      is_clipped = factor < 1
    else:
      factors = {
        path: _clip_factor(jnp.sqrt(squares[path]), limits[path])
        for path in found
      }
      every = jnp.concatenate(list(factors.values()), axis=1)
      is_clipped = jnp.any(every < 1, axis=1)
    clipped = {}
    for path, g in found.items():
      factor = factors[path]
      if factor.ndim == 1:
        clipped[path] = _weighted_sum(factor, g)
        continue
      layers = jax.vmap(_weighted_sum, in_axes=1)(
        factor, self._join_layers(path, g)
      )
      clipped[path] = layers.reshape(g.shape[1:])
    return clipped, _sum_metrics(metrics, norms, is_clipped)

  def _clip_by_ghost_norms(
    self,
    loss: _UnitLoss,
    variables: gradients_lib.Variables,
    units: dict[str, jax.Array],
    keys: dict[str, jax.Array],
  ) -> tuple[_Flat, loss_function.Metrics]:
    params: _Flat = traverse_util.flatten_dict(variables.params)
    others = {p: x for p, x in params.items() if p not in self._materialized}
    count = jax.tree.leaves(units)[0].shape[0]
    # One for each unit, for a gradient for each.
    own = jax.tree.map(
      lambda x: jnp.broadcast_to(x, (count, *x.shape)),
      (
        {path: params[path] for path in self._materialized},
        variables.overwritten,
      ),
    )

    def losses(others: _Flat, own: Any) -> tuple[jax.Array, Any]:
      def one(own: Any, unit: Any, keys: Any) -> tuple[jax.Array, Any]:
        small, sites = own
        values = traverse_util.unflatten_dict(others | small)
        return loss((values, sites), unit, keys)

      return shards.map_examples(one)(own, units, keys)

    values, pull, metrics = jax.vjp(losses, others, own, has_aux=True)
    # What is not used of the first backward pass, the compiler removes.
    _, (small, ghosts) = pull(jnp.ones_like(values))
    small = optimizer_state.as_float32(small)
    squares = [
      jnp.sum(jnp.square(g), axis=tuple(range(1, g.ndim)))
      for g in small.values()
    ]
    squares += [
      jnp.sum(ghost, axis=tuple(range(1, ghost.ndim)))
      for ghost in jax.tree.leaves(ghosts)
    ]
    norms = jnp.sqrt(sum(squares, jnp.zeros(count)))
    factors = _clip_factor(norms, self._privacy.clip_norm)
    clipped, _ = pull(factors.astype(values.dtype))
    clipped = optimizer_state.as_float32(clipped)
    clipped |= {path: _weighted_sum(factors, g) for path, g in small.items()}
    return clipped, _sum_metrics(metrics, norms, factors < 1)

  def place(self, params: _Flat) -> _Flat:
    """Shards gradients like the parameters."""
    return {
      path: logical.constrain_stored(x, self._specs[path])
      for path, x in params.items()
    }

  def add_noise(self, total: _Flat, key: jax.Array, count: int) -> _Flat:
    """Returns the mean over `count` units with noise, float32."""
    scale = self._privacy.clip_norm * self._privacy.noise_multiplier

    def add(x: jax.Array, key: jax.Array, axes: Any) -> jax.Array:
      noise = scale * jax.random.normal(key, x.shape, jnp.float32)
      return (x + logical.constrain(noise, axes)) / count

    result = {}
    for path, x in total.items():
      spec = self._specs[path]
      # crc32, because Python's hash() differs between processes.
      own_key = jax.random.fold_in(key, zlib.crc32(spec.name.encode()))
      if not scale:
        result[path] = x / count
      elif not spec.stacked:
        result[path] = add(x, own_key, spec.axes)
      else:
        # In place, one layer at a time: the random bits of all layers take as
        # much memory as the gradient.
        keys = jax.random.split(own_key, x.shape[0])

        def add_to_layer(
          i: jax.Array, x: jax.Array, keys: Any = keys, spec: Any = spec
        ) -> jax.Array:
          return x.at[i].set(add(x[i], keys[i], spec.axes[1:]))

        result[path] = jax.lax.fori_loop(0, x.shape[0], add_to_layer, x)
    return result

  def _limits(self) -> dict[_Path, float] | None:
    """Returns the largest norm of each variable of a layer."""
    clipping, limit = self._privacy.clipping, self._privacy.clip_norm
    match clipping:
      case _Clipping.PER_LAYER:
        count = sum(_num_layers(spec) for spec in self._specs.values())
        return dict.fromkeys(self._specs, limit / math.sqrt(count))
      case _Clipping.PER_LAYER_SCALED:
        whole = sum(math.prod(spec.shape) for spec in self._specs.values())
        return {
          path: limit * math.sqrt(math.prod(spec.layer_shape) / whole)
          for path, spec in self._specs.items()
        }
    return None

  def _join_layers(self, path: _Path, gradient: jax.Array) -> jax.Array:
    """Returns [units, layers, ...]."""
    spec = self._specs[path]
    return gradient.reshape(-1, _num_layers(spec), *spec.layer_shape)

  def _sum_squares(self, path: _Path, gradient: jax.Array) -> jax.Array:
    """Returns the squared norms [units, layers]."""
    x = self._join_layers(path, gradient)
    return jnp.sum(jnp.square(x), axis=tuple(range(2, x.ndim)))


def _clip_factor(norms: jax.Array, limit: float) -> jax.Array:
  # Also right for a norm of zero; NaN stays NaN and shows.
  return 1 / jnp.maximum(1, norms / limit)


def _weighted_sum(factors: jax.Array, gradients: jax.Array) -> jax.Array:
  """Returns the sum over the first axis of the gradients [units, ...]."""
  return jnp.tensordot(
    factors, gradients, 1, precision=jax.lax.Precision.HIGHEST
  )


def _sum_metrics(
  metrics: loss_function.Metrics, norms: jax.Array, is_clipped: jax.Array
) -> loss_function.Metrics:
  """Returns the metrics of all units, with metrics of clipping."""
  weight = jnp.ones_like(norms)
  metrics = metrics | {
    "privacy/grad_norm": (norms, weight),
    "privacy/clipped": (is_clipped.astype(jnp.float32), weight),
  }
  return metrics_lib.add(metrics)


def _flatten(tree: variable_groups.Tree) -> _Flat:
  flat: Any = traverse_util.flatten_dict(tree)
  return flat


def _num_layers(spec: variables_lib.VariableSpec) -> int:
  return math.prod(spec.shape[: len(spec.stacked)])


def _split(
  batch: metrics_lib.Batch, unit_size: int, num_microbatches: int
) -> tuple[dict[str, jax.Array], dict[str, jax.Array], int]:
  """Returns microbatches of units, scalars, and the number of units.

  Arrays have the shape [microbatches, units, examples, ...]. Microbatch i of k
  has the units i, i + k, i + 2k ..., see `microbatches`.

  Raises:
    ValueError: The batch does not divide.
  """
  arrays = {name: x for name, x in batch.items() if x.ndim}
  count = 0
  for name, x in arrays.items():
    whole = unit_size * num_microbatches
    if x.shape[0] % whole:
      raise ValueError(
        f"The {x.shape[0]} examples of batch[{name!r}] are not a multiple of"
        f" {whole}: Privacy.examples_per_clip ({unit_size}) times"
        f" num_microbatches ({num_microbatches})."
      )
    count = x.shape[0] // unit_size
    x = x.reshape(-1, num_microbatches, unit_size, *x.shape[1:])
    x = jnp.moveaxis(x, 1, 0)
    names = (None, axes.BATCH, None, axes.LENGTH)[: x.ndim]
    arrays[name] = logical.constrain(x, names + (None,) * (x.ndim - len(names)))
  return arrays, {n: x for n, x in batch.items() if not x.ndim}, count


def _check_variables(specs: variable_groups.Specs) -> None:
  for path, spec in _flatten(specs).items():
    if path[0] == variables_lib.GHOST:
      continue
    group = variable_groups.find_group(spec)
    if group in (_Group.REPLACED, _Group.OVERWRITTEN):
      raise ValueError(
        f"Learner.privacy: {spec.name} is {group.value} in each step by values"
        " that depend on single examples without noise; use a model without"
        " such variables (batch norms, delayed scales)."
      )


def _find_materialized(
  privacy: privacy_lib.Privacy, optimized: _Flat, specs: variable_groups.Specs
) -> frozenset[_Path]:
  """Returns the variables whose gradient is computed for each example.

  Raises:
    ValueError: A large variable has no ghost norm, or several.
  """
  sites: dict[_Path, list[str]] = {}
  ghosts: Mapping[Any, Any] = traverse_util.flatten_dict(
    {k: v for k, v in specs.items() if k == variables_lib.GHOST}
  )
  for path, spec in ghosts.items():
    # ghost/<layer>/einsum/<parameter>/squared_norm
    owner = ("params", *path[1:-3], path[-2])
    sites.setdefault(owner, []).append(spec.name)
  found = set()
  for path, spec in optimized.items():
    mine = sites.get(path, [])
    if any(
      re.fullmatch(pattern, spec.name) for pattern in privacy.materialized
    ):
      if mine:
        raise ValueError(
          f"Privacy.materialized: {spec.name} has a ghost norm already; exclude"
          " it from the patterns."
        )
      found.add(path)
    elif (
      not mine and math.prod(spec.layer_shape) <= privacy.max_materialized_size
    ):
      found.add(path)
    elif len(mine) != 1:
      what = f"has several: {', '.join(mine)}" if mine else "has none"
      raise ValueError(
        f"Clipping.GHOST requires a ghost norm of {spec.name}, shape"
        f" {spec.layer_shape} in each layer, which {what}. Its layer must"
        " multiply it once, through its field `einsum` (or look it up through"
        " `lookup`), and the experiment must set Learner.privacy. Or add the"
        " name to Privacy.materialized, which takes memory for one gradient an"
        " example, or use Clipping.PER_EXAMPLE."
      )
  return frozenset(found)
