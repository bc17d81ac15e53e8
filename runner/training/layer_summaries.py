"""What layers have sown, as metrics of a training step.

A value of a scanned stack has one entry for each group of layers. It stays one
metric of several values, whose name says the layers' numbers (`weighted`).
"""

from collections.abc import Mapping
import re
from typing import Any

from flax import traverse_util
import jax
import jax.numpy as jnp

from paxon.layers import summaries
from paxon.learners import loss_function, variable_groups
from paxon.learners import metrics as metrics_lib
from paxon.sharding import axes, variables

_BLOCK = re.compile(r"blocks_(\d+)")
# A layer of a stack that fills no whole group.
_REST = re.compile(axes.LAYERS + r"_(\d+)")


def metrics(
  sown: Mapping[str, Any], *, specs: variable_groups.Specs
) -> loss_function.Metrics:
  """Returns `summaries/<path>/<name>` for each value.

  Args:
    sown: The collection as linen returns it: nested dicts of tuples with one
      value for each call.
    specs: Of the model's variables, which know the stacks' periods.
  """
  result = {}
  flat: dict[Any, Any] = traverse_util.flatten_dict(variables.unbox(sown))
  for path, values in flat.items():
    calls = jax.tree.leaves(values)
    names, num_stacked = _names(path, specs)
    name = "/".join((summaries.COLLECTION, *names))
    means = jnp.stack([_mean(name, value, num_stacked) for value in calls])
    result[name] = (jnp.sum(means, axis=0), jnp.float32(len(calls)))
  return result


def _mean(name: str, value: jax.Array, num_stacked: int) -> jax.Array:
  """Returns `value` with the dimensions of the stacks only."""
  if value.ndim < num_stacked:
    raise ValueError(
      f"The summary {name} has the shape {value.shape}, and its path leads"
      f" through {num_stacked} stacks; give no module the name of a stack's"
      " parts."
    )
  rest = tuple(range(num_stacked, value.ndim))
  return jnp.mean(value.astype(jnp.float32), axis=rest)


def _names(
  path: tuple[str, ...], specs: variable_groups.Specs
) -> tuple[list[str], int]:
  """Returns the parts of a metric's name, and how many count layers."""
  names: list[str] = []
  num_stacked = 0
  for i, part in enumerate(path):
    block, rest = _BLOCK.fullmatch(part), _REST.fullmatch(part)
    if block and i and path[i - 1] == axes.LAYERS:
      period = _period(path[:i], specs)
      names.append(metrics_lib.indexed(int(block[1]), period))
      num_stacked += 1
    elif rest:
      names += [axes.LAYERS, rest[1]]
    else:
      names.append(part)
  return names, num_stacked


def _period(path: tuple[str, ...], specs: variable_groups.Specs) -> int:
  """Returns how many blocks the group at `path` of a stack has."""
  blocks = set()
  for collection in specs.values():
    node = collection
    for part in path:
      node = node.get(part, {}) if isinstance(node, Mapping) else {}
    if isinstance(node, Mapping):
      blocks |= {name for name in node if _BLOCK.fullmatch(name)}
  return max((int(name.rpartition("_")[2]) + 1 for name in blocks), default=1)
