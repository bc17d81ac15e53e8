"""Contrastive model of images and texts: two encoders and their similarity.

  image = normalize(image_projection(image_encoder(images)))           [B, D]
  text = normalize(text_projection(pooling(text_encoder(inputs))))     [B, D]
  logits = scale * image @ text.T + bias                               [B, B]

With `contrastive_losses.softmax` this is CLIP (Radford et al. 2021,
https://arxiv.org/abs/2103.00020), with `contrastive_losses.sigmoid` and a bias
SigLIP (Zhai et al. 2023, https://arxiv.org/abs/2303.15343). The negatives of a
pair are all other pairs of the global batch; texts are gathered from all
devices, images are not. With gradient accumulation the negatives are those of
one microbatch.

Letters: B batch, T length, D embed.
"""

from collections.abc import Callable, Sequence
import dataclasses
import math

from flax import linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from paxon.layers import precision
from paxon.layers.losses import auxiliary_loss, contrastive_losses
from paxon.layers.models import language_model
from paxon.sharding import axes, checks, logical

_LEAST_SQUARE = 1e-24
# `(x [B,T,D], ids [B,T]) -> [B,D]`
TextPooling = Callable[[jax.Array, jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class FirstId:
  """Pools the first token with an id, such as that of the end of the text.

  Attributes:
    id: The id; a text without it is pooled at its last position.
  """

  id: int

  def __call__(
    self,
    x: Float[Array, "batch length embed"],
    ids: Int[Array, "batch length"],
  ) -> Float[Array, "batch embed"]:
    """Returns the state of the token."""
    found = ids == self.id
    last = jnp.full((len(ids),), ids.shape[1] - 1)
    at = jnp.where(jnp.any(found, axis=1), jnp.argmax(found, axis=1), last)
    return _take(x, at)


def pool_largest_id(
  x: Float[Array, "batch length embed"], ids: Int[Array, "batch length"]
) -> Float[Array, "batch embed"]:
  """Returns the state of the token with the largest id, as OpenAI's CLIP does.

  There the end of the text has the largest id of the vocabulary.
  """
  return _take(x, jnp.argmax(ids, axis=1))


def pool_last_position(
  x: Float[Array, "batch length embed"], ids: Int[Array, "batch length"]
) -> Float[Array, "batch embed"]:
  """Returns the state of the last position, even if it is padding (SigLIP)."""
  del ids
  return x[:, -1]


class ImageTextModel(nn.Module):
  """Encoders of images and texts with a contrastive loss.

  Attributes:
    image_encoder: Maps images [B,H,W,C] to [B,D]; called with `deterministic`,
      such as `vit.VisionTransformer` with a pooling.
    text_encoder: Called with the batch's `text_keys` and `deterministic`;
      returns [B,T,D], as `masked_lm.TextEncoder` does.
    text_pooling: Maps states and ids to [B,D], such as `FirstId(end_id)`.
    image_projection: Maps [B,D] to the shared width; `None` is the identity.
    text_projection: Likewise for texts.
    contrast: Loss of each pair, `contrastive_losses.softmax` or `sigmoid`.
    initial_scale: Initial factor on cosines; its logarithm is learned.
    max_scale: Limit of the factor in training and later; `None` for none. CLIP
      was trained with 100.
    initial_bias: Initial bias of the logits; `None` is no bias. SigLIP starts
      with a scale of 10 and a bias of -10.
    text_keys: Batch keys of the text encoder's arguments, the ids first.
    auxiliary_loss_weight: As in `DecoderLm`.
  """

  image_encoder: nn.Module
  text_encoder: nn.Module
  text_pooling: TextPooling
  image_projection: nn.Module | None = None
  text_projection: nn.Module | None = None
  contrast: contrastive_losses.ContrastiveLoss = contrastive_losses.softmax
  initial_scale: float = 1 / 0.07
  max_scale: float | None = None
  initial_bias: float | None = None
  text_keys: Sequence[str] = ("inputs", "positions", "segment_ids")
  auxiliary_loss_weight: float = 1.0
  param_dtype: DTypeLike = jnp.float32

  def __post_init__(self) -> None:
    # A tuple keeps the module hashable where a list was given.
    self.text_keys = tuple(self.text_keys)
    super().__post_init__()
    checks.check_non_negative(self, "auxiliary_loss_weight")
    checks.check_positive(self, "initial_scale", "max_scale")
    if not self.text_keys:
      raise ValueError(
        "ImageTextModel.text_keys must have the key of the ids, got none."
      )

  def setup(self) -> None:
    """Makes the scale and the bias of the logits."""
    self.logit_scale = self._scalar("log_scale", math.log(self.initial_scale))
    if self.initial_bias is not None:
      self.logit_bias = self._scalar("bias", self.initial_bias)

  def __call__(
    self, batch: language_model.Batch, *, deterministic: bool = True
  ) -> Float[Array, "images texts"]:
    """Returns the logits of each image with each text, in at least float32.

    Args:
      batch: `images` [B,H,W,C] and the `text_keys`. There may be another number
        of texts than of images.
      deterministic: Disables dropout.

    Raises:
      ValueError: A key is missing in the batch.
    """
    return self._compare(
      self.embed_images(batch, deterministic=deterministic),
      self.embed_texts(batch, deterministic=deterministic),
    )

  def embed_images(
    self, batch: language_model.Batch, *, deterministic: bool = True
  ) -> Float[Array, "batch embed"]:
    """Returns the unit vector of each of `batch["images"]`."""
    language_model.check_keys(self, batch, ["images"])
    x = self.image_encoder(batch["images"], deterministic=deterministic)
    return _normalize(x, self.image_projection, "image_encoder")

  def embed_texts(
    self, batch: language_model.Batch, *, deterministic: bool = True
  ) -> Float[Array, "batch embed"]:
    """Returns the unit vector of each text of the batch."""
    language_model.check_keys(self, batch, self.text_keys)
    args = [batch[key] for key in self.text_keys]
    x = self.text_encoder(*args, deterministic=deterministic)
    x = self.text_pooling(x, args[0])
    return _normalize(x, self.text_projection, "text_pooling")

  def loss(
    self, batch: language_model.Batch, *, deterministic: bool = True
  ) -> language_model.Result:
    """Returns the loss, metrics and per-example outputs of a batch.

    Args:
      batch: Batch of `__call__`, with `example_weights` float32 [B], zero for
        padding, which does not count as a negative either. Image i belongs to
        text i.
      deterministic: Disables dropout.

    Returns:
      `(sum, weight)` of the loss of each pair. Metrics, as such pairs:
      `image_to_text_accuracy` and `text_to_image_accuracy`, of finding the
      other of a pair among the batch, `logit_scale` and `logit_bias`. Outputs:
      `image_embeddings` and `text_embeddings` [B,D]; `row_nll`, `row_hits`
      (both unweighted) and `row_weight` [B].

    Raises:
      ValueError: A key is missing in the batch.
    """
    language_model.check_keys(
      self, batch, ["images", *self.text_keys, "example_weights"]
    )
    images = self.embed_images(batch, deterministic=deterministic)
    texts = self.embed_texts(batch, deterministic=deterministic)
    logits = self._compare(images, texts)
    weights = batch["example_weights"].astype(logits.dtype)
    total = jnp.sum(weights)
    nll = self.contrast(logits, weights)

    def pair(values: jax.Array) -> language_model.Weighted:
      return jnp.sum(values.astype(weights.dtype) * weights), total

    real, own = weights > 0, jnp.arange(len(weights))
    found = (
      jnp.argmax(jnp.where(real[None, :], logits, -jnp.inf), axis=1) == own,
      jnp.argmax(jnp.where(real[:, None], logits, -jnp.inf), axis=0) == own,
    )
    metrics = {
      "image_to_text_accuracy": pair(found[0]),
      "text_to_image_accuracy": pair(found[1]),
      "logit_scale": (self._scale(logits.dtype) * total, total),
    }
    if self.initial_bias is not None:
      bias = self.logit_bias.astype(logits.dtype)
      metrics["logit_bias"] = (bias * total, total)
    added, more = auxiliary_loss.collect(
      self, factor=self.auxiliary_loss_weight, weight=total
    )
    outputs = {
      "image_embeddings": images,
      "text_embeddings": texts,
      "row_nll": nll,
      "row_hits": found[0].astype(weights.dtype),
      "row_weight": weights,
    }
    outputs = {k: jax.lax.stop_gradient(v) for k, v in outputs.items()}
    return (pair(nll)[0] + added, total), metrics | more, outputs

  def predict(self, batch: language_model.Batch) -> dict[str, jax.Array]:
    """Returns `image_embeddings` and `text_embeddings` [B,D]."""
    return {
      "image_embeddings": self.embed_images(batch),
      "text_embeddings": self.embed_texts(batch),
    }

  def _scalar(self, name: str, value: float) -> jax.Array:
    init = logical.partitioned(nn.initializers.constant(value), ())
    return self.param(name, init, (), self.param_dtype)

  def _scale(self, dtype: DTypeLike) -> jax.Array:
    scale = self.logit_scale.astype(dtype)
    if self.max_scale is not None:
      scale = jnp.minimum(scale, math.log(self.max_scale))
    return jnp.exp(scale)

  def _compare(self, images: jax.Array, texts: jax.Array) -> jax.Array:
    # Each device compares its images with the texts of all devices.
    texts = logical.constrain(texts, (None, None))
    logits = self._scale(images.dtype) * jnp.einsum("BD,CD->BC", images, texts)
    if self.initial_bias is not None:
      logits += self.logit_bias.astype(logits.dtype)
    return logical.constrain(logits, (axes.BATCH, None))


def _take(x: jax.Array, at: jax.Array) -> jax.Array:
  return jnp.take_along_axis(x, at[:, None, None], axis=1)[:, 0]


def _normalize(
  x: jax.Array, projection: nn.Module | None, field: str
) -> jax.Array:
  """Returns projected unit vectors in at least float32."""
  if x.ndim != 2:
    raise ValueError(
      f"ImageTextModel.{field} must return [batch, embed], got {x.shape}."
    )
  x = precision.widen(x if projection is None else projection(x))
  squares = jnp.sum(jnp.square(x), axis=-1, keepdims=True)
  # Zeros have no direction; they stay zeros, with finite gradients.
  return x * jax.lax.rsqrt(jnp.maximum(squares, _LEAST_SQUARE))
