"""Compression baselines in bits per byte on held-out text.

They are references for a language model's bits per byte on the same text:

* `xz`: the concatenated held-out documents, compressed by LZMA at its strongest
  setting (`xz -9e`), including header, index and checksum. It uses no training
  text.
* `trigram`: an interpolated byte trigram model of the training split. The end
  of a document counts as a target, as in a language model's loss, but not as a
  byte.

The trigram model's probability of a symbol t (a byte, or the end of the
document) after the symbols c2 c1 is a mixture of four estimates from counts n:

    p(t | c2 c1) = w3 n(c2 c1 t) / n(c2 c1) + w2 n(c1 t) / n(c1)
                   + w1 n(t) / n + w0 / 257

A document begins with two begin symbols, so documents are independent. A
context that never occurred uses the estimate of the next shorter context. The
four weights sum to 1 and are fit as in Jelinek and Mercer (1980): expectation
maximization on every 20th training document, given the counts of the others.
The final counts are of all training documents.
"""

from collections.abc import Iterable, Mapping
import dataclasses
import lzma
import types

import numpy as np
import numpy.typing as npt

from paxon.inputs import tokenizer_protocol
from paxon.inputs.sources import example_source

# Display names by metric key.
TITLES: Mapping[str, str] = types.MappingProxyType(
  {"xz": "xz -9e", "trigram": "byte trigram model"}
)
# A symbol is a byte, or 256: the begin in a context, the end as a target.
_EDGE = 256
_NUM_SYMBOLS = 257
_TUNING_STRIDE = 20
_NUM_ITERATIONS = 20
# Documents are counted in chunks of bounded size, to limit calls and memory.
_CHUNK_BYTES = 1 << 20


def xz_bits_per_byte(held_out: example_source.DocumentSource) -> float:
  """Returns 8 * (size of the `.xz` file) / (size of the joined documents)."""
  text = b"".join(held_out[i] for i in range(len(held_out)))
  _check_has_bytes(len(text))
  return (
    8 * len(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME)) / len(text)
  )


def trigram_bits_per_byte(
  held_out: example_source.DocumentSource,
  *,
  train: example_source.DocumentSource,
) -> float:
  """Returns the bits per byte of the trigram model of `train`."""
  num_bytes = sum(len(held_out[i]) for i in range(len(held_out)))
  _check_has_bytes(num_bytes)
  return fit_trigram(train).bits(held_out) / num_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextBaselines:
  """A configurable callable that computes both baselines.

  Attributes:
    train: The training documents.
    held_out: The evaluation documents.
  """

  train: example_source.DocumentSource
  held_out: example_source.DocumentSource

  def __call__(self) -> dict[str, float]:
    """Returns the bits per byte of "xz" and "trigram"; takes seconds."""
    return {
      "xz": xz_bits_per_byte(self.held_out),
      "trigram": trigram_bits_per_byte(self.held_out, train=self.train),
    }


def _check_has_bytes(num_bytes: int) -> None:
  if not num_bytes:
    raise ValueError(
      "The held-out documents have no bytes, so there are no bits per byte."
    )


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class DecodedDocuments:
  """The text of each example's targets.

  Attributes:
    source: The examples.
    tokenizer: The tokenizer of the examples.
  """

  source: example_source.ExampleSource
  tokenizer: tokenizer_protocol.Tokenizer

  def __len__(self) -> int:
    return len(self.source)

  def __getitem__(self, index: int, /) -> bytes:
    """Returns the text of an example as UTF-8.

    Raises:
      ValueError: The text does not have the number of bytes of the targets:
        it is not UTF-8, or the targets are of another tokenizer.
    """
    targets = self.source[index]["targets"]
    text = self.tokenizer.decode(targets).encode()
    expected = int(self.tokenizer.byte_counts(targets).sum())
    if len(text) != expected:
      raise ValueError(
        f"DecodedDocuments: example {index} has {len(text)} bytes of text, and"
        f" its targets stand for {expected}; it cannot be read back."
      )
    return text


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TrigramModel:
  """Counts of text and the weights of their mixture.

  Attributes:
    counts: The count of each triple (c2, c1, t), uint32 [257, 257, 257].
    weights: w0 to w3, float64 [4].
  """

  counts: npt.NDArray[np.uint32]
  weights: npt.NDArray[np.float64]

  def bits(self, documents: example_source.DocumentSource) -> float:
    """Returns the code length of the documents in bits, including ends."""
    estimates = _Estimates(self.counts)
    total = 0.0
    for document in (documents[i] for i in range(len(documents))):
      probabilities = self.weights @ estimates.estimate(*_triples([document]))
      total -= float(np.log2(probabilities).sum())
    return total


