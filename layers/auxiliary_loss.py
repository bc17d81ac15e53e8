"""Losses that layers add themselves, such as a balance of experts.

A layer is a `Source` and calls `auxiliary_loss.add(self, "balance", value)`;
the model's `loss` adds the sum over all layers to its own. The values are
linen's sown ones in a collection of their own, so they pass through scan and
rematerialization with their gradients. The collection is mutable where a loss
is wanted, in training and evaluation; in decoding it is not, and the compiler
drops what only the values need.
"""

from typing import Any

from flax import linen as nn
from flax import traverse_util
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from paxon.layers import precision, shared
from paxon.sharding import variables

COLLECTION = "auxiliary_losses"

Weighted = tuple[jax.Array, jax.Array]


class Source:
  """A base of layers that add a loss, so that models know of it."""


def add(module: nn.Module, name: str, value: ArrayLike) -> None:
  """Adds a scalar to the loss of the model; several calls are summed.

  Args:
    module: The layer that speaks, bound; a `Source`.
    name: Of the value, unlike those of the module's parameters and children.
      The metric is `auxiliary_loss/<name>`, summed over all layers.
    value: A mean over the tokens of the batch, already times its factor. Its
      gradient is part of that of the model. It is added in float32.

  Raises:
    TypeError: The module is no `Source`.
    ValueError: The value is no scalar.
  """
  kind = type(module).__name__
  if not isinstance(module, Source):
    raise TypeError(
      f"{kind} adds the auxiliary loss {name!r}, so it must be a subclass of "
      "auxiliary_loss.Source too."
    )
  value = jnp.asarray(value)
  if value.ndim:
    raise ValueError(
      f"The auxiliary loss {name!r} of {kind} must be a scalar, got the shape "
      f"{value.shape}."
    )
  # Initial values would make them variables of the model.
  if not module.is_initializing():
    module.sow(COLLECTION, name, precision.widened(value))


def weighted(
  model: nn.Module, *, factor: float, weight: jax.Array
) -> tuple[jax.Array, dict[str, Weighted]]:
  """Returns what a model's loss gets from its layers.

  Args:
    model: Bound; its layers have been called.
    factor: Of all these losses in the model's; 0 leaves them out.
    weight: That of the model's loss, in at least float32.

  Returns:
    What to add to the sum of the model's loss, and metrics by name, without
    `factor`.

  Raises:
    ValueError: The values of a layer are not collected.
  """
  none = jnp.zeros((), weight.dtype)
  if model.is_initializing():
    return none, {}
  if not model.is_mutable_collection(COLLECTION):
    source = _source(model)
    if source is not None and factor:
      raise ValueError(
        f"{type(source).__name__} adds an auxiliary loss, which is not "
        f'collected; apply the model with mutable=["{COLLECTION}"], or set '
        f"{type(model).__name__}.auxiliary_loss_weight to 0."
      )
    return none, {}
  sown: Any = variables.unbox(model.variables.get(COLLECTION, {}))
  by_name: dict[str, jax.Array] = {}
  flat: dict[Any, Any] = traverse_util.flatten_dict(sown)
  for path, values in flat.items():
    for value in jax.tree.leaves(values):
      # One value for each layer of a stack.
      value = jnp.sum(value).astype(weight.dtype)
      by_name[path[-1]] = by_name.get(path[-1], none) + value
  metrics = {
    f"auxiliary_loss/{name}": (value * weight, weight)
    for name, value in by_name.items()
  }
  return factor * sum((v for v, _ in metrics.values()), none), metrics


def _source(module: nn.Module) -> nn.Module | None:
  """Returns a part of the module that adds a loss, if there is one."""
  if isinstance(module, Source):
    return module
  for _, part in shared.parts_of(module):
    found = _source(part)
    if found is not None:
      return found
  return None
