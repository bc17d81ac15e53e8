"""Optimizer states in float32, sharded like their parameters."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from paxon.learners import variable_groups
from paxon.sharding import variables


def initial(
  transform: optax.GradientTransformation, params: variable_groups.Tree
) -> optax.OptState:
  """Returns the state before the first update; moments are float32."""
  return transform.init(as_float32(params))


def specs(
  transform: optax.GradientTransformation, params: variable_groups.Specs
) -> Any:
  """Returns a `VariableSpec` for each array of the optimizer state.

  An array belongs to a parameter if its path in the state ends with the path of
  the parameter. It has the axes of the parameter in the dimensions of the same
  size, if the others have size one. An array of another shape has only the
  parameter's stacked axes, and an array of no parameter has no axes.
  """
  state = jax.eval_shape(
    lambda: initial(
      transform,
      jax.tree.map(lambda spec: jnp.zeros(spec.shape, spec.dtype), params),
    )
  )
  owners = {
    _keys(path): spec
    for path, spec in jax.tree_util.tree_leaves_with_path(params)
  }
  return jax.tree_util.tree_map_with_path(
    lambda path, leaf: _spec(path, leaf, _owner(_keys(path), owners)), state
  )


def as_float32(tree: Any) -> Any:
  """Returns the arrays as float32."""
  return jax.tree.map(lambda x: x.astype(jnp.float32), tree)


def _keys(path: tuple[Any, ...]) -> tuple[str, ...]:
  return tuple(jax.tree_util.keystr((key,), simple=True) for key in path)


def _owner(
  keys: tuple[str, ...], owners: Mapping[tuple[str, ...], Any]
) -> variables.VariableSpec | None:
  """Returns the parameter with the longest path that `keys` ends with."""
  ends = (keys[i:] for i in range(len(keys)))
  return next((owners[end] for end in ends if end in owners), None)


def _spec(
  path: tuple[Any, ...],
  leaf: jax.ShapeDtypeStruct,
  owner: variables.VariableSpec | None,
) -> variables.VariableSpec:
  name = "opt_state/" + jax.tree_util.keystr(path, simple=True, separator="/")
  axes: tuple[str | None, ...] = (None,) * len(leaf.shape)
  stacked: tuple[tuple[str, int], ...] = ()
  if owner is not None:
    depth = len(owner.stacked)
    is_moment = len(leaf.shape) == len(owner.shape) and all(
      size in (1, whole)
      for size, whole in zip(leaf.shape, owner.shape, strict=True)
    )
    if is_moment:
      axes = tuple(
        axis if size == whole else None
        for axis, size, whole in zip(
          owner.axes, leaf.shape, owner.shape, strict=True
        )
      )
      stacked = owner.stacked
    elif depth and leaf.shape[:depth] == owner.shape[:depth]:
      axes = (*owner.axes[:depth], *axes[depth:])
      stacked = owner.stacked
  return variables.VariableSpec(
    name=name,
    shape=leaf.shape,
    dtype=leaf.dtype,
    axes=axes,
    stacked=stacked,
  )
