"""Tests for the baselines."""

import lzma
import random

import numpy as np
import pytest

from paxon.inputs import (
  byte_tokenizer,
  document_source,
  example_source,
  text_baselines,
  trigram_model,
)

_TRAIN = document_source.InMemoryDocuments(
  [b"for line in lines:\n", b"if line:\n  return line\n", b"lines = []\n"]
)
_HELD_OUT = document_source.InMemoryDocuments(
  [b"for line in line:\n", b"", b"  return lines\n"]
)


def test_xz_is_the_size_of_the_compressed_file():
  # Generated, so that it is the same on every machine.
  source_of = random.Random(0)
  words = ["".join(source_of.choices("abcdefgh ", k=5)) for _ in range(300)]
  parts = [" ".join(source_of.choices(words, k=4000)).encode()] * 2
  joined = parts[0] + parts[1]
  # The filter chain of the command `xz -9e`.
  filters = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME}]
  size = len(lzma.compress(joined, format=lzma.FORMAT_XZ, filters=filters))
  other = len(lzma.compress(joined, preset=9))
  assert size != other, "the text does not tell the presets apart"
  source = document_source.InMemoryDocuments(parts)
  assert text_baselines.xz_bits_per_byte(source) == 8 * size / len(joined)


def test_xz_of_noise_is_eight_bits_and_of_zeros_almost_none():
  noise = document_source.InMemoryDocuments(
    [random.Random(0).randbytes(50_000)]
  )
  zeros = document_source.InMemoryDocuments([bytes(25_000)] * 2)
  assert text_baselines.xz_bits_per_byte(noise) == pytest.approx(8, rel=0.01)
  assert text_baselines.xz_bits_per_byte(zeros) < 0.05


def test_trigram_counts_ends_as_targets_but_not_as_bytes():
  model = trigram_model.fit(_TRAIN)
  actual = text_baselines.trigram_bits_per_byte(_HELD_OUT, train=_TRAIN)
  assert actual == model.bits(_HELD_OUT) / 33


def test_both_are_named_and_have_titles():
  baselines = text_baselines.TextBaselines(train=_TRAIN, held_out=_HELD_OUT)
  results = baselines()
  assert results == {
    "xz": text_baselines.xz_bits_per_byte(_HELD_OUT),
    "trigram": text_baselines.trigram_bits_per_byte(_HELD_OUT, train=_TRAIN),
  }
  assert text_baselines.TITLES.keys() == results.keys()


@pytest.mark.parametrize("documents", [[], [b"", b""]])
def test_rejects_held_out_documents_without_bytes(documents):
  empty = document_source.InMemoryDocuments(documents)
  with pytest.raises(ValueError, match=r"held-out documents have no bytes"):
    text_baselines.xz_bits_per_byte(empty)
  with pytest.raises(ValueError, match=r"held-out documents have no bytes"):
    text_baselines.trigram_bits_per_byte(empty, train=_TRAIN)


def test_text_round_trips_without_begin_and_end():
  texts = ["In the beginning", "", "naïve café"]
  examples = example_source.TokenizedDocuments(
    source=document_source.InMemoryDocuments(texts),
    tokenizer=byte_tokenizer.ByteTokenizer(),
  )
  found = text_baselines.DecodedDocuments(
    source=examples, tokenizer=byte_tokenizer.ByteTokenizer()
  )
  assert [found[i] for i in range(len(found))] == [t.encode() for t in texts]


def test_rejects_targets_that_are_not_text():
  examples = example_source.InMemoryExamples(
    [np.array([1, 3 + 0xFF, 2], np.int32)]
  )
  found = text_baselines.DecodedDocuments(
    source=examples, tokenizer=byte_tokenizer.ByteTokenizer()
  )
  with pytest.raises(ValueError, match=r"example 0 has 3 bytes of text.*for 1"):
    _ = found[0]
