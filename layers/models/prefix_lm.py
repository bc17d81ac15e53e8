"""Prefix language model: reads a prefix both ways, and writes what follows.

Tokens of a prefix see each other whatever their order; the others see what came
before (Raffel et al. 2019, https://arxiv.org/abs/1910.10683, section 3.2.1).
"""

import jax
from jaxtyping import Array, Float, Int

from paxon.layers.models import decoder_lm, document_scores, language_head


class PrefixLm(decoder_lm.DecoderLm):
  """A `DecoderLm` whose prompts are prefixes.

  Its blocks take `prefix` after the segment ids. What is trained on is said by
  the weights: usually they are 0 where the target is part of the prefix, which
  otherwise could be read off the input.
  """

  def loss(
    self, batch: language_head.Batch, *, deterministic: bool = True
  ) -> language_head.Result:
    """Returns what `DecoderLm.loss` does.

    Args:
      batch: As there, with `prefix` bool [B,T].
      deterministic: Whether dropout is off.

    Raises:
      ValueError: The batch has no prefix.
    """
    _check(batch)
    return super().loss(batch, deterministic=deterministic)

  def score(self, batch: language_head.Batch) -> document_scores.DocumentScores:
    """Returns what `DecoderLm.score` does; the batch is that of `loss`.

    Raises:
      ValueError: The batch has no prefix.
    """
    _check(batch)
    return super().score(batch)

  def prefill(
    self,
    inputs: Int[Array, "batch length"],
    positions: Int[Array, "batch length"],
    segment_ids: Int[Array, "batch length"],
    *,
    cache_length: int,
    at: Int[Array, " batch"] | None = None,
  ) -> Float[Array, "batch places vocab"]:
    """Reads prompts, each a prefix; otherwise as in `DecoderLm`.

    Raises:
      ValueError: The cache is not mutable.
    """
    prefix: jax.Array = segment_ids != 0
    return self._prefilled(
      inputs, positions, segment_ids, prefix, cache_length=cache_length, at=at
    )


def _check(batch: language_head.Batch) -> None:
  if "prefix" not in batch:
    raise ValueError(
      "PrefixLm needs batch['prefix'], bool [B,T], which is true for tokens "
      f"of a prefix; the batch has {sorted(batch)}."
    )
