"""Feed-forward layers, gated and plain.

  gated: down(activation(gate(x)) * up(x))
  plain: down(activation(up(x) + up_bias)) + down_bias

With `nn.silu` the gated layer is SwiGLU, with `nn.gelu` GEGLU, with `nn.relu`
ReGLU (Shazeer 2020, https://arxiv.org/abs/2002.05202). Norm, residual and
dropout of the output belong to the block.

Einsum letters: B batch, T length, D embed, F mlp.
"""

from collections.abc import Callable
from typing import ClassVar

from flax import linen as nn
from flax.linen import dtypes
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from paxon.layers import remat
from paxon.quantization import products
from paxon.sharding import axes, checks, logical

_default_init = nn.initializers.variance_scaling(
  1.0, "fan_in", "truncated_normal"
)


class GatedFeedForward(nn.Module):
  """A gated feed-forward layer over the last axis of its input, without bias.

  Attributes:
    mlp_dim: Width of the hidden activation, after any 2/3 scaling.
    activation: Applied to the gate branch only.
    kernel_init: Initializer of all three kernels.
    dtype: Dtype of the computation. `None` promotes inputs and kernels.
    param_dtype: Dtype in which the kernels are stored.
    einsum: The matmul; replaced by quantization.
    dropout: Dropout of the hidden activation; `None` disables it.
  """

  mlp_dim: int
  activation: Callable[[jax.Array], jax.Array] = nn.silu
  kernel_init: nn.initializers.Initializer = _default_init
  dtype: DTypeLike | None = None
  param_dtype: DTypeLike = jnp.float32
  einsum: Callable[..., jax.Array] = jnp.einsum
  dropout: nn.Module | None = None

  quantization_roles: ClassVar[tuple[str, ...]] = (products.FEED_FORWARD,)

  def __post_init__(self) -> None:
    super().__post_init__()
    checks.check_size(self, "mlp_dim")

  @nn.compact
  def __call__(
    self, x: Float[Array, "batch length embed"], *, deterministic: bool = True
  ) -> Float[Array, "batch length embed"]:
    """Returns the transformed `x`; every position is independent."""
    embed_dim = x.shape[-1]
    inward = (embed_dim, self.mlp_dim), (axes.EMBED, axes.MLP)
    outward = (self.mlp_dim, embed_dim), (axes.MLP, axes.EMBED)
    gate = self._kernel("gate", *inward)
    up = self._kernel("up", *inward)
    down = self._kernel("down", *outward)
    x, gate, up, down = dtypes.promote_dtype(
      x, gate, up, down, dtype=self.dtype
    )
    hidden = self.activation(self._matmul("gate", "BTD,DF->BTF", x, gate))
    hidden *= self._matmul("up", "BTD,DF->BTF", x, up)
    # Constrained so that tensor parallelism shards F here, not D at the output.
    hidden = logical.constrain(
      hidden, (axes.BATCH, axes.LENGTH, axes.ACTIVATION_MLP)
    )
    hidden = remat.tag(hidden, remat.FEED_FORWARD_HIDDEN)
    if self.dropout is not None:
      hidden = self.dropout(hidden, deterministic=deterministic)
    output = self._matmul("down", "BTF,FD->BTD", hidden, down)
    return remat.tag(output, remat.FEED_FORWARD_OUTPUT)

  def _matmul(
    self, name: str, equation: str, *operands: jax.Array
  ) -> jax.Array:
    return products.call(self.einsum, name, equation, *operands)

  def _kernel(
    self, name: str, shape: tuple[int, int], names: tuple[str, str]
  ) -> jax.Array:
    init = logical.partitioned(self.kernel_init, names)
    return self.param(name, init, shape, self.param_dtype)


class FeedForward(nn.Module):
  """A plain feed-forward layer over the last axis of its input.

  Attributes:
    mlp_dim: Width of the hidden activation.
    activation: Applied to the hidden activation.
    use_bias: Whether both matmuls have a bias.
    kernel_init: Initializer of both kernels.
    bias_init: Initializer of both biases.
    dtype: Dtype of the computation. `None` promotes inputs and parameters.
    param_dtype: Dtype in which the parameters are stored.
    einsum: The matmul; replaced by quantization.
    dropout: Dropout of the hidden activation; `None` disables it.
  """

  mlp_dim: int
  activation: Callable[[jax.Array], jax.Array] = nn.relu
  use_bias: bool = True
  kernel_init: nn.initializers.Initializer = _default_init
  bias_init: nn.initializers.Initializer = nn.initializers.zeros
  dtype: DTypeLike | None = None
  param_dtype: DTypeLike = jnp.float32
  einsum: Callable[..., jax.Array] = jnp.einsum
  dropout: nn.Module | None = None

  quantization_roles: ClassVar[tuple[str, ...]] = (products.FEED_FORWARD,)

  def __post_init__(self) -> None:
    super().__post_init__()
    checks.check_size(self, "mlp_dim")

  @nn.compact
  def __call__(
    self, x: Float[Array, "batch length embed"], *, deterministic: bool = True
  ) -> Float[Array, "batch length embed"]:
    """Returns the transformed `x`; every position is independent."""
    D, F = x.shape[-1], self.mlp_dim
    names = {"up": (axes.EMBED, axes.MLP), "down": (axes.MLP, axes.EMBED)}
    up = self._param("up", self.kernel_init, (D, F), names["up"])
    down = self._param("down", self.kernel_init, (F, D), names["down"])
    up_bias = down_bias = None
    if self.use_bias:
      up_bias = self._param("up_bias", self.bias_init, (F,), names["up"][1:])
      down_bias = self._param(
        "down_bias", self.bias_init, (D,), names["down"][1:]
      )
    x, up, down, up_bias, down_bias = dtypes.promote_dtype(
      x, up, down, up_bias, down_bias, dtype=self.dtype
    )
    hidden = products.call(self.einsum, "up", "BTD,DF->BTF", x, up)
    hidden = self.activation(_add_bias(hidden, up_bias))
    # Constrained so that tensor parallelism shards F here, not D at the output.
    hidden = logical.constrain(
      hidden, (axes.BATCH, axes.LENGTH, axes.ACTIVATION_MLP)
    )
    hidden = remat.tag(hidden, remat.FEED_FORWARD_HIDDEN)
    if self.dropout is not None:
      hidden = self.dropout(hidden, deterministic=deterministic)
    output = products.call(self.einsum, "down", "BTF,FD->BTD", hidden, down)
    output = _add_bias(output, down_bias)
    return remat.tag(output, remat.FEED_FORWARD_OUTPUT)

  def _param(
    self,
    name: str,
    init: nn.initializers.Initializer,
    shape: tuple[int, ...],
    names: tuple[str, ...],
  ) -> jax.Array:
    init = logical.partitioned(init, names)
    return self.param(name, init, shape, self.param_dtype)


def _add_bias(x: jax.Array, bias: jax.Array | None) -> jax.Array:
  return x if bias is None else x + bias[None, None, :]
