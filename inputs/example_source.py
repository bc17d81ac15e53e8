"""Random-access sources of examples: the interface, text and arrays.

An example is what a model sees as one thing: a dictionary of arrays. Arrays
[n] belong to its n places, the same n for `inputs`, `targets` (both int32),
`weights` (float32, 1 unless given) and any other key, but keys that begin with
`encoder_` have a length of their own. An array without dimensions belongs to
the example as a whole.
"""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
from typing import Protocol, runtime_checkable

import numpy as np

from paxon.inputs import document_source, tokenizer_protocol

Example = dict[str, np.ndarray]
ENCODER = "encoder_"


@runtime_checkable
class ExampleSource(Protocol):
  """Examples by number, the same ones in the same order every time.

  A source may say more, by members that are looked for by name:

  * `num_places(index) -> int`: the places of an example, known without reading
    it, so that a host need not read the rows of others;
  * `required_vocab_size() -> int | None`: all ids are below it;
  * `check() -> None`: raises ValueError for what is wrong without reading.
  """

  def __len__(self) -> int:
    """Returns the number of examples."""
    ...

  def __getitem__(self, index: int, /) -> Example:
    """Returns one example; 0 <= index < len.

    Raises:
      ValueError: It cannot be read; the message names file and record.
    """
    ...


@runtime_checkable
class SequentialSource(Protocol):
  """Examples that can only be read one after another."""

  def iterate(self, start: int, /) -> Iterator[Example]:
    """Yields the examples from number `start` on, in the same order always."""
    ...


def lm_features(tokens: np.ndarray) -> Example:
  """Returns what a language model learns from a run of tokens.

  Args:
    tokens: int32 [n + 1]; each one but the first is a target.
  """
  return {"inputs": tokens[:-1], "targets": tokens[1:]}


def num_places(example: Mapping[str, np.ndarray], prefix: str = "") -> int:
  """Returns the places of an example, or of its encoder.

  Args:
    example: Arrays by key.
    prefix: `ENCODER`, or nothing for the decoder's.

  Raises:
    ValueError: Its arrays have several lengths.
  """
  lengths = {
    key: len(value)
    for key, value in example.items()
    if value.ndim and key.startswith(ENCODER) == bool(prefix)
  }
  if len(set(lengths.values())) > 1:
    raise ValueError(f"Arrays of one example have several lengths: {lengths}.")
  return next(iter(lengths.values()), 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenizedDocuments:
  """Text as examples of a language model: BEGIN, its tokens, END.

  Attributes:
    source: The documents.
    tokenizer: Makes their tokens, and counts the bytes of each target.
  """

  source: document_source.DocumentSource
  tokenizer: tokenizer_protocol.Tokenizer

  def required_vocab_size(self) -> int:
    """Returns the tokenizer's."""
    return self.tokenizer.vocab_size

  def __len__(self) -> int:
    return len(self.source)

  def __getitem__(self, index: int, /) -> Example:
    """Returns `inputs`, `targets` and `target_bytes`, int32 [n]."""
    ids = self.tokenizer.encode(self.source[index])
    begin, end = self.tokenizer.begin_id, self.tokenizer.end_id
    tokens = np.concatenate(([begin], ids, [end])).astype(np.int32)
    features = lm_features(tokens)
    bytes_of = self.tokenizer.byte_counts(features["targets"])
    return {**features, "target_bytes": np.asarray(bytes_of, np.int32)}


@dataclasses.dataclass(frozen=True, eq=False)
class InMemoryExamples:
  """Examples from arrays in memory.

  Attributes:
    examples: Their arrays, or a run of tokens for each.
  """

  examples: Sequence[Mapping[str, np.ndarray] | np.ndarray]

  def __len__(self) -> int:
    return len(self.examples)

  def __getitem__(self, index: int, /) -> Example:
    """Returns one; a run of tokens becomes `inputs` and `targets`."""
    example = self.examples[index]
    if isinstance(example, np.ndarray):
      if example.ndim != 1 or example.dtype.kind not in "iu":
        raise ValueError(
          f"InMemoryExamples: example {index} must be integers [n], got"
          f" {example.dtype} {list(example.shape)}."
        )
      return lm_features(example.astype(np.int32))
    return {key: np.asarray(value) for key, value in example.items()}
