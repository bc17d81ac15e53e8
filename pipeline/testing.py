"""Small blocks for tests of pipelines."""

from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp

from paxon.layers import linear
from paxon.layers import testing as layers_testing
from paxon.layers.stacks import shared
from paxon.sharding import axes

BATCH, LENGTH, EMBED = 8, 3, 4


@jax.custom_vjp
def record_scale(x: jax.Array, scale: jax.Array) -> jax.Array:
  """Returns `x`; the "gradient" of `scale` is its next value.

  Args:
    x: Any shape.
    scale: [1]; its next value is the largest magnitude of x's gradient.
  """
  del scale
  return x


record_scale.defvjp(
  lambda x, scale: (x, None), lambda _, g: (g, jnp.max(jnp.abs(g))[None])
)


class Mixing(nn.Module):
  """A layer that uses every kind of argument.

  Its gradient at zeros is NaN, which bubbles must not add.

  Attributes:
    out: Maps [B,T,F] to [B,T,D].
  """

  out: nn.Module

  @nn.compact
  def __call__(
    self,
    x: jax.Array,
    positions: jax.Array,
    table: jax.Array,
    *,
    layer_index: jax.Array | None = None,
  ) -> jax.Array:
    """Returns `x` and a branch that depends on all arguments.

    Args:
      x: Float [B,T,D].
      positions: Int [B,T].
      table: Float [T,1], without a batch axis.
      layer_index: Index of the layer.
    """
    normed = x / jnp.sqrt(jnp.sum(x * x, axis=-1, keepdims=True))
    hidden = linear.Linear(6, name="up")(normed)
    phase = positions.astype(x.dtype)[:, :, None] + table[None]
    if layer_index is not None:
      phase = phase + layer_index.astype(x.dtype)
    return x + self.out(jnp.tanh(hidden) * jnp.cos(phase))


def mixing(*, tied: bool = False) -> Mixing:
  """Returns the layer; `tied` shares `out` between all layers."""
  out = linear.Linear(EMBED, kernel_axes=(axes.MLP, axes.EMBED))
  return Mixing(shared.shared("out", out) if tied else out)


def arguments(batch: int = BATCH) -> tuple[jax.Array, ...]:
  """Returns arguments of the layer."""
  return (
    layers_testing.normal(batch, LENGTH, EMBED),
    layers_testing.make_positions(batch, LENGTH),
    layers_testing.normal(LENGTH, 1, seed=2),
  )


def as_float64(tree: Any) -> Any:
  """Casts floats to float64; 64-bit types must be enabled."""

  def wide(x: jax.Array) -> jax.Array:
    is_float = jnp.issubdtype(x.dtype, jnp.floating)
    return x.astype(jnp.float64) if is_float else x

  return jax.tree.map(wide, tree)
