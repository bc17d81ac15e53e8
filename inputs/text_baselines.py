"""Compression baselines in bits per byte on held-out text.

They are references for a language model's bits per byte on the same text:

* `xz`: the concatenated held-out documents, compressed by LZMA at its strongest
  setting (`xz -9e`), including header, index and checksum. It uses no training
  text.
* `trigram`: the byte trigram model of `trigram_model`, trained on the training
  split. The end of a document counts as a target, as in a language model's
  loss, but not as a byte.
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

# Display names by metric key.
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
  """A configurable callable that computes both baselines.

  Attributes:
    train: The training documents.
    held_out: The evaluation documents.
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
