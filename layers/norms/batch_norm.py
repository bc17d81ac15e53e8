"""Batch norm: normalizes each feature over the batch.

Ioffe and Szegedy 2015, https://arxiv.org/abs/1502.03167. Training normalizes by
the moments of the global batch and updates their running averages,

  average = decay * average + (1 - decay) * moment,

which evaluation uses. The forward pass replaces the averages; those of
microbatches are averaged (`sharding.variables`).
"""

from flax import linen as nn
from flax.linen import dtypes
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from paxon.layers import precision
from paxon.layers.norms import moments, norm_scale
from paxon.sharding import axes, checks, variables

COLLECTION = "batch_stats"


class BatchNorm(nn.Module):
  """Normalizes the last axis over all others.

  Attributes:
    decay: Decay of the running averages.
    frozen: Whether training also normalizes by the averages and keeps them, for
      pretrained layers.

  The other attributes are those of `LayerNorm`; averages are float32.
  """

  decay: float = 0.999
  epsilon: float = 1e-3
  frozen: bool = False
  use_scale: bool = True
  use_bias: bool = True
  scale_init: nn.initializers.Initializer = nn.initializers.ones
  scale_offset: float = 0.0
  bias_init: nn.initializers.Initializer = nn.initializers.zeros
  dtype: DTypeLike | None = None
  param_dtype: DTypeLike = jnp.float32

  def __post_init__(self) -> None:
    super().__post_init__()
    checks.check_interval(self, "[0, 1]", "decay")
    checks.check_interval(self, "(0, 1)", "epsilon")

  @nn.compact
  def __call__(
    self,
    x: Float[Array, "batch *positions embed"],
    mask: Bool[Array, "batch *positions"] | None = None,
    *,
    deterministic: bool = True,
  ) -> Float[Array, "batch *positions embed"]:
    """Returns the normalized `x`.

    Args:
      x: Input of any rank.
      mask: True for positions to keep; others become zero. `None` keeps all.
      deterministic: False (training) normalizes by the moments of the batch and
        updates the averages if their collection is mutable.
    """
    features = x.shape[-1]
    mean = self._average("mean", nn.initializers.zeros, features)
    variance = self._average("variance", nn.initializers.ones, features)
    scale = norm_scale.make_scale(self, features, axes.EMBED)
    bias = None
    bias = norm_scale.make_bias(self, features)
    dtype = dtypes.canonicalize_dtype(x, scale, bias, dtype=self.dtype)
    kept = None if mask is None else mask[..., None]
    if kept is not None:
      # Padding may be NaN, and zero times NaN is NaN in the gradient.
      x = jnp.where(kept, x, 0)
    if deterministic or self.frozen:
      used = moments.Moments(mean.value, variance.value)
    else:
      used = moments.moments(x, kept, axes=range(x.ndim - 1))
      if self.is_mutable_collection(COLLECTION) and not self.is_initializing():
        self._update(mean, used.mean)
        self._update(variance, used.variance)
    y = precision.widen(x)
    y -= norm_scale.to_features(used.mean, y)
    y *= jax.lax.rsqrt(norm_scale.to_features(used.variance, y, self.epsilon))
    y = norm_scale.apply_scale(y, scale, self.scale_offset, bias)
    if kept is not None:
      y = jnp.where(kept, y, 0)
    return y.astype(dtype)

  def _average(
    self, name: str, init: nn.initializers.Initializer, features: int
  ) -> nn.Variable:
    boxed = variables.make_boxed_init(
      init, (axes.EMBED,), shape=(features,), dtype=jnp.float32
    )
    return self.variable(COLLECTION, name, boxed)

  def _update(self, average: nn.Variable, moment: jax.Array) -> None:
    moment = jax.lax.stop_gradient(moment).reshape(-1).astype(jnp.float32)
    average.value = self.decay * average.value + (1 - self.decay) * moment
