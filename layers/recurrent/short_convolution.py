"""Causal depthwise convolution over the last few tokens of each channel.

  y[t] = sum_k kernel[k] * x[t - (W - 1) + k]

Tokens of other runs (`decoding_state`) and before the first count as zeros. A
decoding step reads the W - 1 tokens before it from a window, which is stored.

Letters: B batch, T length, W width.
"""

from collections.abc import Callable

from flax import linen as nn
from flax.linen import dtypes
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from paxon.layers import initializers
from paxon.layers.recurrent import decoding_state
from paxon.sharding import checks, logical


class ShortConvolution(nn.Module):
  """A causal convolution of each channel, with bias and activation.

  Attributes:
    width: Tokens of the kernel [W, *channels], W.
    channel_axes: Logical axes of the channels.
    use_bias: Whether there is a bias.
    activation: Applied to the result; `None` is the identity.
    kernel_init: Initializer of the kernel; `None` is that of PyTorch's
      convolutions, uniform up to `W ** -0.5`.
    dtype: Dtype of the computation. `None` promotes inputs and kernel.
    param_dtype: Dtype in which the parameters are stored.
  """

  width: int
  channel_axes: tuple[str | None, ...]
  use_bias: bool = True
  activation: Callable[[jax.Array], jax.Array] | None = nn.silu
  kernel_init: nn.initializers.Initializer | None = None
  dtype: DTypeLike | None = None
  param_dtype: DTypeLike = jnp.float32

  def __post_init__(self) -> None:
    super().__post_init__()
    checks.check_size(self, "width")

  @nn.compact
  def __call__(
    self,
    x: Float[Array, "batch length *channels"],
    tokens: decoding_state.Tokens,
    window: Float[Array, "batch before *channels"] | None = None,
  ) -> tuple[
    Float[Array, "batch length *channels"],
    Float[Array, "batch before *channels"] | None,
  ]:
    """Returns the convolution, and the window after the tokens if given one."""
    init = self.kernel_init or initializers.Uniform(self.width**-0.5)
    kernel = self.param(
      "kernel",
      logical.partitioned(
        init, (None, *self.channel_axes), read_dtype=self.dtype
      ),
      (self.width, *x.shape[2:]),
      self.param_dtype,
    )
    bias = None
    if self.use_bias:
      bias = self.param(
        "bias",
        logical.partitioned(
          nn.initializers.zeros, self.channel_axes, read_dtype=self.dtype
        ),
        x.shape[2:],
        self.param_dtype,
      )
    x, kernel, bias = dtypes.promote_dtype(x, kernel, bias, dtype=self.dtype)
    y = convolve(x, kernel, tokens, window)
    if bias is not None:
      y += bias[None, None]
    if self.activation is not None:
      y = self.activation(y)
    return y, None if window is None else slide(window, x, tokens)


def convolve(
  x: Float[Array, "batch length *channels"],
  kernel: Float[Array, "width *channels"],
  tokens: decoding_state.Tokens,
  window: Float[Array, "batch before *channels"] | None = None,
) -> Float[Array, "batch length *channels"]:
  """Returns the convolution of each channel, causal in each run.

  Args:
    x: The tokens; finite, also where they are padding.
    kernel: Its last entry multiplies the token itself.
    tokens: Padding and runs of `x`.
    window: The W - 1 tokens of run 0 before these, zeros if there are fewer;
      `None` is zeros.
  """
  before = kernel.shape[0] - 1
  length = x.shape[1]
  if window is None:
    every = jnp.pad(x, [(0, 0), (before, 0), *[(0, 0)] * (x.ndim - 2)])
  else:
    every = jnp.concatenate([window.astype(x.dtype), x], axis=1)
  runs = jnp.pad(tokens.runs, [(0, 0), (before, 0)])
  y = x * kernel[-1][None, None]
  for k in range(before):
    seen = every[:, k : k + length]
    if not tokens.is_plain:
      is_same = _expand(runs[:, k : k + length] == tokens.runs, x.ndim)
      seen = jnp.where(is_same, seen, jnp.zeros((), x.dtype))
    y += seen * kernel[k][None, None]
  return y


def slide(
  window: Float[Array, "batch before *channels"],
  x: Float[Array, "batch length *channels"],
  tokens: decoding_state.Tokens,
) -> Float[Array, "batch before *channels"]:
  """Returns the window after the tokens: the last ones of the last run."""
  batch, before = window.shape[:2]
  every = jnp.concatenate([window, x.astype(window.dtype)], axis=1)
  old = jnp.ones((batch, before), bool)
  is_real = jnp.concatenate([old, tokens.is_real], axis=1)
  runs = jnp.concatenate([old.astype(jnp.int32) - 1, tokens.runs], axis=1)
  order = jnp.cumsum(is_real, axis=1, dtype=jnp.int32)
  wanted = order[:, -1:] - jnp.arange(before - 1, -1, -1, dtype=jnp.int32)[None]
  # The first token with a number is real; padding after it repeats the number.
  found = order[:, None] == wanted[:, :, None]
  index = jnp.argmax(found, axis=2)
  is_last = jnp.take_along_axis(runs, index, axis=1) == runs[:, -1:]
  kept = jnp.take_along_axis(
    every, index.reshape(*index.shape, *(1,) * (x.ndim - 2)), axis=1
  )
  return jnp.where(_expand(is_last, x.ndim), kept, jnp.zeros((), kept.dtype))


def _expand(mask: jax.Array, rank: int) -> jax.Array:
  return mask.reshape(*mask.shape, *(1,) * (rank - mask.ndim))
