"""A stream of documents in files, shuffled by file and within windows.

It starts with the first documents of one file, without an index: for files that
are too large to be read before training, on a disk or in a store. In each
epoch, the files are in a shuffled order; their documents are read in windows of
`shuffle_window`, and each window is shuffled. Both orders are keyed
permutations (`document_order`).

A position is [epoch, file, offset, index]: the window that begins at an offset
in the text of a file, by its index in the epoch's order, and an index in the
window's order. It is the same for the same text on a disk, in a store, and
compressed. Resuming reads one window; in a compressed file, also the text
before it.
"""

from collections.abc import Iterator
import dataclasses
import functools
import hashlib
import itertools
from typing import Any, Protocol, runtime_checkable

import numpy as np

from paxon.inputs import checks, tokenizer_protocol
from paxon.inputs.sources import example_source
from paxon.inputs.streams import document_order, example_stream

# Pending references may still point into the previous window.
_KEPT_WINDOWS = 2
# Larger than any epoch: orders of windows have other keys than those of files.
_WINDOWS = 1 << 120
# Bits of an offset, and of a file's index, in the key of a window.
_OFFSET_BITS = 56
_FILE_BITS = 24


@runtime_checkable
class ShardedDocuments(Protocol):
  """Documents in files, each of which can be read from any document on."""

  def list_files(self) -> tuple[str, ...]:
    """Returns the files, in a fixed order."""
    ...

  def measure_files(self) -> list[int]:
    """Returns the number of bytes of each file, as stored."""
    ...

  def read_shard(
    self, number: int, offset: int
  ) -> Iterator[tuple[int, bytes, str]]:
    """Yields the documents of a file from an offset, 0 or one it yielded.

    Yields:
      The offset after a document, the document, and its name for messages.
    """
    ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Window:
  """Consecutive documents.

  Attributes:
    documents: Documents and their names.
    after: The file and the offset at which the next window begins.
  """

  documents: list[tuple[bytes, str]]
  after: tuple[int, int]


