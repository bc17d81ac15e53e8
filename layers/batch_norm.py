"""Batch norm: each feature with its mean and variance over the batch.

Ioffe and Szegedy 2015, https://arxiv.org/abs/1502.03167. Training normalizes by
the moments of the batch and moves averages of them,

  average = decay * average + (1 - decay) * moment,

by which evaluation normalizes. The moments are those of the whole batch, over
all devices: a sum over a sharded axis is one. The averages are variables that
the forward pass replaces; microbatches each move them from the same values, and
their mean is kept (`sharding.variables`).
"""

from flax import linen as nn
from flax.linen import dtypes
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from paxon.layers import moments, norm_scale, precision
from paxon.sharding import axes, checks, logical, variables

COLLECTION = "batch_stats"


class BatchNorm(nn.Module):
  """Normalizes the last axis over all others.

  Attributes:
    decay: Share of an average that stays in each step.
    epsilon: Added to the variance.
    frozen: Whether training, too, normalizes by the averages and leaves them,
      as for a pretrained part.
    use_scale: Whether there is a factor per feature.
    use_bias: Whether a learned value is added to each feature.
    scale_init: Initializer of the factor.
    scale_offset: Added to what is stored to get the factor. Pax stores the
      factor less one, so that weight decay pulls it to one.
    bias_init: Initializer of the bias.
    dtype: Dtype of the result. `None` promotes input and parameters.
    param_dtype: Dtype in which the parameters are stored; the averages are
      float32.
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
      x: Of any rank.
      mask: What counts; `None` is everything. What does not becomes zero.
      deterministic: False trains: normalizes by the moments of this batch, and
        moves the averages where their collection is mutable.
    """
    features = x.shape[-1]
    mean = self._average("mean", nn.initializers.zeros, features)
    variance = self._average("variance", nn.initializers.ones, features)
    scale = norm_scale.stored(self, features, axes.EMBED)
    bias = None
    if self.use_bias:
      init = logical.partitioned(self.bias_init, (axes.EMBED,))
      bias = self.param("bias", init, (features,), self.param_dtype)
    dtype = dtypes.canonicalize_dtype(x, scale, bias, dtype=self.dtype)
    kept = None if mask is None else mask[..., None]
    if kept is not None:
      # Padding may hold anything, and a gradient of zero times NaN is NaN.
      x = jnp.where(kept, x, 0)
    if deterministic or self.frozen:
      known = moments.Moments(mean.value, variance.value)
    else:
      known = moments.moments(x, kept, axes=range(x.ndim - 1))
      if self.is_mutable_collection(COLLECTION) and not self.is_initializing():
        self._move(mean, known.mean)
        self._move(variance, known.variance)
    y = precision.widened(x)
    y -= norm_scale.over_features(known.mean, y)
    y *= jax.lax.rsqrt(
      norm_scale.over_features(known.variance, y, self.epsilon)
    )
    y = norm_scale.scaled(y, scale, self.scale_offset)
    if bias is not None:
      y += norm_scale.over_features(bias, y)
    if kept is not None:
      y = jnp.where(kept, y, 0)
    return y.astype(dtype)

  def _average(
    self, name: str, init: nn.initializers.Initializer, features: int
  ) -> nn.Variable:
    boxed = variables.boxed(
      init, (axes.EMBED,), shape=(features,), dtype=jnp.float32
    )
    return self.variable(COLLECTION, name, boxed)

  def _move(self, average: nn.Variable, moment: jax.Array) -> None:
    moment = jax.lax.stop_gradient(moment).reshape(-1).astype(jnp.float32)
    average.value = self.decay * average.value + (1 - self.decay) * moment
