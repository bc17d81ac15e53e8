"""Combination of microbatch values of variables without an optimizer.

All microbatches of a step start from the same values. If they return the values
v_1 ... v_k for a variable with the value o, its `CombineRule` defines the
combined value:

             overwritten with gradient     replaced by the forward pass
  MEAN       mean of the v_i               mean of the v_i
  SUM        sum of the v_i                o + sum of the v_i - o
  MAX        max of the v_i                max of the v_i

A microbatch with a zero gradient of an overwritten variable (or of its slice
for one layer or expert) does not count. With MEAN, a replaced variable of an
integer dtype, such as a step count, gets the value of the last microbatch.
"""

from typing import Any

from flax import traverse_util
import jax
import jax.numpy as jnp

from paxon.learners import variable_groups, variable_updates
from paxon.sharding import variables as variables_lib

_Rule = variables_lib.CombineRule


def combine_overwritten(
  values: variable_groups.Tree, *, specs: variable_groups.Specs
) -> dict[str, Any]:
  """Returns one value per variable; zero if all its gradients are zero.

  `values` are the gradients of all microbatches, stacked along a new first
  axis.
  """
  return variable_groups.map_paths(_combine_overwritten, values, specs)


def combine_replaced(
  values: variable_groups.Tree,
  *,
  old: variable_groups.Tree,
  specs: variable_groups.Specs,
) -> dict[str, Any]:
  """Returns one value per variable that the forward pass returned.

  Args:
    values: Values of all microbatches, stacked along a new first axis.
    old: Values before the step.
    specs: Specs of the variables that may be replaced. Others are returned
      unchanged; `variable_updates.replace` rejects them.
  """
  flat_old: dict[Any, Any] = traverse_util.flatten_dict(old)
  flat_specs: dict[Any, Any] = traverse_util.flatten_dict(specs)
  flat_values: dict[Any, Any] = traverse_util.flatten_dict(values)
  return traverse_util.unflatten_dict(
    {
      path: _combine_replaced(value, flat_old[path], flat_specs[path])
      if path in flat_old and path in flat_specs
      else value[-1]
      for path, value in flat_values.items()
    }
  )


def _combine_overwritten(
  values: jax.Array, spec: variables_lib.VariableSpec
) -> jax.Array:
  reached = jnp.broadcast_to(
    jax.vmap(lambda value: variable_updates.is_reached(value, spec))(values),
    values.shape,
  )
  match spec.combine:
    case _Rule.MAX:
      least = jnp.asarray(jnp.finfo(values.dtype).min, values.dtype)
      top = jnp.max(jnp.where(reached, values, least), axis=0)
      return jnp.where(jnp.any(reached, axis=0), top, jnp.zeros_like(top))
    case _Rule.SUM:
      return jnp.sum(values, axis=0)
    case _Rule.MEAN:
      total = jnp.sum(values.astype(jnp.float32), axis=0)
      count = jnp.sum(reached.astype(jnp.float32), axis=0)
      return (total / jnp.maximum(count, 1)).astype(values.dtype)


def _combine_replaced(
  values: jax.Array, old: jax.Array, spec: variables_lib.VariableSpec
) -> jax.Array:
  match spec.combine:
    case _Rule.MAX:
      return jnp.max(values, axis=0)
    case _Rule.SUM:
      return old + jnp.sum(values - old[None], axis=0).astype(old.dtype)
    case _Rule.MEAN:
      if not jnp.issubdtype(values.dtype, jnp.floating):
        return values[-1]
      mean = jnp.mean(values.astype(jnp.float32), axis=0)
      return mean.astype(values.dtype)