@dataclasses.dataclass(kw_only=True, eq=False)
class WindowedDocuments(example_stream.Stream):
  """The documents of files as examples: BEGIN, the tokens, END.

  Attributes:
    source: The documents.
    tokenizer: The tokenizer; also counts the bytes of each target.
    shuffle_seed: The shuffle seed. `None` keeps the source's order.
    shuffle_window: The number of documents in memory and shuffled together.
    num_epochs: The number of epochs. `None` repeats without end.
  """

  source: ShardedDocuments
  tokenizer: tokenizer_protocol.Tokenizer
  shuffle_seed: int | None
  shuffle_window: int
  num_epochs: int | None = None
  _windows: dict[tuple[int, ...], _Window] = dataclasses.field(
    default_factory=dict, init=False, repr=False
  )
  # Where a reader stands, and the reader.
  _reader: tuple[tuple[int, ...], Iterator[Any]] | None = dataclasses.field(
    default=None, init=False, repr=False
  )

  def __post_init__(self) -> None:
    checks.check_positive(self, "shuffle_window", optional=["num_epochs"])

  def start(self) -> list[int]:
    """Returns the begin of epoch 0."""
    return [0, 0, 0, 0]

  def next_example(
    self, position: list[int], *, step: int
  ) -> tuple[list[int], list[int]] | None:
    """Returns a window and an index in it, and the position after it."""
    epoch, file, offset, index = position
    while self.num_epochs is None or epoch < self.num_epochs:
      window = self._window(epoch, file, offset)
      size = len(window.documents)
      if index < size:
        place = self._order(epoch, file, offset, size, index)
        return [epoch, file, offset, place], [epoch, file, offset, index + 1]
      if size < self.shuffle_window:
        if (file, offset, size) == (0, 0, 0):
          raise ValueError(f"The source holds no documents: {self.source!r}.")
        epoch, file, offset = epoch + 1, 0, 0
      else:
        file, offset = window.after
      index = 0
    return None

  def read(self, reference: list[int]) -> example_source.Example:
    """Returns an example; reads its window again if necessary."""
    text, name = self._find(reference)
    try:
      tokens = example_source.tokenize(text, self.tokenizer)
    except ValueError as error:
      raise ValueError(f"{name}: {error}") from error
    return example_source.lm_features(tokens, self.tokenizer)

  def name(self, reference: list[int]) -> str:
    """Returns the file and place of a document."""
    return self._find(reference)[1]

  def check(self, position: Any) -> None:
    """Checks the format of a position, and whether it has such a file."""
    if not isinstance(position, list) or len(position) != 4:
      raise ValueError(
        "The state's position must be an epoch, a file, an offset and an index,"
        f" got {position!r}."
      )
    names = ("epoch", "file", "offset", "index")
    for value, what in zip(position, names, strict=True):
      example_stream.check_position(value, what=what)
    if position[1] >= max(len(self.source.list_files()), 1):
      raise ValueError(
        f"The state's file is {position[1]}, and there are"
        f" {len(self.source.list_files())}."
      )

  def signature(self) -> dict[str, Any]:
    """Returns the window, the seed, and hashes of sizes and of a document."""
    return {
      "shuffle_window": self.shuffle_window,
      "shuffle_seed": self.shuffle_seed,
      "num_files": len(self.source.list_files()),
      "content": self._content,
    }

  @property
  def is_endless(self) -> bool:
    """Whether `num_epochs` is None."""
    return self.num_epochs is None

  def epoch(self, position: list[int]) -> int:
    """Returns the number of completed epochs."""
    return position[0]

  def leaves(self) -> list[example_stream.Stream]:
    """Returns itself."""
    return [self]

  def required_vocab_size(self) -> int | None:
    """Returns the exclusive upper bound of the tokenizer's ids."""
    return tokenizer_protocol.find_id_bound(self.tokenizer)

  def token_dtypes(self) -> dict[str, np.dtype]:
    """Returns int32 for each array of an example."""
    return example_source.lm_dtypes()

  def check_readable(self) -> None:
    """Raises an error if there is no file."""
    _ = self.source.list_files()

  @functools.cached_property
  def _content(self) -> str:
    """A hash of the files' sizes and of the first document of epoch 0."""
    sizes = self.source.measure_files()
    # The one that is read anyway.
    first = next(self._read_from(0, 0, 0), (0, 0, b"", ""))[2]
    return hashlib.sha256(f"{sizes} ".encode() + first).hexdigest()[:16]

  def _order(
    self, epoch: int, file: int, offset: int, size: int, index: int
  ) -> int:
    order = document_order.DocumentOrder(
      num_documents=size, seed=self.shuffle_seed
    )
    key = (((epoch << _FILE_BITS) + file) << _OFFSET_BITS) + offset
    return order.document(_WINDOWS + key, index)

  def _find(self, reference: list[int]) -> tuple[bytes, str]:
    epoch, file, offset, place = reference
    found = self._window(epoch, file, offset).documents
    if place >= len(found):
      raise ValueError(
        f"The state's document {reference} does not exist: the files have"
        " changed."
      )
    return found[place]

  def _window(self, *key: int) -> _Window:
    """Returns the window of an epoch that begins in a file at an offset."""
    if key not in self._windows:
      if self._reader is None or self._reader[0] != key:
        self._reader = key, self._read_from(*key)
      reader = self._reader[1]
      self._reader = None  # An error ends it.
      found = list(itertools.islice(reader, self.shuffle_window))
      after = (found[-1][0], found[-1][1]) if found else (key[1], key[2])
      self._reader = (key[0], *after), reader
      while len(self._windows) >= _KEPT_WINDOWS:
        self._windows.pop(next(iter(self._windows)))
      self._windows[key] = _Window(
        documents=[(text, name) for _, _, text, name in found], after=after
      )
    return self._windows[key]

  def _read_from(
    self, epoch: int, file: int, offset: int
  ) -> Iterator[tuple[int, int, bytes, str]]:
    """Yields file, offset after, text and name of an epoch's documents."""
    paths = self.source.list_files()
    order = document_order.DocumentOrder(
      num_documents=len(paths), seed=self.shuffle_seed
    )
    for index in range(file, len(paths)):
      number = order.document(epoch, index)
      for after, text, name in self.source.read_shard(number, offset):
        yield index, after, text, name
      offset = 0
