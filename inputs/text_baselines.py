"""Bits per byte of two programs without a neural network, on held-out text.

They put a language model's bits per byte on the same bytes into perspective:

* `xz`: the held-out documents, joined, compressed by LZMA at its strongest
  setting (`xz -9e`), as one stream. Header, index and checksum are counted. It
  learns from the held-out text alone.
* `trigram`: the byte trigram model of `trigram_model`, trained on the training
  split. The ends of documents are counted as targets, as they are in a
  language model's loss; bits are divided by the number of bytes all the same.
"""

from collections.abc import Mapping
import dataclasses
import lzma
import types

from paxon.inputs import (
  document_source,
  example_source,
  tokenizer_protocol,
  trigram_model,
)

# For people; the keys are for files.
TITLES: Mapping[str, str] = types.MappingProxyType(
  {"xz": "xz -9e", "trigram": "byte trigram model"}
)


def xz_bits_per_byte(held_out: document_source.DocumentSource) -> float:
  """Returns 8 * (size of the `.xz` file) / (size of the joined documents)."""
  text = b"".join(held_out[i] for i in range(len(held_out)))
  _check_has_bytes(len(text))
  return (
    8 * len(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME)) / len(text)
  )


def trigram_bits_per_byte(
  held_out: document_source.DocumentSource,
  *,
  train: document_source.DocumentSource,
) -> float:
  """Returns the bits per byte of the trigram model of `train`."""
  num_bytes = sum(len(held_out[i]) for i in range(len(held_out)))
  _check_has_bytes(num_bytes)
  return trigram_model.fit(train).bits(held_out) / num_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextBaselines:
  """Both baselines as one callable, to be configured as part of a job.

  Attributes:
    train: The documents that a model is trained on.
    held_out: The documents that it is evaluated on.
  """

  train: document_source.DocumentSource
  held_out: document_source.DocumentSource

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
    tokenizer: That which made them.
  """

  source: example_source.ExampleSource
  tokenizer: tokenizer_protocol.Tokenizer

  def __len__(self) -> int:
    return len(self.source)

  def __getitem__(self, index: int, /) -> bytes:
    """Returns the text of an example as UTF-8.

    Raises:
      ValueError: It has not as many bytes as its targets stand for: text that
        is not UTF-8, or the targets of another tokenizer.
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
