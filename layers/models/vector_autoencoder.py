"""Vector-quantized autoencoder of images or videos (VQ-VAE).

  codes = quantizer(encoder(x))
  loss = weight * mean |decoder(codes) - x|**2 + loss of the quantizer

van den Oord et al. 2017, https://arxiv.org/abs/1711.00937; the quantizer may be
any of `layers.quantizers`. With `adversary` it is a VQGAN (Esser et al. 2020,
https://arxiv.org/abs/2012.09841), without the perceptual loss, which needs a
pretrained network; one train step trains the discriminator, too.

Letters: B batch, D features, G groups.
"""

import math

from flax import linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from paxon.layers import precision
from paxon.layers.models import language_model
from paxon.layers.quantizers import codes
from paxon.sharding import checks

# The use of more codes is not measured: it takes an array of all of them for
# each position.
_MAX_CODES = 2**14


class VectorAutoencoder(nn.Module):
  """Encoder, quantizer and decoder.

  Attributes:
    encoder: Maps images [B,H,W,C] or videos [B,T,H,W,C] to latents
      [B,...,D], such as `autoencoder.Encoder`.
    quantizer: Quantizes latents [B,N,D], such as `EmaVectorQuantizer`.
    decoder: Maps quantized latents to images, such as `autoencoder.Decoder`.
    input_key: Batch key of the images.
    reconstruction_weight: Factor of the mean squared error; 5 is usual with an
      adversary.
    adversary: Adds the losses of a discriminator of the reconstructions, such
      as `discriminator.AdversarialLoss`.
  """

  encoder: nn.Module
  quantizer: nn.Module
  decoder: nn.Module
  input_key: str = "images"
  reconstruction_weight: float = 1.0
  adversary: nn.Module | None = None

  def __post_init__(self) -> None:
    super().__post_init__()
    checks.check_positive(self, "reconstruction_weight")

  def __call__(
    self, batch: language_model.Batch, *, deterministic: bool = True
  ) -> Float[Array, "batch *space channels"]:
    """Returns the reconstructions of a batch.

    Raises:
      ValueError: `input_key` is missing in the batch.
    """
    latents = self.encoder(self._images(batch))
    found = self._quantize(latents, None, deterministic)
    return self.decoder(found.values.reshape(latents.shape))

  def encode(
    self, batch: language_model.Batch
  ) -> Int[Array, "batch *latents groups"]:
    """Returns the ids of the codes, at each position of the latents."""
    latents = self.encoder(self._images(batch))
    ids = self._quantize(latents, None, True).ids
    return ids.reshape(*latents.shape[:-1], -1)

  def loss(
    self, batch: language_model.Batch, *, deterministic: bool = True
  ) -> language_model.Result:
    """Returns the loss, metrics and per-example outputs of a batch.

    Args:
      batch: `input_key`, and `example_weights` float32 [B], zero for padding
        examples.
      deterministic: False (training) updates averages of the quantizer.

    Returns:
      `(sum, weight)` of the loss. Metrics, as such pairs: `reconstruction`, the
      mean squared error; `quantizer`, the loss of the quantizer; for up to
      16,384 codes also their `perplexity` and `coverage`; the terms of the
      adversary, such as `generator`. Outputs: `row_error` and `row_weight` [B].

    Raises:
      ValueError: A key is missing in the batch.
    """
    images = precision.widen(self._images(batch))
    language_model.check_keys(self, batch, ["example_weights"])
    weights = batch["example_weights"]
    latents = self.encoder(self._images(batch))
    count = math.prod(latents.shape[1:-1])
    mask = jnp.broadcast_to((weights > 0)[:, None], (len(weights), count))
    found = self._quantize(latents, mask, deterministic)
    decoded = self.decoder(found.values.reshape(latents.shape))
    squares = jnp.square(precision.widen(decoded) - images)
    errors = jnp.mean(squares.reshape(len(squares), -1), axis=1)
    weights = weights.astype(errors.dtype)
    total = jnp.sum(weights)
    error = jnp.sum(jnp.where(weights > 0, errors, 0) * weights)
    metrics = {
      "reconstruction": (error, total),
      "quantizer": (found.loss * total, total),
    }
    quantizer = self.quantizer
    is_counted = isinstance(quantizer, codes.HasCodes)
    if is_counted and quantizer.num_codes <= _MAX_CODES:
      usage = codes.usage(found.ids, mask, num_codes=quantizer.num_codes)
      metrics |= {
        "perplexity": (usage.perplexity * total, total),
        "coverage": (usage.coverage * total, total),
      }
    loss = self.reconstruction_weight * error + found.loss * total
    if self.adversary is not None:
      mean, terms = self.adversary(
        images,
        precision.widen(decoded),
        weights,
        deterministic=deterministic,
      )
      loss += mean * total
      metrics |= {name: (term * total, total) for name, term in terms.items()}
    outputs = {
      "row_error": jax.lax.stop_gradient(errors),
      "row_weight": weights,
    }
    return (loss, total), metrics, outputs

  def predict(self, batch: language_model.Batch) -> dict[str, jax.Array]:
    """Returns the reconstructed `images`."""
    return {"images": self(batch)}

  def _images(self, batch: language_model.Batch) -> jax.Array:
    language_model.check_keys(self, batch, [self.input_key])
    return batch[self.input_key]

  def _quantize(
    self, latents: jax.Array, mask: jax.Array | None, deterministic: bool
  ) -> codes.Codes:
    flat = latents.reshape(len(latents), -1, latents.shape[-1])
    return self.quantizer(flat, mask, deterministic=deterministic)