def fit_trigram(documents: example_source.DocumentSource) -> TrigramModel:
  """Returns the model of at least two training documents."""
  if len(documents) < 2:
    raise ValueError(
      f"A trigram model needs at least 2 documents, got {len(documents)}."
    )
  numbers = range(len(documents))
  tuning = [documents[i] for i in numbers[::_TUNING_STRIDE]]
  others = (documents[i] for i in numbers if i % _TUNING_STRIDE)
  counts = np.zeros((_NUM_SYMBOLS,) * 3, np.uint32)
  _count(counts, others)
  weights = _likeliest_weights(_Estimates(counts).estimate(*_triples(tuning)))
  _count(counts, tuning)
  return TrigramModel(counts=counts, weights=weights)


class _Estimates:
  """The four estimates of the mixture."""

  def __init__(self, counts: npt.NDArray[np.uint32]) -> None:
    # Each target has one trigram, bigram and unigram, so the smaller tables are
    # sums of the largest.
    self._trigrams = counts
    self._bigrams = counts.sum(axis=0, dtype=np.int64)
    self._unigrams = self._bigrams.sum(axis=0)
    self._after_two = counts.sum(axis=2, dtype=np.int64)
    self._after_one = self._bigrams.sum(axis=1)

  def estimate(
    self, c2: np.ndarray, c1: np.ndarray, t: np.ndarray
  ) -> npt.NDArray[np.float64]:
    """Returns the uniform to trigram estimates of targets, [4, N]."""
    result = np.empty((4, len(t)), np.float64)
    result[0] = 1 / _NUM_SYMBOLS
    levels = (
      (self._unigrams[t], np.broadcast_to(self._unigrams.sum(), t.shape)),
      (self._bigrams[c1, t], self._after_one[c1]),
      (self._trigrams[c2, c1, t], self._after_two[c2, c1]),
    )
    for level, (count, total) in enumerate(levels, start=1):
      result[level] = np.divide(
        count, total, out=result[level - 1].copy(), where=total > 0
      )
    return result


def _triples(
  documents: Iterable[bytes],
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Returns every (c2, c1, t) of the documents, three intp [N]."""
  parts = [np.empty((3, 0), np.intp)]
  for document in documents:
    symbols = np.full(len(document) + 3, _EDGE, np.intp)
    symbols[2:-1] = np.frombuffer(document, np.uint8)
    parts.append(np.stack((symbols[:-2], symbols[1:-1], symbols[2:])))
  c2, c1, t = np.concatenate(parts, axis=1)
  return c2, c1, t


def _count(counts: npt.NDArray[np.uint32], documents: Iterable[bytes]) -> None:
  """Adds the triples of the documents to `counts`, in place."""
  chunk, size = [], 0
  for document in documents:
    chunk.append(document)
    size += len(document)
    if size >= _CHUNK_BYTES:
      np.add.at(counts, _triples(chunk), 1)
      chunk, size = [], 0
  np.add.at(counts, _triples(chunk), 1)


def _likeliest_weights(
  estimates: npt.NDArray[np.float64],
) -> npt.NDArray[np.float64]:
  """Returns positive weights fit by expectation maximization, [4]."""
  weights = np.full(4, 0.25)
  for _ in range(_NUM_ITERATIONS):
    share = weights[:, None] * estimates
    share /= share.sum(axis=0)
    # Add-one smoothing: a zero weight could make unseen symbols impossible.
    weights = (share.sum(axis=1) + 1) / (estimates.shape[1] + 4)
  return weights
