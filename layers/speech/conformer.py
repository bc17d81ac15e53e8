"""The Conformer: a transformer block with a convolution.

Gulati et al. 2020, https://arxiv.org/abs/2005.08100. With a, m, c and f for
attention, convolution and two feed-forward layers, each of a norm:

  x = x + w * f(x)
  x = x + a(x);  x = x + c(x)        in the order of `BlockOrder`
  x = x + w * f'(x)
  x = norm(x)

where w is 1/2. The convolution is a gated matmul, depthwise convolution, batch
norm, activation and matmul. A sequence is one utterance: convolutions see
all real frames before and after, so sequences are not packed.

Einsum letters: B batch, T frames, D embed, F mlp.
"""

from collections.abc import Callable
import enum
from typing import ClassVar

from flax import linen as nn
from flax.linen import dtypes
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from paxon.layers import token_context
from paxon.layers.cpu import forms
from paxon.layers.stacks import block
from paxon.layers.vision import convolutions
from paxon.quantization import matmuls
from paxon.sharding import axes, checks, logical

_default_init = nn.initializers.variance_scaling(
  1.0, "fan_in", "truncated_normal"
)


class LightConvolution(nn.Module):
  """Mixes neighboring frames: matmul with a gate, convolution, matmul.

    y = down(activation(norm(convolution(up(x) * sigmoid(gate(x))))))

  The norm of the input, dropout and the residual belong to the block.

  Attributes:
    convolution: The depthwise convolution over frames.
    norm: Of its output, `batch_norm.BatchNorm` in the paper; `None` disables
      it. Batch norm gets the mask, and trains its averages.
    mlp_dim: Width of the convolution; `None` is that of the input.
    activation: After the norm.
    use_bias: Whether the matmuls have biases.
    kernel_init: Initializer of the matmuls' kernels.
    dtype: Dtype of the computation. `None` promotes inputs and kernels.
    param_dtype: Dtype in which the parameters are stored.
    einsum: The matmul; replaced by quantization.
  """

  quantization_roles: ClassVar[tuple[str, ...]] = (matmuls.FEED_FORWARD,)

  convolution: nn.Module
  norm: nn.Module | None = None
  mlp_dim: int | None = None
  activation: Callable[[jax.Array], jax.Array] = nn.silu
  use_bias: bool = True
  kernel_init: nn.initializers.Initializer = _default_init
  dtype: DTypeLike | None = None
  param_dtype: DTypeLike = jnp.float32
  einsum: Callable[..., jax.Array] = jnp.einsum

  def __post_init__(self) -> None:
    super().__post_init__()
    if self.mlp_dim is not None:
      checks.check_size(self, "mlp_dim")

  @nn.compact
  def __call__(
    self,
    x: Float[Array, "batch frames embed"],
    mask: Bool[Array, "batch frames"] | None = None,
    *,
    deterministic: bool = True,
  ) -> Float[Array, "batch frames embed"]:
    """Returns the mixed frames; zeros where the mask is False.

    Args:
      x: Input; may be NaN where it is masked.
      mask: True for real frames; `None` is all.
      deterministic: False (training) updates the averages of batch norm.
    """
    D = x.shape[-1]
    F = D if self.mlp_dim is None else self.mlp_dim
    inward = (axes.EMBED, axes.MLP)
    up, up_bias = self._matmul("up", (D, F), inward)
    gate, gate_bias = self._matmul("gate", (D, F), inward)
    down, down_bias = self._matmul("down", (F, D), inward[::-1])
    x, up, gate, down, up_bias, gate_bias, down_bias = dtypes.promote_dtype(
      x, up, gate, down, up_bias, gate_bias, down_bias, dtype=self.dtype
    )
    kept = None if mask is None else mask[..., None]
    if kept is not None:
      x = jnp.where(kept, x, 0)
    hidden = forms.multiply_tokens(self.einsum, "up", "BTD,DF->BTF", x, up)
    other = forms.multiply_tokens(self.einsum, "gate", "BTD,DF->BTF", x, gate)
    hidden = _add(hidden, up_bias) * nn.sigmoid(_add(other, gate_bias))
    hidden = logical.constrain(
      hidden, (axes.BATCH, axes.LENGTH, axes.ACTIVATION_MLP)
    )
    hidden = self.convolution(hidden, mask, deterministic=deterministic)
    if self.norm is not None:
      hidden = convolutions.apply_norm(self.norm, hidden, mask, deterministic)
    hidden = self.activation(hidden)
    y = forms.multiply_tokens(self.einsum, "down", "BTF,FD->BTD", hidden, down)
    y = _add(y, down_bias)
    return y if kept is None else jnp.where(kept, y, 0)

  def _matmul(
    self, name: str, shape: tuple[int, int], names: tuple[str, str]
  ) -> tuple[jax.Array, jax.Array | None]:
    """Returns a kernel and its bias."""
    init = logical.partitioned(self.kernel_init, names, read_dtype=self.dtype)
    kernel = self.param(name, init, shape, self.param_dtype)
    if not self.use_bias:
      return kernel, None
    init = logical.partitioned(
      nn.initializers.zeros, names[1:], read_dtype=self.dtype
    )
    return kernel, self.param(f"{name}_bias", init, shape[1:], self.param_dtype)


