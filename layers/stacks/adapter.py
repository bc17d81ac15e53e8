"""Residual adapters: small bottleneck networks, one for each task.

  branch = up[task] activation(down[task] norm(x) + down_bias) + up_bias

Houlsby et al. 2019, https://arxiv.org/abs/1902.00751. `ResidualAdapter` adds
the branch to its input. `AdaptedFeedForward` adds it to the output y of a
feed-forward layer, as a function of y (sequential) or of the layer's input x
(parallel; He et al. 2022, https://arxiv.org/abs/2110.04366). To train adapters
only, set `Experiment.trainable` to their names.

`up` begins at zero, so an adapter begins as the identity.

Einsum letters: B batch, T length, D embed, R rank, K tasks.
"""

from collections.abc import Callable
import enum
from typing import ClassVar

from flax import linen as nn
from flax.linen import dtypes
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from paxon.layers import token_context
from paxon.layers.stacks import block
from paxon.sharding import axes, checks, logical

_down_init = nn.initializers.variance_scaling(
  1.0, "fan_in", "truncated_normal", in_axis=1, out_axis=2, batch_axis=0
)


class Placement(enum.Enum):
  """The input of the adapter of a feed-forward layer."""

  # The output of the layer.
  SEQUENTIAL = "sequential"
  # The input of the layer; of a block, after its norm.
  PARALLEL = "parallel"


class ResidualAdapter(nn.Module):
  """Adds the branch of each task's bottleneck to the tokens.

  Attributes:
    rank: Width of the bottleneck, R.
    num_tasks: Number of tasks, K.
    norm: Maps [B,T,D] to [B,T,D] before the bottleneck, such as `LayerNorm`;
      `None` is the identity.
    activation: Applied to the bottleneck.
    down_init: Initializer of the kernels [K,D,R].
    up_init: Initializer of the kernels [K,R,D].
    bias_init: Initializer of the biases [K,R] and [K,D].
    dtype: Dtype of the computation. `None` promotes input and parameters.
    param_dtype: Dtype in which the parameters are stored.
  """

  rank: int
  num_tasks: int = 1
  norm: nn.Module | None = None
  activation: Callable[[jax.Array], jax.Array] = nn.relu
  down_init: nn.initializers.Initializer = _down_init
  up_init: nn.initializers.Initializer = nn.initializers.zeros
  bias_init: nn.initializers.Initializer = nn.initializers.zeros
  dtype: DTypeLike | None = None
  param_dtype: DTypeLike = jnp.float32

  def __post_init__(self) -> None:
    super().__post_init__()
    checks.check_size(self, "rank", "num_tasks")

  def __call__(
    self,
    x: Float[Array, "batch length embed"],
    tasks: Int[Array, "*positions"] | None = None,
  ) -> Float[Array, "batch length embed"]:
    """Returns the tokens with the branch; see `branch`."""
    return x + self.branch(x, tasks).astype(x.dtype)

  @nn.compact
  def branch(
    self,
    x: Float[Array, "batch length embed"],
    tasks: Int[Array, "*positions"] | None = None,
  ) -> Float[Array, "batch length embed"]:
    """Returns the branch.

    Args:
      x: The tokens.
      tasks: The task of each sequence or of each token, from 0; any other
        number has a branch of zero. `None` is the only task.

    Raises:
      ValueError: `tasks` is missing although there are several, or its shape
        does not fit.
    """
    if tasks is None:
      if self.num_tasks > 1:
        raise ValueError(
          f"ResidualAdapter.num_tasks is {self.num_tasks}, so the adapter needs"
          " the tasks [batch] or [batch, length] of its input, got none."
        )
      tasks = jnp.zeros(x.shape[:1], jnp.int32)
    if tasks.shape not in (x.shape[:1], x.shape[:2]):
      raise ValueError(
        f"ResidualAdapter needs tasks of shape {x.shape[:1]} or {x.shape[:2]},"
        f" got {tasks.shape}."
      )
    sizes = {"tasks": self.num_tasks, "rank": self.rank, "embed": x.shape[-1]}
    if self.norm is not None:
      x = self.norm(x)
    x, down, down_bias, up, up_bias = dtypes.promote_dtype(
      x,
      self._param("down", self.down_init, sizes, "embed", "rank"),
      self._param("down_bias", self.bias_init, sizes, "rank"),
      self._param("up", self.up_init, sizes, "rank", "embed"),
      self._param("up_bias", self.bias_init, sizes, "embed"),
      dtype=self.dtype,
    )
    chosen = jax.nn.one_hot(tasks, self.num_tasks, dtype=x.dtype)
    if tasks.ndim == 1:
      # The kernels of each sequence: their size does not depend on T.
      down, up = (jnp.einsum("BK,K...->B...", chosen, w) for w in (down, up))
      down_bias, up_bias = ((chosen @ b)[:, None] for b in (down_bias, up_bias))
      hidden = jnp.einsum("BTD,BDR->BTR", x, down) + down_bias
      return jnp.einsum("BTR,BRD->BTD", self.activation(hidden), up) + up_bias
    # The bottlenecks of all tasks, which are small, for each token.
    hidden = jnp.einsum("BTD,KDR->BTKR", x, down) + down_bias[None, None]
    hidden = self.activation(hidden) * chosen[..., None]
    return jnp.einsum("BTKR,KRD->BTD", hidden, up) + chosen @ up_bias

  def _param(
    self,
    name: str,
    init: nn.initializers.Initializer,
    sizes: dict[str, int],
    *dims: str,
  ) -> jax.Array:
    names = {"rank": axes.RANK, "embed": axes.EMBED}
    init = logical.partitioned(
      init,
      (None, *(names[dim] for dim in dims)),
      regularized=len(dims) == 2,
      read_dtype=self.dtype,
    )
    shape = tuple(sizes[dim] for dim in ("tasks", *dims))
    return self.param(name, init, shape, self.param_dtype)


class AdaptedFeedForward(nn.Module):
  """A feed-forward layer with an adapter, for any block.

  Blocks have no tasks: there, the adapter has one.

  Attributes:
    feed_forward: Maps [B,T,D] to [B,T,D], such as `GatedFeedForward`.
    adapter: Its branch is added to the output.
    placement: The input of the adapter.
  """

  feed_forward: nn.Module
  adapter: ResidualAdapter
  placement: Placement = Placement.SEQUENTIAL

  takes_segment_ids: ClassVar[bool] = True

  def __call__(
    self,
    x: Float[Array, "batch length embed"],
    tasks: Int[Array, "*positions"] | None = None,
    *,
    segment_ids: Int[Array, "batch length"] | None = None,
    deterministic: bool = True,
  ) -> Float[Array, "batch length embed"]:
    """Returns the sum of layer and adapter.

    Args:
      x: The tokens.
      tasks: As for `ResidualAdapter`.
      segment_ids: Passed to feed-forward layers that take them.
      deterministic: Disables dropout.
    """
    context = token_context.TokenContext(
      segment_ids=segment_ids, deterministic=deterministic
    )
    feed_forward = block.bind_feed_forward(self.feed_forward, context)
    y = feed_forward(x)
    is_parallel = self.placement is Placement.PARALLEL
    branch = self.adapter.branch(x if is_parallel else y, tasks)
    return y + branch.astype(y.dtype)
