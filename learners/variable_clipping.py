"""Clipping of all variables together, of each one, and of each layer of one.

  by_global_norm   x min(1, max_norm / |all|)
  by_norm          x min(1, max_norm / |x|)      |x| = sqrt(sum x^2)
  by_rms           x min(1, max_rms / rms(x))    rms(x) = sqrt(mean x^2)

For the last two, a stacked variable holds one value per layer along its leading
axes, and each is clipped alone, as it would be in a model that is not stacked.
Clipping of updates by their RMS is part of Adafactor (Shazeer & Stern 2018,
https://arxiv.org/abs/1804.04235, section 6).
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from paxon.learners import variable_groups


def by_global_norm(tree: Any, *, max_norm: float) -> Any:
  """Returns the arrays, scaled down together to a norm of at most `max_norm`.

  One scalar is computed and multiplied in. A quotient per element, as
  `optax.clip_by_global_norm` has it, is a pass over all arrays of its own: XLA
  stores it rather than divide again in each moment of the optimizer.

  Args:
    tree: float32 arrays.
    max_norm: Of all of them.
  """
  share = max_norm / jnp.maximum(optax.tree.norm(tree), max_norm)
  return jax.tree.map(lambda x: x * share, tree)


def by_norm(
  tree: Any, *, max_norm: float, specs: variable_groups.Specs | None = None
) -> Any:
  """Returns the arrays, each scaled down to a norm of at most `max_norm`.

  Args:
    tree: float32 arrays.
    max_norm: Of one variable of one layer.
    specs: Of these variables; `None` takes each array for one layer.
  """

  def clip(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    norm = jnp.sqrt(jnp.sum(jnp.square(x), axis=axes, keepdims=True))
    return x * jnp.minimum(1.0, max_norm / jnp.maximum(norm, max_norm))

  return _map(clip, tree, specs)


def by_rms(
  tree: Any, *, max_rms: float, specs: variable_groups.Specs | None = None
) -> Any:
  """Returns the arrays, each scaled down to an RMS of at most `max_rms`.

  Args:
    tree: float32 arrays.
    max_rms: Of one variable of one layer.
    specs: Of these variables; `None` takes each array for one layer.
  """

  def clip(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    return x / jnp.maximum(1.0, rms(x, axes) / max_rms)

  return _map(clip, tree, specs)


def scale_by_rms(
  tree: Any,
  params: Any,
  *,
  min_rms: float,
  specs: variable_groups.Specs | None = None,
) -> Any:
  """Returns the arrays times the RMS of their parameters.

  Args:
    tree: float32 arrays.
    params: The parameters, float32.
    min_rms: Taken in place of a smaller RMS, so that zeros can be left.
    specs: Of these variables; `None` takes each array for one layer.
  """

  def scale(x: jax.Array, axes: tuple[int, ...], param: jax.Array) -> jax.Array:
    return x * jnp.maximum(rms(param, axes), min_rms)

  return _map(scale, tree, specs, params)


def rms(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
  """Returns the root of the mean square over `axes`, which are kept."""
  return jnp.sqrt(jnp.mean(jnp.square(x), axis=axes, keepdims=True))


def _map(
  fn: Any, tree: Any, specs: variable_groups.Specs | None, *rest: Any
) -> Any:
  """Maps `fn(leaf, axes of one layer's value, *leaves of rest)`."""
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
