"""Updates of variables without an optimizer.

The gradient of an fp8 scale is its next value; the forward pass returns the
next values of running statistics.
"""

from typing import Any

from flax import traverse_util
import jax
import jax.numpy as jnp

from paxon.learners import variable_groups
from paxon.sharding import axes
from paxon.sharding import variables as variables_lib

# The loss may depend on some slices along these axes and not on others.
_INDEPENDENT_AXES = (axes.LAYERS, axes.STAGES, axes.EXPERTS)


def overwrite(
  old: variable_groups.Tree,
  gradients: variable_groups.Tree,
  *,
  specs: variable_groups.Specs,
) -> dict[str, Any]:
  """Returns the gradients as the next values, where they are not all zero.

  If the loss does not depend on a variable in this step (an expert without
  tokens, a branch not taken), its gradient is exactly zero, and a scale of zero
  would make the next step divide by zero. Such a variable, or its slice for one
  layer or expert, keeps its value.
  """
  return variable_groups.map_paths(_reached_or_old, old, gradients, specs)


def replace(
  old: variable_groups.Tree,
  new: variable_groups.Tree,
  *,
  specs: variable_groups.Specs,
) -> dict[str, Any]:
  """Returns `old` with the values that the forward pass returned.

  `new` may be incomplete.

  Raises:
    ValueError: `new` has a variable whose update rule is not `replace`.
  """
  result = traverse_util.flatten_dict(old)
  flat_specs: dict[Any, Any] = traverse_util.flatten_dict(specs)
  for path, value in traverse_util.flatten_dict(
    variables_lib.unbox(new)
  ).items():
    spec = flat_specs.get(path)
    if spec is None or (
      variable_groups.find_group(spec) is not variable_groups.Group.REPLACED
    ):
      known = "is not one of the model's variables"
      rule = (
        known if spec is None else f"has the update rule {spec.update.value}"
      )
      raise ValueError(
        f"The forward pass returned {'/'.join(path)}, which {rule}; only"
        " variables with the rule 'replace' may be returned."
      )
    result[path] = value
  return traverse_util.unflatten_dict(result)


def is_reached(
  gradient: jax.Array, spec: variables_lib.VariableSpec
) -> jax.Array:
  """Returns whether the gradient of each layer, stage and expert is nonzero.

  Booleans of the gradient's rank, of size one in all other dimensions.
  """
  inner = tuple(
    i for i, axis in enumerate(spec.axes) if axis not in _INDEPENDENT_AXES
  )
  return jnp.any(gradient != 0, axis=inner, keepdims=True)


def _reached_or_old(
  old: jax.Array, gradient: jax.Array, spec: variables_lib.VariableSpec
) -> jax.Array:
  return jnp.where(
    jnp.broadcast_to(is_reached(gradient, spec), old.shape),
    gradient.astype(old.dtype),
    old,
  )
