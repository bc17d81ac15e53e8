"""Short convolutions of queries, keys and values, as in Primer.

So et al. 2021, https://arxiv.org/abs/2109.08668: after the projections of
attention and before norms and rotary positions, each channel of each head is
convolved causally with the tokens before it in the same document,

  y[t] = sum_k kernel[k] * x[t - (W - 1) + k]

with W = 3 and no bias. Decoding keeps the last W - 1 tokens of all three, next
to the cache of keys and values.

Letters: B batch, T length, N heads, K key/value heads, H head_dim, W width.
"""

from collections.abc import Sequence
import dataclasses

from flax import linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from paxon.layers import token_context
from paxon.layers.recurrent import decoding_state, short_convolution
from paxon.sharding import axes, checks

_NAMES = ("query", "key", "value")


def init_half(
  key: jax.Array, shape: Sequence[int], dtype: DTypeLike = jnp.float32
) -> jax.Array:
  """Initializer of Primer: 0.5 for the token itself, 0.5 / W for the others."""
  del key
  kernel = jnp.full(tuple(shape), 0.5 / shape[0], dtype)
  return kernel.at[-1].set(0.5)


class HeadConvolution(nn.Module):
  """Causal depthwise convolutions of queries, keys and values.

  The parameters are `query/kernel` [W,N,H], `key/kernel` and `value/kernel`
  [W,K,H].

  Attributes:
    width: Tokens of the kernels, W.
    kernel_init: Initializer of the kernels.
    dtype: Dtype of the computation. `None` promotes inputs and kernels.
    param_dtype: Dtype in which the kernels are stored.
  """

  width: int = 3
  kernel_init: nn.initializers.Initializer = init_half
  dtype: DTypeLike | None = None
  param_dtype: DTypeLike = jnp.float32

  def __post_init__(self) -> None:
    super().__post_init__()
    checks.check_size(self, "width")

  @nn.compact
  def __call__(
    self,
    query: Float[Array, "batch length heads head_dim"],
    key: Float[Array, "batch length kv_heads head_dim"],
    value: Float[Array, "batch length kv_heads value_dim"],
    context: token_context.TokenContext = token_context.ONE_DOCUMENT,
  ) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the convolved queries, keys and values, finite where padding is.

    Args:
      query: Queries; may be NaN where they are padding.
      key: Keys, likewise.
      value: Values, likewise.
      context: Segments of the tokens.

    Raises:
      ValueError: Shapes do not fit.
    """
    convolved, windows, shapes = {}, {}, {}
    heads_axes = (axes.HEADS, axes.KV_HEADS, axes.KV_HEADS)
    inputs = dict(zip(_NAMES, (query, key, value), strict=True))
    for (name, x), heads_axis in zip(inputs.items(), heads_axes, strict=True):
      shapes[f"{name}_window"] = decoding_state.Shape(
        (self.width - 1, *x.shape[2:]),
        x.dtype,
        (None, heads_axis, axes.HEAD_DIM),
      )
    # Attention over a prefix reads later tokens, the convolutions do not.
    context = dataclasses.replace(context, prefix=None)
    tokens, stored = decoding_state.begin(self, query[:, :, 0], context, shapes)
    is_real = tokens.is_real[..., None, None]
    for name, x in inputs.items():
      window = f"{name}_window"
      convolution = short_convolution.ShortConvolution(
        self.width,
        shapes[window].names[1:],
        use_bias=False,
        activation=None,
        kernel_init=self.kernel_init,
        dtype=self.dtype,
        param_dtype=self.param_dtype,
        name=name,
      )
      # Not multiplied: padding may be NaN.
      x = jnp.where(is_real, x, jnp.zeros((), x.dtype))
      convolved[name], windows[window] = convolution(
        x, tokens, None if stored is None else stored[window]
      )
    if stored is not None:
      decoding_state.store(self, tokens, windows, shapes)
    return convolved["query"], convolved["key"], convolved["value"]
