"""Group norm: normalizes groups of features within each example.

Wu and He 2018, https://arxiv.org/abs/1803.08494. Groups are adjacent features;
statistics are over all positions of an example, or, if `cumulative`, over
positions up to the current one (causal). Masked positions are ignored.
"""

from flax import linen as nn
from flax.linen import dtypes
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from paxon.layers.norms import moments, norm_scale
from paxon.sharding import axes, checks


class GroupNorm(nn.Module):
  """Normalizes [B,T,D], [B,H,W,D] or [B,T,H,W,D].

  Attributes:
    num_groups: Number of groups, a divisor of the number of features; fewer if
      groups would be smaller than `min_group_size`.
    min_group_size: Minimum number of features in a group.
    cumulative: Whether statistics are cumulative along time (axis 1).

  The other attributes are those of `LayerNorm`.
  """

  num_groups: int = 32
  min_group_size: int = 1
  cumulative: bool = False
  epsilon: float = 1e-3
  use_scale: bool = True
  use_bias: bool = True
  scale_init: nn.initializers.Initializer = nn.initializers.ones
  scale_offset: float = 0.0
  bias_init: nn.initializers.Initializer = nn.initializers.zeros
  dtype: DTypeLike | None = None
  param_dtype: DTypeLike = jnp.float32

  def __post_init__(self) -> None:
    super().__post_init__()
    checks.check_size(self, "num_groups", "min_group_size")
    checks.check_interval(self, "(0, 1)", "epsilon")

  @nn.compact
  def __call__(
    self,
    x: Float[Array, "batch *positions embed"],
    mask: Bool[Array, "batch time"] | None = None,
  ) -> Float[Array, "batch *positions embed"]:
    """Returns the normalized `x`.

    Args:
      x: Input of rank 3, 4 or 5.
      mask: True for positions (axis 1) to keep; others become zero. `None`
        keeps all.

    Raises:
      ValueError: The rank is another one, or the groups do not divide the
        features.
    """
    if x.ndim not in (3, 4, 5):
      raise ValueError(
        f"GroupNorm needs an input of rank 3, 4 or 5, got shape {x.shape}."
      )
    features, groups = x.shape[-1], self._find_num_groups(x.shape[-1])
    scale = norm_scale.make_scale(self, features, axes.EMBED)
    bias = norm_scale.make_bias(self, features)
    dtype = dtypes.canonicalize_dtype(x, scale, bias, dtype=self.dtype)
    if mask is not None:
      # Padding may be NaN, and zero times NaN is NaN in the gradient.
      x = jnp.where(_as_rank(mask, x.ndim), x, 0)
    grouped = x.reshape(*x.shape[:-1], groups, -1)
    kept = None if mask is None else _as_rank(mask, grouped.ndim)
    first = 2 if self.cumulative else 1
    mean, variance = moments.moments(
      grouped,
      kept,
      axes=(*range(first, x.ndim - 1), x.ndim),
      cumulative_axis=1 if self.cumulative else None,
    )
    y = (grouped.astype(mean.dtype) - mean) * jax.lax.rsqrt(
      variance + self.epsilon
    )
    y = y.reshape(x.shape)
    y = norm_scale.apply_scale(y, scale, self.scale_offset, bias)
    if mask is not None:
      y = jnp.where(_as_rank(mask, y.ndim), y, 0)
    return y.astype(dtype)

  def _find_num_groups(self, features: int) -> int:
    """Returns the number of groups."""
    size = max(features // self.num_groups, self.min_group_size)
    whole = features % self.num_groups == 0 or features < self.num_groups
    if not whole or features % size:
      raise ValueError(
        f"{features} features must divide into GroupNorm.num_groups "
        f"({self.num_groups}) and by min_group_size ({self.min_group_size})."
      )
    return features // size


def _as_rank(mask: jax.Array, rank: int) -> jax.Array:
  """Returns the mask of [B,T] with trailing axes of size one."""
  return mask.reshape(mask.shape + (1,) * (rank - mask.ndim))
