"""Sentence encoder: one vector for each text.

  vector = steps(pooling(encoder(text)))

Poolings are those of sentence-transformers (Reimers and Gurevych 2019,
https://arxiv.org/abs/1908.10084), by their names there. The loss is that of
pairs of texts, each of which has the other texts of the batch as negatives
(Henderson et al. 2017, https://arxiv.org/abs/1705.00652), in both directions.

Letters: B batch, T length, D embed, E vector.
"""

from collections.abc import Callable, Mapping, Sequence
import functools
from typing import Final

from flax import linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from paxon.layers import precision, token_context
from paxon.layers.losses import contrastive_losses
from paxon.layers.models import classifier, language_model
from paxon.sharding import checks

# Keys of the second texts of pairs begin with it.
PAIR: Final = "encoder_"
# `[B,D] -> [B,E]`, such as `normalize`.
Step = Callable[[jax.Array], jax.Array]


def pool_max(
  x: Float[Array, "batch length embed"],
  segment_ids: Int[Array, "batch length"],
) -> Float[Array, "batch embed"]:
  """Returns the maximum over all tokens of each entry; zeros for no token."""
  inside = (segment_ids != 0)[:, :, None]
  most = jnp.max(jnp.where(inside, x, -jnp.inf), axis=1)
  return jnp.where(jnp.any(inside, axis=1), most, 0).astype(x.dtype)


def pool_sum(
  x: Float[Array, "batch length embed"],
  segment_ids: Int[Array, "batch length"],
  *,
  weigh: Callable[[jax.Array], tuple[jax.Array, jax.Array]],
) -> Float[Array, "batch embed"]:
  """Returns a weighted sum of the tokens, divided by a number of the text.

  `weigh` maps float [B,T], which is 1 for tokens, to weights [B,T] and a
  divisor [B].
  """
  x32 = precision.widen(x)
  weights, divisor = weigh((segment_ids != 0).astype(x32.dtype))
  total = jnp.sum(
    jnp.where(segment_ids[..., None] != 0, x32, 0) * weights[:, :, None], axis=1
  )
  return (total / jnp.maximum(divisor, 1)[:, None]).astype(x.dtype)


def _weigh_by_root(inside: jax.Array) -> tuple[jax.Array, jax.Array]:
  return inside, jnp.sqrt(jnp.sum(inside, axis=1))


def _weigh_by_position(inside: jax.Array) -> tuple[jax.Array, jax.Array]:
  weights = inside * jnp.cumsum(inside, axis=1)
  return weights, jnp.sum(weights, axis=1)


POOLINGS: Mapping[str, classifier.Pooling] = {
  "cls": classifier.pool_first,
  "max": pool_max,
  "mean": classifier.pool_mean,
  "mean_sqrt_len_tokens": functools.partial(pool_sum, weigh=_weigh_by_root),
  "weightedmean": functools.partial(pool_sum, weigh=_weigh_by_position),
  "lasttoken": classifier.pool_last,
}


def normalize(x: Float[Array, "batch embed"]) -> Float[Array, "batch embed"]:
  """Returns vectors of length one; zeros stay zeros."""
  wide = precision.widen(x)
  squares = jnp.sum(wide * wide, axis=-1, keepdims=True)
  # The maximum inside has a finite gradient at zero.
  return (wide * jax.lax.rsqrt(jnp.maximum(squares, 1e-24))).astype(x.dtype)


class SentenceEncoder(nn.Module):
  """An encoder, one or several poolings, and steps.

  Variables have the names that they have in the encoder alone. A head of the
  encoder keeps its variables without being used.

  Attributes:
    encoder: A `masked_lm.TextEncoder`, or a `MaskedLm`.
    pooling: Names in `POOLINGS`; the vectors of several are concatenated.
    steps: Functions of the pooled vectors, in order.
    scale: Factor of the cosines of the loss.
  """

  encoder: nn.Module
  pooling: Sequence[str] = ("mean",)
  steps: Sequence[Step] = ()
  scale: float = 20.0

  def __post_init__(self) -> None:
    # Tuples keep the module hashable where lists were given.
    self.pooling, self.steps = tuple(self.pooling), tuple(self.steps)
    super().__post_init__()
    unknown = [each for each in self.pooling if each not in POOLINGS]
    if unknown or not self.pooling:
      raise ValueError(
        "SentenceEncoder.pooling must have names among"
        f" {', '.join(POOLINGS)}, got {list(self.pooling)}."
      )
    checks.check_positive(self, "scale")

  def setup(self) -> None:
    """Shares the scope of the encoder."""
    nn.share_scope(self, self.encoder)

  def __call__(
    self, batch: language_model.Batch, prefix: str = ""
  ) -> Float[Array, "batch vector"]:
    """Returns the vectors of a batch's texts.

    Args:
      batch: `inputs`, `positions` and `segment_ids`, int32 [B,T].
      prefix: Of these keys.
    """
    keys = [f"{prefix}{x}" for x in ("inputs", "positions", "segment_ids")]
    language_model.check_keys(self, batch, keys)
    ids, positions, segment_ids = (batch[key] for key in keys)
    if self.is_initializing():
      # Makes the variables of a head, too.
      self.encoder(ids, positions, segment_ids)
    context = token_context.TokenContext(positions, segment_ids)
    x = self.encoder.hidden(ids, context)
    pooled = [POOLINGS[name](x, segment_ids) for name in self.pooling]
    vectors = jnp.concatenate(pooled, axis=-1)
    for step in self.steps:
      vectors = step(vectors)
    return vectors

  def loss(
    self, batch: language_model.Batch, *, deterministic: bool = True
  ) -> language_model.Result:
    """Returns the loss, metrics and per-example outputs of a batch.

    Args:
      batch: Batch of `__call__`. With the second texts of pairs, whose keys
        begin with `PAIR`, also `example_weights` float32 [B].
      deterministic: Without effect: there is no dropout.

    Returns:
      `(sum, weight)` of the loss, in nats, the mean over both directions: that
      of all texts the own one is chosen, by its cosine; of weight 0 without
      pairs. The metric `accuracy` is that of the first direction. The output
      `embedding` [B,E].
    """
    del deterministic
    vectors = self(batch)
    outputs = {"embedding": jax.lax.stop_gradient(precision.widen(vectors))}
    if f"{PAIR}inputs" not in batch:
      zero = jnp.zeros((), outputs["embedding"].dtype)
      return (zero, zero), {}, outputs
    own, other = (
      normalize(precision.widen(x)) for x in (vectors, self(batch, PAIR))
    )
    scores = self.scale * jnp.einsum("BE,CE->BC", own, other)
    weights = batch["example_weights"].astype(scores.dtype)
    total = jnp.sum(weights)
    # Examples that only pad the batch are no negatives.
    best = jnp.argmax(jnp.where(weights[None] > 0, scores, -jnp.inf), axis=1)
    hits = jnp.sum(
      (best == jnp.arange(len(best))).astype(weights.dtype) * weights
    )
    loss = jnp.sum(contrastive_losses.softmax(scores, weights) * weights)
    return (loss, total), {"accuracy": (hits, total)}, outputs
