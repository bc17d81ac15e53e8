"""Residual connections with stochastic depth (drop path).

  training:    x + residual_weight * kept / (1 - rate) * branch
  evaluation:  x + residual_weight * branch

where `kept` is one or zero for each sequence (Huang et al. 2016,
https://arxiv.org/abs/1603.09382). Documents of a packed sequence are kept or
dropped together. Later layers may be dropped more often (`LinearRate`).
"""

from collections.abc import Callable
import dataclasses

from flax import linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from paxon.layers import precision
from paxon.sharding import checks

# `(layer_index) -> rate`; see `stack.Stack.pass_layer_index`.
Rate = Callable[[jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class LinearRate:
  """Layer `i` of `num_layers` is dropped at the rate `rate * i / num_layers`.

  Attributes:
    rate: Limit of the rate.
    num_layers: Number of layers.
  """

  rate: float
  num_layers: int

  def __post_init__(self) -> None:
    checks.check_size(self, "num_layers")
    checks.check_interval(self, "[0, 1)", "rate")

  def __call__(self, layer_index: jax.Array) -> jax.Array:
    """Returns the rate of a layer, float32."""
    return layer_index.astype(jnp.float32) * (self.rate / self.num_layers)


class StochasticResidual(nn.Module):
  """Adds a branch to the residual stream, or drops it at random.

  Attributes:
    rate: Probability in `[0, 1)` that a branch is dropped (one minus the
      survival probability), or a function of the layer index.
    residual_weight: Factor of the branch.
    rng_collection: The random stream.
  """

  rate: float | Rate = 0.0
  residual_weight: float = 1.0
  rng_collection: str = "dropout"

  def __post_init__(self) -> None:
    super().__post_init__()
    if not callable(self.rate):
      checks.check_interval(self, "[0, 1)", "rate")

  @nn.compact
  def __call__(
    self,
    x: Float[Array, "batch *positions embed"],
    branch: Float[Array, "batch *positions embed"],
    layer_index: Int[Array, ""] | None = None,
    *,
    deterministic: bool = True,
  ) -> Float[Array, "batch *positions embed"]:
    """Returns the residual stream with the branch, or without.

    Raises:
      ValueError: The rate depends on the layer index, and there is none.
    """
    dtype = precision.at_least_float32(branch.dtype)
    factor = jnp.full((1,) * x.ndim, self.residual_weight, dtype)
    if not deterministic and self.rate != 0:
      survival = 1 - self._rate(layer_index)
      shape = (x.shape[0], *(1,) * (x.ndim - 1))
      key = self.make_rng(self.rng_collection)
      kept = jax.random.bernoulli(key, survival, shape)
      factor = jnp.where(kept, factor / survival.astype(dtype), 0)
    return x + branch * factor.astype(branch.dtype)

  def _rate(self, layer_index: jax.Array | None) -> jax.Array:
    if not callable(self.rate):
      return jnp.float32(self.rate)
    if layer_index is None:
      raise ValueError(
        "StochasticResidual.rate needs a layer index; set"
        " Stack.pass_layer_index=True."
      )
    return self.rate(layer_index)
