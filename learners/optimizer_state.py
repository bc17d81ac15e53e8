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
  the parameter. It must be a scalar, or have the shape of the parameter with
  size one in dimensions over which it is averaged. It has the axes of the
  parameter, except in dimensions of size one; other arrays have no axes.

  Raises:
    ValueError: An array that belongs to a parameter has another shape.
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
  if owner is None or not leaf.shape:
    return variables.VariableSpec(
      name=name,
      shape=leaf.shape,
      dtype=leaf.dtype,
      axes=(None,) * len(leaf.shape),
    )
  if len(leaf.shape) != len(owner.shape) or any(
    size not in (1, whole)
    for size, whole in zip(leaf.shape, owner.shape, strict=True)
  ):
    raise ValueError(
      f"{name} has the shape {leaf.shape} and belongs to {owner.name} of shape"
      f" {owner.shape}; a state must have the parameter's shape, or size one in"
      " the dimensions that it has no use for."
    )
  return variables.VariableSpec(
    name=name,
    shape=leaf.shape,
    dtype=leaf.dtype,
    axes=tuple(
      axis if size == whole else None
      for axis, size, whole in zip(
        owner.axes, leaf.shape, owner.shape, strict=True
      )
    ),
    stacked=owner.stacked,
  )
