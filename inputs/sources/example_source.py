"""Random-access sources of documents and of examples, and held-out parts.

A document is bytes of text.
An example is a dictionary of arrays. Arrays [n] hold a value for each of its n
tokens: `inputs` and `targets` (int32), `weights` (float32, 1 by default) and
any other key. Keys that begin with `encoder_` have a separate length. An
array without dimensions describes the example as a whole.

With `has_parts`, a source may return several examples as one: `PART` numbers
the example of each token, from 0.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
import dataclasses
import functools
import hashlib
from typing import Any, Protocol, runtime_checkable

import numpy as np

from paxon.inputs import checks, tokenizer_protocol

Example = dict[str, np.ndarray]
ENCODER = "encoder_"
PART = "part"
_NUM_HASHED = 16


@runtime_checkable
class ExampleSource(Protocol):
  """A random-access sequence of examples, in a fixed order.

  A source may have these optional members, which are looked up by name:

  * `num_tokens(index) -> int`: the tokens of an example, known without reading
    it, so that a host need not read the sequences of others;
  * `token_dtypes() -> dict[str, np.dtype]`: the arrays [n] of every example, if
    there are no other arrays;
  * `required_vocab_size() -> int | None`: the exclusive upper bound of ids;
  * `signature() -> dict`: JSON values that a saved position depends on; with
    `content`, a hash of the data, if not that of some examples;
  * `has_parts: bool`: whether an example may have `PART`;
  * `document_number(index) -> int`: the document that an example is from;
  * `name(index) -> str`: an example in messages, such as a file and a line;
  * `check() -> None`: raises ValueError for errors that need no reading.
  """

  def __len__(self) -> int:
    """Returns the number of examples."""
    ...

  def __getitem__(self, index: int, /) -> Example:
    """Returns one example; 0 <= index < len.

    Raises:
      ValueError: The example cannot be read; names the file and the record.
    """
    ...


@runtime_checkable
class SequentialSource(Protocol):
  """Examples that can only be read sequentially."""

  def iterate(self, start: int, /) -> Iterator[Example]:
    """Yields the examples from index `start`, in a fixed order."""
    ...


def find_optional(source: object, member: str, default: Any = None) -> Any:
  """Returns an optional member of a source, `default` without it."""
  return getattr(source, member, default)


def call_optional(source: object, member: str, *args: Any) -> Any:
  """Returns the result of an optional method of a source, None without it."""
  method = find_optional(source, member)
  return None if method is None else method(*args)


def find_document(source: object, index: int) -> int:
  """Returns the document of an example, `index` if the source has no others."""
  found = call_optional(source, "document_number", index)
  return index if found is None else found


def has_target(example: Example, length: int | None = None) -> bool:
  """Returns whether one of the first `length` tokens of an example counts."""
  weights = example.get("weights")
  return bool(np.any(example.get("example_weights", 1))) and (
    weights is None or bool(np.any(weights[:length]))
  )


def content_hash(source: Any) -> str:
  """Returns a hash of some documents or examples of a random-access source.

  They are spread evenly and include the first and the last, at most 16, so that
  data that was replaced is noticed without reading all of it. One that cannot
  be read counts as such.
  """
  count = len(source)
  digest = hashlib.sha256(str(count).encode())
  chosen = np.unique(np.linspace(0, max(count - 1, 0), min(count, _NUM_HASHED)))
  for index in chosen.astype(np.int64).tolist():
    try:
      found = source[index]
    except ValueError:
      found = b"unreadable"
    parts = found if isinstance(found, Mapping) else {"": found}
    for key in sorted(parts):
      array = np.asarray(parts[key])
      # The bytes of strings are the places of objects in memory.
      is_text = array.dtype == object
      data = repr(array.tolist()).encode() if is_text else array.tobytes()
      digest.update(f"{key} {len(data)} ".encode())
      digest.update(data)
  return digest.hexdigest()[:16]


def lm_features(
  tokens: np.ndarray, tokenizer: tokenizer_protocol.Tokenizer | None = None
) -> Example:
  """Returns `inputs` and `targets` of consecutive tokens, int32 [n + 1].

  All tokens but the first are targets. A tokenizer adds `target_bytes` int32
  [n], the bytes of text of each target.
  """
  example = {"inputs": tokens[:-1], "targets": tokens[1:]}
  if tokenizer is not None:
    counts = tokenizer.byte_counts(tokens[1:])
    example["target_bytes"] = np.asarray(counts, np.int32)
  return example


def lm_dtypes() -> dict[str, np.dtype]:
  """Returns the dtypes of `lm_features` with a tokenizer."""
  keys = ("inputs", "targets", "target_bytes")
  return dict.fromkeys(keys, np.dtype(np.int32))


def tokenize(
  text: bytes, tokenizer: tokenizer_protocol.Tokenizer
) -> np.ndarray:
  """Returns BEGIN, the tokens of a document and END, int32 [n]."""
  ids = tokenizer.encode(text)
  begin, end = tokenizer.begin_id, tokenizer.end_id
  return np.concatenate(([begin], ids, [end]), dtype=np.int32)


def join_parts(parts: Sequence[Example]) -> Example:
  """Returns several examples of arrays [n] as one, with `PART` int32 [sum n].

  A single one is returned as it is.
  """
  if len(parts) == 1:
    return parts[0]
  sizes = [num_tokens(part) for part in parts]
  return {
    **{key: np.concatenate([p[key] for p in parts]) for key in parts[0]},
    PART: np.repeat(np.arange(len(parts), dtype=np.int32), sizes),
  }


def count_parts(example: Example) -> int:
  """Returns the number of examples that one holds."""
  return int(example[PART][-1]) + 1 if PART in example else 1


def select_part(example: Example, number: int) -> Example:
  """Returns one of the examples that one holds.

  Raises:
    ValueError: There is no such part.
  """
  count = count_parts(example)
  if number >= count:
    raise ValueError(f"The example has {count} parts, and none is {number}.")
  if count == 1:
    return example
  kept = example[PART] == number
  return {key: x[kept] for key, x in example.items() if key != PART}


def num_tokens(example: Mapping[str, np.ndarray], prefix: str = "") -> int:
  """Returns the number of tokens, of the encoder's with the prefix `ENCODER`.

  Raises:
    ValueError: Its arrays differ in length.
  """
  lengths = {
    key: len(value)
    for key, value in example.items()
    if value.ndim and key.startswith(ENCODER) == bool(prefix)
  }
  if len(set(lengths.values())) > 1:
    raise ValueError(f"The arrays of an example differ in length: {lengths}.")
  return next(iter(lengths.values()), 0)


@runtime_checkable
class DocumentSource(Protocol):
  """A random-access sequence of documents, in a fixed order."""

  def __len__(self) -> int:
    """Returns the number of documents."""
    ...

  def __getitem__(self, index: int, /) -> bytes:
    """Returns one document; 0 <= index < len."""
    ...


@dataclasses.dataclass(frozen=True)
class InMemoryDocuments:
  """Documents given as a sequence of strings or bytes.

  Attributes:
    documents: The documents; strings are encoded as UTF-8.
  """

  documents: Sequence[str | bytes]

  def __post_init__(self) -> None:
    if isinstance(self.documents, str | bytes):
      raise ValueError(
        "InMemoryDocuments.documents must be a sequence of documents, got one"
        f" {type(self.documents).__name__}; write [text] for one document."
      )

  def __len__(self) -> int:
    return len(self.documents)

  def __getitem__(self, index: int, /) -> bytes:
    document = self.documents[index]
    return document.encode() if isinstance(document, str) else document


@runtime_checkable
class _HasTokenizer(Protocol):
  @property
  def tokenizer(self) -> tokenizer_protocol.Tokenizer:
    """The tokenizer."""
    ...


@runtime_checkable
class _Documents(Protocol):
  """The field of a source that tokenizes another one."""

  @property
  def source(self) -> Sized:
    """The documents."""
    ...


class Tokenized:
  """Base of sources with an example for each document of their `source`."""

  def __len__(self: _Documents) -> int:
    return len(self.source)

  def required_vocab_size(self: _HasTokenizer) -> int:
    """Returns the exclusive upper bound of the ids of `tokenizer`."""
    return tokenizer_protocol.find_id_bound(self.tokenizer)

  def name(self: _Documents, index: int) -> str:
    """Returns the name of an example's document for messages."""
    found = call_optional(self.source, "name", index)
    return f"example {index}" if found is None else found


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenizedDocuments(Tokenized):
  """Documents of text as examples: BEGIN, the tokens, END.

  With `chunk_length` an example is a chunk of a document. A chunk starts with
  the token before its first target, so no target is lost or repeated, and only
  a document's first chunk has BEGIN and only its last one END.

  Attributes:
    source: The documents.
    tokenizer: The tokenizer; also counts the bytes of each target.
    chunk_length: Splits documents into examples of at most this many targets,
      so that the sequences of a batch are not all from one long document. Every
      document is then read once to count the examples.
  """

  source: DocumentSource
  tokenizer: tokenizer_protocol.Tokenizer
  chunk_length: int | None = None

  def __post_init__(self) -> None:
    checks.check_positive(self, optional=["chunk_length"])

  def token_dtypes(self) -> dict[str, np.dtype]:
    """Returns int32 for each array of an example."""
    return lm_dtypes()

  def signature(self) -> dict[str, Any]:
    """Returns the values on which the meaning of an index depends.

    It has the number and a hash of documents, not of examples, because counting
    these would tokenize all of them.
    """
    return {
      "chunk_length": self.chunk_length,
      "num_documents": len(self.source),
      "content": self._content,
    }

  @functools.cached_property
  def _content(self) -> str:
    return content_hash(self.source)

  def document_number(self, index: int) -> int:
    """Returns the number of an example's document in the source."""
    if self.chunk_length is None:
      return index
    return int(np.searchsorted(self._first_chunks, index, side="right") - 1)

  def name(self, index: int) -> str:
    """Returns the name of an example's document for messages."""
    return super().name(self.document_number(index))

  def __len__(self) -> int:
    if self.chunk_length is None or not len(self.source):
      return len(self.source)
    return int(self._first_chunks[-1])

  def __getitem__(self, index: int, /) -> Example:
    """Returns `inputs`, `targets` and `target_bytes`, int32 [n]."""
    document = self.document_number(index)
    tokens = self._tokens(document)
    if self.chunk_length is not None:
      begin = (index - self._first_chunks[document]) * self.chunk_length
      tokens = tokens[begin : begin + self.chunk_length + 1]
    return lm_features(tokens, self.tokenizer)

  def _tokens(self, document: int) -> np.ndarray:
    text = self.source[document]
    try:
      return tokenize(text, self.tokenizer)
    except ValueError as error:
      # Such as a token that the model does not embed.
      raise ValueError(f"{super().name(document)}: {error}") from error

  @functools.cached_property
  def _first_chunks(self) -> np.ndarray:
    """The number of each document's first chunk, and of all chunks."""
    assert self.chunk_length is not None
    targets = [len(self._tokens(i)) - 1 for i in range(len(self.source))]
    chunks = -(-np.asarray(targets, np.int64) // self.chunk_length)
    return np.concatenate(([0], np.cumsum(chunks)))


@dataclasses.dataclass(frozen=True, eq=False)
class InMemoryExamples:
  """Examples from arrays in memory.

  Attributes:
    examples: Each is arrays by key, or int [n + 1] consecutive tokens.
  """

  examples: Sequence[Mapping[str, np.ndarray] | np.ndarray]

  def __len__(self) -> int:
    return len(self.examples)

  def __getitem__(self, index: int, /) -> Example:
    """Returns an example; tokens become `inputs` and `targets`."""
    example = self.examples[index]
    if isinstance(example, np.ndarray):
      if example.ndim != 1 or example.dtype.kind not in "iu":
        raise ValueError(
          f"InMemoryExamples: example {index} must be integers [n], got"
          f" {example.dtype} {list(example.shape)}."
        )
      return lm_features(example.astype(np.int32))
    return {key: np.asarray(value) for key, value in example.items()}


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class HeldOut:
  """Every n-th example of another source, or all others.

  Attributes:
    source: All examples.
    every: The last of each group of `every` examples is held out.
    is_held_out: Whether to return the held-out examples or the others.
  """

  source: ExampleSource
  every: int
  is_held_out: bool

  def __post_init__(self) -> None:
    if self.every < 2:
      raise ValueError(f"HeldOut.every must be at least 2, got {self.every}.")

  def __len__(self) -> int:
    count = len(self.source) // self.every
    return count if self.is_held_out else len(self.source) - count

  def __getitem__(self, index: int, /) -> Example:
    return self.source[self.number(index)]

  def name(self, index: int) -> str | None:
    """Returns the name of an example in `source`, if it has one."""
    return call_optional(self.source, "name", self.number(index))

  def number(self, index: int) -> int:
    """Returns the index of an example in `source`.

    Raises:
      IndexError: The index is out of range.
    """
    if not 0 <= index < len(self):
      raise IndexError(f"There is no example {index} of {len(self)}.")
    if self.is_held_out:
      return index * self.every + self.every - 1
    return index + index // (self.every - 1)

  @property
  def num_tokens(self) -> Callable[[int], int] | None:
    """The `num_tokens` of `source` for these examples, if it has one."""
    known = find_optional(self.source, "num_tokens")
    return None if known is None else lambda index: known(self.number(index))

  def document_number(self, index: int) -> int:
    """Returns the document of `source` that an example is from."""
    return find_document(self.source, self.number(index))

  def token_dtypes(self) -> dict[str, np.dtype] | None:
    """Returns the `token_dtypes` of `source`, if it has them."""
    return call_optional(self.source, "token_dtypes")

  @property
  def has_parts(self) -> bool:
    """The `has_parts` of `source`."""
    return find_optional(self.source, "has_parts", False)

  def required_vocab_size(self) -> int | None:
    """Returns the `required_vocab_size` of `source`, if it has one."""
    return call_optional(self.source, "required_vocab_size")

  def check(self) -> None:
    """Checks `source`."""
    call_optional(self.source, "check")
