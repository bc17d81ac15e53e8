"""Encoders of audio: convolutions, and a whole one with log-mel features.

Letters: B batch, S samples, T frames, D embed.
"""

from collections.abc import Sequence

from flax import linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from paxon.layers import token_context
from paxon.layers.speech import spectrogram
from paxon.layers.vision import convolutions

# Random keys of SpecAugment.
STREAM = "dropout"


class ConvEmbedding(nn.Module):
  """Maps features to embedded frames by convolutions, as Whisper does.

  Attributes:
    layers: Convolutions over time with their activations, in order.
  """

  layers: Sequence[convolutions.ConvNormAct]

  def __post_init__(self) -> None:
    self.layers = tuple(self.layers)
    super().__post_init__()

  def __call__(
    self, features: Float[Array, "batch frames bins"]
  ) -> Float[Array, "batch out embed"]:
    """Returns the embedded frames; strides make them fewer."""
    for layer in self.layers:
      features = layer(features)
    return features


class AudioEncoder(nn.Module):
  """Maps audio to a shorter sequence of frames.

  Attributes:
    features: Maps samples and their mask to features and theirs.
    subsampling: Convolutions over time with strides, in order. With padding
      `SAME` and a stride the result depends on the length of the batch.
    projection: Maps the last convolution's channels to the stack's width;
      `None` is the identity.
    stack: Called like `stack.Stack`, such as one of Conformer blocks.
    final_norm: Norm after the stack; `None` disables it.
    augmentation: Changes the features in training; `None` disables it.
    dropout: Applied to the input of the stack; `None` disables it.
  """

  features: spectrogram.LogMel
  subsampling: Sequence[convolutions.ConvNormAct]
  stack: nn.Module
  projection: nn.Module | None = None
  final_norm: nn.Module | None = None
  augmentation: spectrogram.SpecAugment | None = None
  dropout: nn.Module | None = None

  def __post_init__(self) -> None:
    # A tuple keeps the module hashable where a list was given.
    self.subsampling = tuple(self.subsampling)
    super().__post_init__()

  def __call__(
    self,
    audio: Float[Array, "batch samples"],
    mask: Bool[Array, "batch samples"],
    *,
    deterministic: bool = True,
  ) -> tuple[Float[Array, "batch frames embed"], Bool[Array, "batch frames"]]:
    """Returns the frames and their mask.

    Args:
      audio: Samples from -1 to 1; may be NaN where they are masked.
      mask: True for real samples, which come first.
      deterministic: False (training) augments and enables dropout.
    """
    x, is_real = self.features(audio, mask)
    if self.augmentation is not None and not deterministic:
      x = self.augmentation(x, is_real, self.make_rng(STREAM))
    for layer in self.subsampling:
      x = layer(x, is_real, deterministic=deterministic)
      is_real = layer.conv.output_mask(is_real)
    if self.projection is not None:
      x = self.projection(x)
    if self.dropout is not None:
      x = self.dropout(x, deterministic=deterministic)
    positions = jnp.broadcast_to(
      jnp.arange(x.shape[1], dtype=jnp.int32)[None], x.shape[:2]
    )
    context = token_context.TokenContext(
      positions, is_real.astype(jnp.int32), deterministic=deterministic
    )
    x = self.stack(x, context)
    return (x if self.final_norm is None else self.final_norm(x)), is_real
