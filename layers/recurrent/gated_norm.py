"""Root-mean-square norm with a gate, of recurrent layers.

  gate first (Mamba-2):       norm(x * activation(gate)) * scale
  norm first (delta net):     norm(x) * scale * activation(gate)

Heads are normalized in groups of adjacent ones.
"""

from collections.abc import Callable

from flax import linen as nn
from flax.linen import dtypes
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from paxon.layers import precision
from paxon.sharding import axes, checks, logical


class GatedRmsNorm(nn.Module):
  """Normalizes the heads of a layer, together or in groups.

  Attributes:
    num_groups: Groups of heads that are normalized separately; `None` is each
      head alone.
    gate_first: Whether the gate multiplies the input of the norm, not its
      output.
    activation: Applied to the gate.
    share_scale: Whether all heads have one scale [P] instead of [N,P].
    epsilon: Added to the mean square.
    dtype: Dtype of the result. `None` promotes input and scale.
    param_dtype: Dtype in which the scale is stored.
  """

  num_groups: int | None = 1
  gate_first: bool = True
  activation: Callable[[jax.Array], jax.Array] = nn.silu
  share_scale: bool = False
  epsilon: float = 1e-5
  dtype: DTypeLike | None = None
  param_dtype: DTypeLike = jnp.float32

  def __post_init__(self) -> None:
    super().__post_init__()
    checks.check_size(self, "num_groups")
    checks.check_interval(self, "(0, 1)", "epsilon")

  @nn.compact
  def __call__(
    self,
    x: Float[Array, "batch length heads head_dim"],
    gate: Float[Array, "batch length heads head_dim"],
  ) -> Float[Array, "batch length heads head_dim"]:
    """Returns the gated and normalized heads.

    Raises:
      ValueError: `num_groups` does not divide the heads.
    """
    heads = x.shape[2]
    num_groups = self.num_groups or heads
    if heads % num_groups:
      raise ValueError(
        f"GatedRmsNorm.num_groups ({self.num_groups}) must divide the {heads}"
        " heads of its input."
      )
    names = (axes.HEAD_DIM,)
    if not self.share_scale:
      names = (axes.HEADS, *names)
    scale = self.param(
      "scale",
      logical.partitioned(nn.initializers.ones, names),
      x.shape[-len(names) :],
      self.param_dtype,
    )
    dtype = dtypes.canonicalize_dtype(gate, scale, dtype=self.dtype)
    x, gate = precision.widen(x), precision.widen(gate)
    wide = jnp.promote_types(x.dtype, gate.dtype)
    x, gate = x.astype(wide), self.activation(gate.astype(wide))
    if self.gate_first:
      x *= gate
    # XLA:CPU takes longer for arrays with an axis of one group.
    split = (num_groups, -1) if num_groups > 1 else (-1,)
    grouped = x.reshape(*x.shape[:2], *split)
    mean_square = jnp.mean(grouped * grouped, axis=-1, keepdims=True)
    grouped *= jax.lax.rsqrt(mean_square + self.epsilon)
    x = grouped.reshape(x.shape)
    scale = scale.astype(wide)
    x *= scale.reshape((1,) * (4 - scale.ndim) + scale.shape)
    return (x if self.gate_first else x * gate).astype(dtype)
