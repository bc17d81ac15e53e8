"""Edit distances of batches of texts on the device, for error rates.

The distance is the smallest number of substitutions, deletions and insertions
from a reference to a hypothesis (Levenshtein 1966). With characters as items it
gives the character error rate, with words the word error rate. `ctc.Errors`
computes both on the host, with the kinds of errors.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Int32, UInt32
import numpy as np

# Odd factors of two polynomial hashes of 32 bits each.
_FACTORS = (0x9E3779B1, 0x85EBCA77)


def edit_distance(
  reference: Int[Array, "batch reference"],
  reference_lengths: Int[Array, "batch"],
  hypothesis: Int[Array, "batch hypothesis"],
  hypothesis_lengths: Int[Array, "batch"],
) -> Int32[Array, "batch"]:
  """Returns the distances of sequences of ids; padding has no effect.

  Args:
    reference: Ids, those within the lengths first.
    reference_lengths: Number of ids.
    hypothesis: Ids, those within the lengths first.
    hypothesis_lengths: Number of ids.
  """
  return _distance(
    reference[..., None],
    reference_lengths,
    hypothesis[..., None],
    hypothesis_lengths,
  )


def word_edit_distance(
  reference: Int[Array, "batch reference"],
  reference_lengths: Int[Array, "batch"],
  hypothesis: Int[Array, "batch hypothesis"],
  hypothesis_lengths: Int[Array, "batch"],
  *,
  space_id: int,
) -> tuple[Int32[Array, "batch"], Int32[Array, "batch"]]:
  """Returns the distances in words, and the words of the references.

  Words are compared by hashes of 64 bits. Arguments are those of
  `edit_distance`, as ids of characters; spaces separate words, any number of
  them.
  """
  ours, count = _to_words(reference, reference_lengths, space_id)
  others, found = _to_words(hypothesis, hypothesis_lengths, space_id)
  return _distance(ours, count, others, found), count


def _to_words(
  ids: jax.Array, lengths: jax.Array, space_id: int
) -> tuple[UInt32[Array, "batch words 2"], Int32[Array, "batch"]]:
  """Returns hashes of the words of texts, and their numbers."""
  batch, size = ids.shape
  at = jnp.arange(size, dtype=jnp.int32)[None]
  is_letter = (at < lengths[:, None]) & (ids != space_id)
  before = jnp.pad(is_letter[:, :-1], ((0, 0), (1, 0)))
  begins = is_letter & ~before
  number = jnp.cumsum(begins, axis=1, dtype=jnp.int32) - 1
  # Where the letter's word begins.
  begin = jax.lax.cummax(jnp.where(begins, at, 0), axis=1)
  sequence = jnp.arange(batch, dtype=jnp.int32)[:, None]
  word = jnp.where(is_letter, number, size)
  hashes = []
  for factor in _FACTORS:
    powers = np.asarray([pow(factor, i, 2**32) for i in range(size)], np.uint32)
    terms = (ids.astype(jnp.uint32) + 1) * jnp.asarray(powers)[at - begin]
    # Entries of other letters are dropped.
    total = jnp.zeros((batch, size), jnp.uint32)
    hashes.append(total.at[sequence, word].add(terms, mode="drop"))
  count = jnp.sum(begins, axis=1, dtype=jnp.int32)
  return jnp.stack(hashes, axis=-1), count


def _distance(
  reference: jax.Array,
  reference_lengths: jax.Array,
  hypothesis: jax.Array,
  hypothesis_lengths: jax.Array,
) -> jax.Array:
  """Returns the distances of items [B,N,K], equal if all K numbers are."""
  batch, size = reference.shape[:2]
  at = jnp.arange(size + 1, dtype=jnp.int32)[None]

  def extend(
    costs: jax.Array, step: tuple[jax.Array, jax.Array]
  ) -> tuple[jax.Array, None]:
    # costs[b, i]: of the first i items of the reference and the hypothesis so
    # far. The deletions that follow cost 1 each, which is a running minimum.
    item, number = step
    differs = jnp.any(reference != item[:, None], axis=-1).astype(jnp.int32)
    replaced = jnp.minimum(costs[:, :-1] + differs, costs[:, 1:] + 1)
    first = costs[:, :1] + 1
    best = jnp.concatenate([first, replaced], axis=1)
    best = jax.lax.cummin(best - at, axis=1) + at
    return jnp.where((number < hypothesis_lengths)[:, None], best, costs), None

  numbers = jnp.arange(hypothesis.shape[1], dtype=jnp.int32)
  start = jnp.broadcast_to(at, (batch, size + 1))
  costs, _ = jax.lax.scan(
    extend, start, (jnp.moveaxis(hypothesis, 1, 0), numbers)
  )
  return jnp.take_along_axis(costs, reference_lengths[:, None], axis=1)[:, 0]
