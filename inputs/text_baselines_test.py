"""Tests for the baselines."""

import collections
import lzma
import math
import random

import numpy as np
import pytest

from paxon.inputs import byte_tokenizer, text_baselines
from paxon.inputs.sources import example_source

_TRAIN = example_source.InMemoryDocuments(
  [b"for line in lines:\n", b"if line:\n  return line\n", b"lines = []\n"]
)
_HELD_OUT = example_source.InMemoryDocuments(
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
  source = example_source.InMemoryDocuments(parts)
  assert text_baselines.xz_bits_per_byte(source) == 8 * size / len(joined)


def test_xz_of_noise_is_eight_bits_and_of_zeros_almost_none():
  noise = example_source.InMemoryDocuments([random.Random(0).randbytes(50_000)])
  zeros = example_source.InMemoryDocuments([bytes(25_000)] * 2)
  assert text_baselines.xz_bits_per_byte(noise) == pytest.approx(8, rel=0.01)
  assert text_baselines.xz_bits_per_byte(zeros) < 0.05


def test_trigram_counts_ends_as_targets_but_not_as_bytes():
  model = text_baselines.fit_trigram(_TRAIN)
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
  empty = example_source.InMemoryDocuments(documents)
  with pytest.raises(ValueError, match=r"held-out documents have no bytes"):
    text_baselines.xz_bits_per_byte(empty)
  with pytest.raises(ValueError, match=r"held-out documents have no bytes"):
    text_baselines.trigram_bits_per_byte(empty, train=_TRAIN)


def test_text_round_trips_without_begin_and_end():
  texts = ["In the beginning", "", "naïve café"]
  examples = example_source.TokenizedDocuments(
    source=example_source.InMemoryDocuments(texts),
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


_TEXT = [
  b"the cat sat on the mat",
  b"the dog sat on the log",
  b"a cat and a dog",
  b"",
  b"\x00\xff\x00\xff",
  b"then the hat",
]


class DictionaryTrigram:
  """An oracle with dictionaries instead of arrays."""

  def __init__(self, documents, weights):
    self.weights = weights
    self.counts = collections.Counter()
    for document in documents:
      for history, symbol in self.events(document):
        for order in range(3):
          self.counts[history[2 - order :], symbol] += 1
          self.counts[history[2 - order :]] += 1

  @staticmethod
  def events(document):
    symbols = ["begin", "begin", *document, "end"]
    for i in range(2, len(symbols)):
      yield tuple(symbols[i - 2 : i]), symbols[i]

  def probability(self, history, symbol):
    estimate = 1 / 257
    total = self.weights[0] * estimate
    for order in range(3):
      context = history[2 - order :]
      if self.counts[context]:
        estimate = self.counts[context, symbol] / self.counts[context]
      total += self.weights[order + 1] * estimate
    return total

  def bits(self, documents):
    return -sum(
      math.log2(self.probability(history, symbol))
      for document in documents
      for history, symbol in self.events(document)
    )


def _source(documents):
  return example_source.InMemoryDocuments(documents)


def test_bits_by_hand():
  counts = np.zeros((257, 257, 257), np.uint32)
  # One training document, "ab": begin begin -> a, begin a -> b, a b -> end.
  a, b, edge = ord("a"), ord("b"), 256
  counts[edge, edge, a] = counts[edge, a, b] = counts[a, b, edge] = 1
  model = text_baselines.TrigramModel(
    counts=counts, weights=np.array([0.1, 0.2, 0.3, 0.4])
  )
  # "bb": b after begin begin: 0.1 / 257 + 0.2 / 3. b after begin b, a context
  # that never occurred, uses the bigram; b was followed only by the end, so the
  # probability is the same. The end after b b: both estimates are 1.
  twice = 0.1 / 257 + 0.2 / 3
  end = 0.1 / 257 + 0.2 / 3 + 0.3 + 0.4
  expected = -(2 * math.log2(twice) + math.log2(end))
  assert model.bits(_source([b"bb"])) == pytest.approx(expected, rel=1e-12)


def test_documents_are_independent():
  model = text_baselines.fit_trigram(_source(_TEXT))
  one_by_one = [model.bits(_source([text])) for text in _TEXT]
  assert model.bits(_source(_TEXT)) == pytest.approx(sum(one_by_one))


def test_matches_the_oracle():
  model = text_baselines.fit_trigram(_source(_TEXT))
  oracle = DictionaryTrigram(_TEXT, model.weights)
  held_out = [b"the rat sat", b"", b"\x80 and\xff\x00"]
  assert model.bits(_source(held_out)) == pytest.approx(
    oracle.bits(held_out), rel=1e-12
  )
  symbols = [*range(256), "end"]
  for history in [(116, 104), (104, 200), (200, 201), ("begin", "begin")]:
    total = sum(oracle.probability(history, symbol) for symbol in symbols)
    assert total == pytest.approx(1)


def test_counts_include_all_training_documents():
  model = text_baselines.fit_trigram(_source(_TEXT))
  # Each byte and each end is one target.
  assert model.counts.sum() == sum(len(text) + 1 for text in _TEXT)
  assert model.counts[ord("t"), ord("h"), ord("e")] == 6
  assert model.counts[256, 256, 256] == 1


def test_counts_do_not_depend_on_chunks(monkeypatch):
  expected = text_baselines.fit_trigram(_source(_TEXT))
  monkeypatch.setattr(text_baselines, "_CHUNK_BYTES", 5)
  actual = text_baselines.fit_trigram(_source(_TEXT))
  np.testing.assert_array_equal(actual.counts, expected.counts)
  np.testing.assert_array_equal(actual.weights, expected.weights)


def test_weights_maximize_the_likelihood_of_every_twentieth_document():
  rng = np.random.default_rng(0)
  words = [b"alpha ", b"beta ", b"gamma ", b"delta ", b"x", b"1", b"\n"]
  documents = [
    b"".join(words[i] for i in rng.integers(0, len(words), 60))
    for _ in range(41)
  ]
  weights = text_baselines.fit_trigram(_source(documents)).weights
  assert weights.sum() == pytest.approx(1)
  assert weights.min() > 0
  tuning = documents[::20]
  others = [d for i, d in enumerate(documents) if i % 20]
  best = DictionaryTrigram(others, weights).bits(tuning)
  for candidate in rng.dirichlet([1, 1, 1, 1], 60):
    assert DictionaryTrigram(others, candidate).bits(tuning) > 0.999 * best


def test_weights_are_not_fit_on_counted_documents():
  # For noise, trigram counts are useful only on counted documents.
  rng = np.random.default_rng(1)
  documents = [rng.bytes(300) for _ in range(41)]
  weights = text_baselines.fit_trigram(_source(documents)).weights
  assert weights[3] < 0.05


def test_rejects_too_few_documents():
  with pytest.raises(ValueError, match=r"at least 2 documents, got 1"):
    text_baselines.fit_trigram(_source([b"text"]))
