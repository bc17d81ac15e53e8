"""Prefix language model: bidirectional attention in the prefix.

Other tokens attend causally (Raffel et al. 2019,
https://arxiv.org/abs/1910.10683, section 3.2.1).
"""

import jax
from jaxtyping import Array, Float, Int

from paxon.layers import token_context
from paxon.layers.models import decoder_lm, document_scores, language_model


class PrefixLm(decoder_lm.DecoderLm):
  """A `DecoderLm` whose prompts are prefixes.

  Its mixers support `TokenContext.prefix`. Loss weights are usually 0 for
  targets in the prefix, which could be copied from the input.
  """

  def loss(
    self, batch: language_model.Batch, *, deterministic: bool = True
  ) -> language_model.Result:
    """Returns `DecoderLm.loss` of a batch with `prefix` bool [B,T].

    Raises:
      ValueError: The batch has no `prefix`.
    """
    _check(batch)
    return super().loss(batch, deterministic=deterministic)

  def score(
    self, batch: language_model.Batch
  ) -> document_scores.DocumentScores:
    """Returns `DecoderLm.score`; the batch is that of `loss`.

    Raises:
      ValueError: The batch has no `prefix`.
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
  ) -> Float[Array, "batch tokens vocab"]:
    """Reads prompts as prefixes; otherwise as `DecoderLm.prefill`.

    Raises:
      ValueError: The cache is not mutable.
    """
    prefix: jax.Array = segment_ids != 0
    context = token_context.TokenContext(
      positions, segment_ids, prefix, cache_length=cache_length
    )
    return self._prefill(inputs, context, at)


def _check(batch: language_model.Batch) -> None:
  if "prefix" not in batch:
    raise ValueError(
      "PrefixLm needs batch['prefix'], bool [B,T], true in the prefix; the"
      f" batch has {sorted(batch)}."
    )
