"""Tests for edit distances on the device, against the host's and strings."""

import jax
import jax.numpy as jnp
import numpy as np

from paxon.layers.speech import ctc, error_rate

RNG = np.random.default_rng(0)
SPACE = 1

_edit_distance = jax.jit(error_rate.edit_distance)
_word_edit_distance = jax.jit(
  error_rate.word_edit_distance, static_argnames="space_id"
)


def _texts(count, size, symbols):
  ids = RNG.integers(1, symbols, (count, size)).astype(np.int32)
  lengths = RNG.integers(0, size + 1, count).astype(np.int32)
  return ids, lengths


def _args(*arrays):
  return tuple(jnp.asarray(x) for x in arrays)


def _errors(reference, hypothesis):
  found = ctc.count_errors(reference, hypothesis)
  return found.substitutions + found.deletions + found.insertions


def test_edit_distance_is_that_of_the_host():
  ours, lengths = _texts(60, 7, 4)
  others, counts = _texts(60, 9, 4)
  found = _edit_distance(*_args(ours, lengths, others, counts))
  expected = [
    _errors(a[:n].tolist(), b[:m].tolist())
    for a, n, b, m in zip(ours, lengths, others, counts, strict=True)
  ]
  np.testing.assert_array_equal(found, expected)


def test_known_distances():
  words = ["kitten", "sitting", "", "abc"]
  ids = np.zeros((4, 8), np.int32)
  for i, word in enumerate(words):
    ids[i, : len(word)] = [ord(c) - 90 for c in word]
  lengths = np.asarray([len(w) for w in words], np.int32)
  order = [1, 0, 3, 2]
  args = _args(ids, lengths, ids[order], lengths[order])
  assert _edit_distance(*args).tolist() == [3, 3, 3, 3]


def test_word_distance_is_that_of_split_strings():
  # Few symbols, so that words are often equal; spaces at ends and repeated.
  ours, lengths = _texts(80, 10, 4)
  others, counts = _texts(80, 12, 4)
  others[:20, :10], counts[:20] = ours[:20], lengths[:20]
  others[20:40, 1:11], counts[20:40] = ours[20:40], lengths[20:40] + 1
  found, words = _word_edit_distance(
    *_args(ours, lengths, others, counts), space_id=SPACE
  )

  def split(ids, length):
    letters = [" " if i == SPACE else chr(96 + i) for i in ids[:length]]
    return "".join(letters).split()

  expected = [
    (split(a, n), split(b, m))
    for a, n, b, m in zip(ours, lengths, others, counts, strict=True)
  ]
  np.testing.assert_array_equal(found, [_errors(a, b) for a, b in expected])
  np.testing.assert_array_equal(words, [len(a) for a, _ in expected])
  assert not found[:20].any()


def test_padding_has_no_effect():
  ours, lengths = _texts(30, 8, 5)
  others, counts = _texts(30, 8, 5)
  expected = _word_edit_distance(
    *_args(ours, lengths, others, counts), space_id=SPACE
  )
  for ids, length in ((ours, lengths), (others, counts)):
    ids[np.arange(8)[None] >= length[:, None]] = 99
  found = _word_edit_distance(
    *_args(np.pad(ours, ((0, 0), (0, 3))), lengths, others, counts),
    space_id=SPACE,
  )
  for one, other in zip(found, expected, strict=True):
    np.testing.assert_array_equal(one, other)
