"""Encoder of wav2vec 2.0: convolutions of raw audio, and a transformer.

Baevski et al. 2020, https://arxiv.org/abs/2006.11477. With convolutions c of
the samples, a projection p and a convolution q over frames,

  x = p(norm(c(audio)));  x = x + activation(q(x));  x = stack(norm(x))

where norm is after the stack instead if its blocks are pre-norm.

Letters: B batch, S samples, T frames, D embed.
"""

from collections.abc import Callable, Sequence

from flax import linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from paxon.layers import precision, token_context
from paxon.layers.norms import group_norm
from paxon.layers.vision import convolutions
from paxon.sharding import logical


class PositionWeightNorm(nn.Module):
  """Gives the kernel at each position of the window the norm `scale`.

  `torch.nn.utils.weight_norm(conv, dim=2)`; the field `weight_norm` of a
  convolution over one axis.

  Attributes:
    param_dtype: Dtype in which the scale [K,1,1] is stored.
  """

  param_dtype: DTypeLike = jnp.float32

  @nn.compact
  def __call__(
    self, kernel: Float[Array, "window in out"], *, deterministic: bool = True
  ) -> Float[Array, "window in out"]:
    """Returns the normalized kernel."""
    del deterministic
    scale = self.param(
      "scale",
      logical.partitioned(nn.initializers.ones, (None, None, None)),
      (kernel.shape[0], 1, 1),
      self.param_dtype,
    )
    wide = precision.widen(kernel)
    norm = jnp.sqrt(jnp.sum(jnp.square(wide), axis=(1, 2), keepdims=True))
    return (wide * (scale.astype(wide.dtype) / norm)).astype(kernel.dtype)


class ConvPositions(nn.Module):
  """Positions of frames as a convolution over many of them.

  Attributes:
    conv: The convolution, with padding `VALID`; an even window has one frame
      more before a frame than after it.
    activation: Applied to its output.
  """

  conv: convolutions.Conv
  activation: Callable[[jax.Array], jax.Array] = nn.gelu

  def __call__(
    self, x: Float[Array, "batch frames embed"]
  ) -> Float[Array, "batch frames embed"]:
    """Returns the embedding to add to the frames."""
    (width,) = self.conv.kernel_size
    before = width // 2
    x = jnp.pad(x, ((0, 0), (before, width - 1 - before), (0, 0)))
    return self.activation(self.conv(x))


class Wav2Vec2Encoder(nn.Module):
  """Maps audio to frames, the encoder of a `recognizer.Recognizer`.

  Attributes:
    convolutions: Convolutions of the samples, in order, with padding `VALID`.
    norms: Norm after each convolution, or None. `GroupNorm` ignores padding.
    activation: After each of them.
    feature_norm: Norm of their output.
    projection: Maps it to the width of the stack.
    position_embedding: Maps frames to what is added, such as `ConvPositions`.
    stack: Called like `stack.Stack`.
    embedding_norm: Norm before the stack; `None` disables it.
    final_norm: Norm after the stack; `None` disables it.
    dropout: Applied to the input of the stack; `None` disables it.
  """

  convolutions: Sequence[convolutions.Conv]
  norms: Sequence[nn.Module | None]
  feature_norm: nn.Module
  projection: nn.Module
  position_embedding: nn.Module
  stack: nn.Module
  activation: Callable[[jax.Array], jax.Array] = nn.gelu
  embedding_norm: nn.Module | None = None
  final_norm: nn.Module | None = None
  dropout: nn.Module | None = None

  def __post_init__(self) -> None:
    # Tuples keep the module hashable where lists were given.
    self.convolutions, self.norms = tuple(self.convolutions), tuple(self.norms)
    super().__post_init__()
    if len(self.convolutions) != len(self.norms):
      raise ValueError(
        "Wav2Vec2Encoder.norms must have an entry for each of the"
        f" {len(self.convolutions)} convolutions, got {len(self.norms)}."
      )

  def __call__(
    self,
    audio: Float[Array, "batch samples"],
    mask: Bool[Array, "batch samples"],
    *,
    deterministic: bool = True,
  ) -> tuple[Float[Array, "batch frames embed"], Bool[Array, "batch frames"]]:
    """Returns the frames and their mask.

    Args:
      audio: Samples, of models for that with mean 0 and variance 1 in each
        utterance; may be NaN where they are masked.
      mask: True for real samples, which come first. A frame is real if all
        samples that it depends on are.
      deterministic: False (training) enables dropout.
    """
    x = jnp.where(mask, audio, 0)[:, :, None]
    for conv, norm in zip(self.convolutions, self.norms, strict=True):
      x = conv(x)
      (width,) = conv.kernel_size
      stride = (
        conv.strides if isinstance(conv.strides, int) else conv.strides[0]
      )
      mask = mask[:, width - 1 :: stride][:, : x.shape[1]]
      if isinstance(norm, group_norm.GroupNorm):
        x = norm(x, mask)
      elif norm is not None:
        x = norm(x)
      x = self.activation(x)
    x = self.projection(self.feature_norm(x))
    x = jnp.where(mask[:, :, None], x, 0)
    x = x + self.position_embedding(x).astype(x.dtype)
    if self.embedding_norm is not None:
      x = self.embedding_norm(x)
    if self.dropout is not None:
      x = self.dropout(x, deterministic=deterministic)
    positions = jnp.broadcast_to(
      jnp.arange(x.shape[1], dtype=jnp.int32)[None], x.shape[:2]
    )
    context = token_context.TokenContext(
      positions, mask.astype(jnp.int32), deterministic=deterministic
    )
    x = self.stack(x, context)
    return (x if self.final_norm is None else self.final_norm(x)), mask