def _add(x: jax.Array, bias: jax.Array | None) -> jax.Array:
  return x if bias is None else x + bias[None, None]


class BlockOrder(enum.Enum):
  """The branches between the feed-forward layers, in order."""

  ATTENTION = "attention"
  CONVOLUTION = "convolution"
  ATTENTION_CONVOLUTION = "attention_convolution"
  CONVOLUTION_ATTENTION = "convolution_attention"


class ConformerBlock(nn.Module):
  """A block of the Conformer, called like `block.TransformerBlock`.

  Attributes:
    first_norm: Norm before the first feed-forward layer.
    first: The first feed-forward layer, maps [B,T,D] to [B,T,D].
    attention_norm: Norm before attention.
    attention: Called as in `TransformerBlock`; not causal for whole utterances.
    convolution_norm: Norm before the convolution.
    convolution: Called with frames, mask and `deterministic`, such as
      `LightConvolution`.
    final_norm: Norm after the block; `None` disables it.
    last_norm: Norm before the last feed-forward layer.
    last: The last feed-forward layer; `None`, with `last_norm`, uses the first
      one and its norm again, with the same parameters.
    order: Order of attention and convolution; those not in it may be `None`.
    feed_forward_weight: Weight of both feed-forward layers in the residuals.
    dropout: Applied to each branch, as in `TransformerBlock`.
  """

  first_norm: nn.Module
  first: nn.Module
  attention_norm: nn.Module | None = None
  attention: nn.Module | None = None
  convolution_norm: nn.Module | None = None
  convolution: nn.Module | None = None
  final_norm: nn.Module | None = None
  last_norm: nn.Module | None = None
  last: nn.Module | None = None
  order: BlockOrder = BlockOrder.ATTENTION_CONVOLUTION
  feed_forward_weight: float = 0.5
  dropout: nn.Module | None = None

  def __post_init__(self) -> None:
    super().__post_init__()
    if (self.last is None) != (self.last_norm is None):
      raise ValueError(
        "ConformerBlock.last and last_norm must both be set, or both be None."
      )
    for name in ("attention", "convolution"):
      is_used = name in self.order.value
      for field, value in checks.get_values(self, name, f"{name}_norm"):
        if (value is not None) != is_used:
          raise ValueError(
            f"ConformerBlock.{field} must {'' if is_used else 'not '}be set"
            f" with order {self.order.name}."
          )

  def __call__(
    self,
    x: Float[Array, "batch frames embed"],
    context: token_context.TokenContext = token_context.ONE_DOCUMENT,
    *,
    layer_index: Int[Array, ""] | None = None,
  ) -> Float[Array, "batch frames embed"]:
    """Returns the transformed frames; see `block.Block`.

    Args:
      x: The residual stream.
      context: Positions for attention, and segments: 1 for real frames and 0
        for padding. There must be no `cache_length`, because an utterance is
        not generated. Training enables dropout and trains batch norm.
      layer_index: Ignored; stacks may pass it.

    Raises:
      ValueError: `cache_length` is set.
    """
    del layer_index
    if context.cache_length is not None:
      raise ValueError(
        f"ConformerBlock has no cache, got cache_length={context.cache_length}."
      )
    add = block.make_residual(self.dropout, None, context, None)
    x = add(x, self._feed_forward(self.first_norm, self.first, x, context))
    for name in self.order.value.split("_"):
      if name == "attention":
        assert self.attention is not None
        assert self.attention_norm is not None
        branch = self.attention(self.attention_norm(x), context)
      else:
        assert self.convolution is not None
        assert self.convolution_norm is not None
        segment_ids = context.segment_ids
        branch = self.convolution(
          self.convolution_norm(x),
          None if segment_ids is None else segment_ids != 0,
          deterministic=context.deterministic,
        )
      x = add(x, branch)
    last_norm = self.last_norm or self.first_norm
    last = self.last or self.first
    x = add(x, self._feed_forward(last_norm, last, x, context))
    if self.final_norm is not None:
      x = self.final_norm(x)
    return block.constrain(x)

  @nn.nowrap
  def _feed_forward(
    self,
    norm: nn.Module,
    layer: nn.Module,
    x: jax.Array,
    context: token_context.TokenContext,
  ) -> jax.Array:
    apply = block.bind_feed_forward(layer, context)
    return self.feed_forward_weight * apply(norm(x))
