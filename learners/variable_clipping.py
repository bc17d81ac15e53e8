"""Clipping by global norm, and by norm or RMS per variable and layer.

  clip_by_global_norm   x min(1, max_norm / |all|)
  clip_by_norm          x min(1, max_norm / |x|)      |x| = sqrt(sum x^2)
  clip_by_rms           x min(1, max_rms / rms(x))    rms(x) = sqrt(mean x^2)

`clip_by_norm` and `clip_by_rms` clip each layer of a stacked variable
separately, as in a model without a stack. Clipping of updates by RMS is part of
Adafactor (Shazeer & Stern 2018, https://arxiv.org/abs/1804.04235, section 6).
Arrays are float32; `specs` None treats each array as one layer.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from paxon.learners import variable_groups


def clip_by_global_norm(tree: Any, *, max_norm: float) -> Any:
  """Returns the arrays, scaled down to a global norm of at most `max_norm`.

  All arrays are multiplied by one scalar. The division per element of
  `optax.clip_by_global_norm` costs an extra pass over all arrays, because XLA
  stores its result for the moments of the optimizer.
  """
  share = max_norm / jnp.maximum(optax.tree.norm(tree), max_norm)
  return jax.tree.map(lambda x: x * share, tree)


def clip_by_norm(
  tree: Any, *, max_norm: float, specs: variable_groups.Specs | None = None
) -> Any:
  """Returns the arrays, each scaled down to a norm of at most `max_norm`."""

  def clip(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    norm = jnp.sqrt(jnp.sum(jnp.square(x), axis=axes, keepdims=True))
    return x * jnp.minimum(1.0, max_norm / jnp.maximum(norm, max_norm))

  return map_layers(clip, tree, specs)


def clip_by_rms(
  tree: Any, *, max_rms: float, specs: variable_groups.Specs | None = None
) -> Any:
  """Returns the arrays, each scaled down to an RMS of at most `max_rms`."""

  def clip(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    return x / jnp.maximum(1.0, rms(x, axes) / max_rms)

  return map_layers(clip, tree, specs)


def scale_by_rms(
  tree: Any,
  params: Any,
  *,
  min_rms: float,
  specs: variable_groups.Specs | None = None,
) -> Any:
  """Returns the arrays times the RMS of their parameters.

  The RMS is at least `min_rms`, so that zero parameters can change.
  """

  def scale(x: jax.Array, axes: tuple[int, ...], param: jax.Array) -> jax.Array:
    return x * jnp.maximum(rms(param, axes), min_rms)

  return map_layers(scale, tree, specs, params)


def rms(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
  """Returns the root mean square over `axes`, with size one in them."""
  return jnp.sqrt(jnp.mean(jnp.square(x), axis=axes, keepdims=True))


def map_layers(
  fn: Any, tree: Any, specs: variable_groups.Specs | None, *rest: Any
) -> Any:
  """Returns `fn(leaf, axes within one layer, *leaves of rest)` of each leaf."""
  if specs is None:
    depths = jax.tree.map(lambda _: 0, tree)
  else:
    depths = jax.tree.map(lambda spec: len(spec.stacked), specs)
  return jax.tree.map(
    lambda x, depth, *others: fn(x, tuple(range(depth, x.ndim)), *others),
    tree,
    depths,
    *rest,
  )
