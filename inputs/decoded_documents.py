"""Examples of a language model read back as documents of text.

What compares a model with programs that read text (`text_baselines`) wants the
bytes of the very examples that the model sees, wherever they are from.
"""

import dataclasses

from paxon.inputs import example_source, tokenizer_protocol


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
