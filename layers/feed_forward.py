"""Feed-forward layers, gated and plain.

  gated: down(activation(gate(x) + gate_bias) * (up(x) + up_bias)) + down_bias
  plain: down(activation(up(x) + up_bias)) + down_bias

With `nn.silu` the gated layer is SwiGLU, with `nn.gelu` GEGLU, with `nn.relu`
ReGLU (Shazeer 2020, https://arxiv.org/abs/2002.05202). Norm, residual and
dropout of the output belong to the block.

Einsum letters: B batch, T length, D embed, F mlp.
"""

from collections.abc import Callable
from typing import Any, ClassVar

from flax import linen as nn
from flax.linen import dtypes
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from paxon.layers import remat
from paxon.layers.cpu import forms
from paxon.quantization import matmuls
from paxon.sharding import axes, checks, logical

_default_init = nn.initializers.variance_scaling(
  1.0, "fan_in", "truncated_normal"
)


class _FeedForward(nn.Module):
  """Parameters and output of both layers, which have the same fields."""

  quantization_roles: ClassVar[tuple[str, ...]] = (matmuls.FEED_FORWARD,)

  def __post_init__(self) -> None:
    super().__post_init__()
    checks.check_size(self, "mlp_dim")

  def _param(
    self,
    name: str,
    init: nn.initializers.Initializer,
    shape: tuple[int, ...],
    names: tuple[str, ...],
  ) -> jax.Array:
    layer: Any = self
    init = logical.partitioned(init, names, read_dtype=layer.dtype)
    return self.param(name, init, shape, layer.param_dtype)

  @nn.nowrap
  def _project(
    self,
    hidden: jax.Array,
    down: jax.Array,
    bias: jax.Array | None,
    deterministic: bool,
  ) -> jax.Array:
    """Returns the output [B,T,D] of the hidden activation [B,T,F]."""
    layer: Any = self
    # Constrained so that tensor parallelism shards F here, not D at the output.
    hidden = logical.constrain(
      hidden, (axes.BATCH, axes.LENGTH, axes.ACTIVATION_MLP)
    )
    hidden = remat.tag(hidden, remat.FEED_FORWARD_HIDDEN)
    if layer.dropout is not None:
      hidden = layer.dropout(hidden, deterministic=deterministic)
    output = forms.multiply_tokens(
      layer.einsum, "down", "BTF,FD->BTD", hidden, down
    )
    return remat.tag(_add_bias(output, bias), remat.FEED_FORWARD_OUTPUT)


class GatedFeedForward(_FeedForward):
  """A gated feed-forward layer over the last axis of its input.

  Attributes:
    mlp_dim: Width of the hidden activation, after any 2/3 scaling.
    activation: Applied to the gate branch only.
    kernel_init: Initializer of all three kernels.
    dtype: Dtype of the computation. `None` promotes inputs and kernels.
    param_dtype: Dtype in which the kernels are stored.
    einsum: The matmul; replaced by quantization.
    dropout: Dropout of the hidden activation; `None` disables it.
    use_bias: Whether all three matmuls have a bias, zero at first.
  """

  mlp_dim: int
  activation: Callable[[jax.Array], jax.Array] = nn.silu
  kernel_init: nn.initializers.Initializer = _default_init
  dtype: DTypeLike | None = None
  param_dtype: DTypeLike = jnp.float32
  einsum: Callable[..., jax.Array] = jnp.einsum
  dropout: nn.Module | None = None
  use_bias: bool = False

  @nn.compact
  def __call__(
    self, x: Float[Array, "batch length embed"], *, deterministic: bool = True
  ) -> Float[Array, "batch length embed"]:
    """Returns the transformed `x`; every position is independent."""
    D, F = x.shape[-1], self.mlp_dim
    inward = (axes.EMBED, axes.MLP)
    gate = self._param("gate", self.kernel_init, (D, F), inward)
    up = self._param("up", self.kernel_init, (D, F), inward)
    down = self._param("down", self.kernel_init, (F, D), inward[::-1])
    gate_bias = up_bias = down_bias = None
    if self.use_bias:
      init = nn.initializers.zeros
      gate_bias = self._param("gate_bias", init, (F,), inward[1:])
      up_bias = self._param("up_bias", init, (F,), inward[1:])
      down_bias = self._param("down_bias", init, (D,), inward[:1])
    x, gate, up, down, gate_bias, up_bias, down_bias = dtypes.promote_dtype(
      x, gate, up, down, gate_bias, up_bias, down_bias, dtype=self.dtype
    )
    hidden = forms.multiply_tokens(self.einsum, "gate", "BTD,DF->BTF", x, gate)
    hidden = self.activation(_add_bias(hidden, gate_bias))
    other = forms.multiply_tokens(self.einsum, "up", "BTD,DF->BTF", x, up)
    hidden *= _add_bias(other, up_bias)
    return self._project(hidden, down, down_bias, deterministic)


class FeedForward(_FeedForward):
  """A plain feed-forward layer over the last axis of its input.

  Attributes:
    activation: Applied to the hidden activation.
    use_bias: Whether both matmuls have a bias.
    bias_init: Initializer of both biases.

  The other attributes are those of `GatedFeedForward`.
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
    hidden = forms.multiply_tokens(self.einsum, "up", "BTD,DF->BTF", x, up)
    hidden = self.activation(_add_bias(hidden, up_bias))
    return self._project(hidden, down, down_bias, deterministic)


def _add_bias(x: jax.Array, bias: jax.Array | None) -> jax.Array:
  return x if bias is None else x + bias[None, None, :]
