"""Auxiliary losses of layers, such as load balancing of experts.

A layer subclasses `Source` and calls `auxiliary_loss.add(self, "balance",
value)`; the model's `loss` adds the sum over all layers. Values are sown into a
separate collection, so they pass through scan and rematerialization with their
gradients. The collection is mutable in training and evaluation; in decoding it
is not, and XLA removes the computation.
"""

from collections.abc import Mapping, Sequence
import dataclasses
from typing import Any

from flax import linen as nn
from flax import traverse_util
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from paxon.layers import precision
from paxon.layers.stacks import shared
from paxon.sharding import variables

COLLECTION = "auxiliary_losses"

Weighted = tuple[jax.Array, jax.Array]
_LEFT, _RIGHT, _LAYERS = "left", "right", "layers"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Product:
  """A loss of all layers together: the inner product of their means.

    sum(mean over layers of left * mean over layers of right)

  Attributes:
    left: One factor of this layer [N], with the factor of the loss.
    right: The other factor [N].
  """

  left: jax.Array
  right: jax.Array


class Source:
  """Base class of layers with an auxiliary loss."""


def add(module: nn.Module, name: str, value: ArrayLike | Product) -> None:
  """Adds a scalar to the loss of the model; values of several calls are summed.

  The loss of a `Product` is that of all layers with this name.

  Args:
    module: The layer, bound; a `Source`.
    name: Name of the value, distinct from parameters and submodules. The metric
      is `auxiliary_loss/<name>`, summed over all layers.
    value: Mean over the tokens of the batch, already multiplied by its factor.

  Raises:
    TypeError: The module is not a `Source`.
    ValueError: The value is not a scalar.
  """
  kind = type(module).__name__
  if not isinstance(module, Source):
    raise TypeError(
      f"{kind} adds the auxiliary loss {name!r}, so it must be a subclass of "
      "auxiliary_loss.Source."
    )
  if isinstance(value, Product):
    parts = {_LEFT: value.left, _RIGHT: value.right, _LAYERS: jnp.ones(())}
    if not module.is_initializing():
      widened = {key: precision.widen(x) for key, x in parts.items()}
      module.sow(COLLECTION, name, widened)
    return
  value = jnp.asarray(value)
  if value.ndim:
    raise ValueError(
      f"The auxiliary loss {name!r} of {kind} must be a scalar, got shape "
      f"{value.shape}."
    )
  # Otherwise they would become variables of the model.
  if not module.is_initializing():
    module.sow(COLLECTION, name, precision.widen(value))


def collect(
  model: nn.Module, *, factor: float, weight: jax.Array
) -> tuple[jax.Array, dict[str, Weighted]]:
  """Returns the sum of the auxiliary losses of a model, and metrics.

  Args:
    model: Bound model whose layers have been called.
    factor: Factor of all auxiliary losses; 0 disables them.
    weight: Weight of the model's loss, in at least float32.

  Returns:
    The value to add to the weighted sum of the loss, and metrics without
    `factor`.

  Raises:
    ValueError: A layer has an auxiliary loss, but the collection is not
      mutable.
  """
  none = jnp.zeros((), weight.dtype)
  if model.is_initializing():
    return none, {}
  if not model.is_mutable_collection(COLLECTION):
    source = _find_source(model)
    if source is not None and factor:
      raise ValueError(
        f"{type(source).__name__} adds an auxiliary loss; apply the model with "
        f'mutable=["{COLLECTION}"], or set '
        f"{type(model).__name__}.auxiliary_loss_weight to 0."
      )
    return none, {}
  sown: Any = variables.unbox(model.variables.get(COLLECTION, {}))
  by_name: dict[str, jax.Array] = {}
  products: dict[str, list[dict[str, jax.Array]]] = {}
  flat: dict[Any, Any] = traverse_util.flatten_dict(sown)
  for path, values in flat.items():
    for value in values:
      if isinstance(value, dict):
        products.setdefault(path[-1], []).append(value)
        continue
      # One value per layer of a stack.
      value = jnp.sum(value).astype(weight.dtype)
      by_name[path[-1]] = by_name.get(path[-1], none) + value
  for name, parts in products.items():
    value = _multiply(parts).astype(weight.dtype)
    by_name[name] = by_name.get(name, none) + value
  metrics = {
    f"auxiliary_loss/{name}": (value * weight, weight)
    for name, value in by_name.items()
  }
  return factor * sum((v for v, _ in metrics.values()), none), metrics


def _multiply(parts: Sequence[Mapping[str, jax.Array]]) -> jax.Array:
  """Returns the loss of the products of all layers."""
  layers = sum(jnp.sum(each[_LAYERS]) for each in parts)

  def mean(key: str) -> jax.Array:
    # Layers of a stack are in leading dimensions.
    rows = [each[key].reshape(-1, each[key].shape[-1]) for each in parts]
    return jnp.sum(jnp.concatenate(rows), axis=0) / layers

  return jnp.sum(mean(_LEFT) * mean(_RIGHT))


def _find_source(module: nn.Module) -> nn.Module | None:
  """Returns a submodule with an auxiliary loss, if there is one."""
  if isinstance(module, Source):
    return module
  for _, part in shared.iterate_submodules(module):
    found = _find_source(part)
    if found is not None:
      return found
  return None
