"""Pairs of texts as examples of an encoder-decoder.

Packed by `packed_input.PackedInput` with `encoder_length`.
"""

import dataclasses
from typing import Any

import numpy as np

from paxon.inputs import tokenizer_protocol
from paxon.inputs.sources import example_source


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenizedPairs(example_source.Tokenized):
  """Texts and what a decoder makes of them, such as their translations.

  The encoder reads the source and END; the decoder reads BEGIN and the target,
  and predicts the target and END.

  Attributes:
    sources: The texts to read.
    targets: The texts to predict, in the same order. None splits each source in
      the middle, and the second half is predicted from the first.
    tokenizer: The tokenizer; also counts the bytes of each target.
  """

  sources: example_source.DocumentSource
  targets: example_source.DocumentSource | None
  tokenizer: tokenizer_protocol.Tokenizer

  def signature(self) -> dict[str, Any]:
    """Returns the values on which the meaning of an index depends."""
    return {"num_pairs": len(self)}

  def __len__(self) -> int:
    """Returns the number of pairs.

    Raises:
      ValueError: There are not as many targets as sources.
    """
    if self.targets is not None and len(self.targets) != len(self.sources):
      raise ValueError(
        f"TokenizedPairs.sources has {len(self.sources):,} texts and targets"
        f" has {len(self.targets):,}; there must be one target for each."
      )
    return len(self.sources)

  def name(self, index: int) -> str:
    """Returns the name of a source for messages."""
    found = example_source.call_optional(self.sources, "name", index)
    return f"pair {index}" if found is None else found

  def __getitem__(self, index: int, /) -> example_source.Example:
    """Returns a pair, int32.

    `inputs`, `targets` and `target_bytes` are [n], `encoder_inputs` is [m].
    """
    if self.targets is None:
      text = self.sources[index].decode(errors="replace")
      middle = len(text) // 2
      source, target = text[:middle].encode(), text[middle:].encode()
    else:
      source, target = self.sources[index], self.targets[index]
    begin, end = self.tokenizer.begin_id, self.tokenizer.end_id
    try:
      tokens = [begin, *self.tokenizer.encode(target).tolist(), end]
      encoder = [*self.tokenizer.encode(source).tolist(), end]
    except ValueError as error:
      raise ValueError(f"{self.name(index)}: {error}") from error
    return {
      **example_source.lm_features(
        np.asarray(tokens, np.int32), self.tokenizer
      ),
      "encoder_inputs": np.asarray(encoder, np.int32),
    }
