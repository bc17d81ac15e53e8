r"""Memory-mapped token files in Megatron's `.bin` and `.idx` format.

`NAME.bin` holds the tokens of all sequences, one after another. `NAME.idx`:

    9 bytes   "MMIDIDX\0\0"
    uint64    version, 1
    uint8     dtype: 1 uint8, 2 int8, 3 int16, 4 int32, 5 int64, 6 float64,
              7 float32, 8 uint16
    uint64    n, the number of sequences
    uint64    d, the number of document entries
    int32[n]  the length of each sequence in tokens
    int64[n]  the byte offset of each sequence in the `.bin`
    int64[d]  the first sequence of each document, then n
    int8[n]   optional: a mode for each sequence, ignored here

All values are little-endian. Sequences are contiguous: each begins where the
one before it ends, and the last one ends the `.bin`. Opening a file checks the
index once, without the tokens: 3 s for 10^8 documents. Reading a document
takes two look-ups plus its tokens. Of a file in an object store the index is
copied to a disk, and tokens are read by ranges (`data_files`). Paxon's tools
also write `NAME.json` with the tokenizer's description, the vocabulary size
and CRC-32 checksums of the index, of the tokens and of these facts. Files
without it, or without checksums, can be read, too.
"""

import dataclasses
import enum
import functools
import hashlib
import json
import os
import struct
from typing import Any
import zlib

import numpy as np

from paxon.inputs import checks, stores, tokenizer_protocol
from paxon.inputs.sources import data_files, example_source, record_files

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
_MAX_HASHED = 1 << 20
_CHUNK = 1 << 22
CHECKSUMS = "checksums"
_CHECKED = ("facts", "index", "tokens")
DTYPES: dict[int, type[np.generic]] = {
  1: np.uint8,
  2: np.int8,
  3: np.int16,
  4: np.int32,
  5: np.int64,
  6: np.float64,
  7: np.float32,
  8: np.uint16,
}


class Unit(enum.Enum):
  """The unit of text that makes one example."""

  DOCUMENT = "document"
  SEQUENCE = "sequence"


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Tables:
  """Arrays backed by the mapped files."""

  tokens: "np.ndarray | _StoredTokens"
  lengths: np.ndarray
  pointers: np.ndarray
  documents: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TokenFile(record_files.PickledFields):
  """Language-model examples from a `.bin` and its `.idx`.

  Attributes:
    path: The path without its extension.
    vocab_size: The exclusive upper bound of all ids, checked when a document is
      read. `None` uses the tokenizer's, or the one in `NAME.json`.
    begin_id: Prepended to each example. With `None` nothing is prepended and
      the first token is only an input.
    end_id: Appended to each example, for files without end-of-document ids.
    unit: Documents, or the sequences (often sentences) within them.
    tokenizer: The tokenizer that made the file; must match `NAME.json`, if that
      exists. Adds `target_bytes` to the examples.
  """

  path: str
  vocab_size: int | None = None
  begin_id: int | None = None
  end_id: int | None = None
  unit: Unit = Unit.DOCUMENT
  tokenizer: tokenizer_protocol.Tokenizer | None = None

  def __post_init__(self) -> None:
    if self.path.endswith((".bin", ".idx")):
      object.__setattr__(self, "path", self.path[: -len(".bin")])
    checks.check_positive(self, optional=["vocab_size"])
    checks.check_ids(self, "begin_id", "end_id", vocab_size=self.vocab_size)

  def __len__(self) -> int:
    return len(self._bounds) - 1

  def __getitem__(self, index: int, /) -> example_source.Example:
    """Returns `inputs` and `targets` of an example, int32 [n].

    Raises:
      ValueError: An id is not in the vocabulary, or the index is damaged.
    """
    return example_source.lm_features(self.tokens(index), self.tokenizer)

  def required_vocab_size(self) -> int | None:
    """Returns the exclusive upper bound of all ids, None if unknown."""
    if self.vocab_size is not None:
      return self.vocab_size
    if self.tokenizer is not None:
      return tokenizer_protocol.find_id_bound(self.tokenizer)
    return self.facts.get("vocab_size")

  def num_tokens(self, index: int) -> int:
    """Returns the number of targets of an example; reads only the index."""
    lengths = self._tables.lengths[self._sequences(index)]
    count = int(lengths.sum(dtype=np.int64))
    return max(count + self._num_added - 1, 0)

  def tokens(self, index: int) -> np.ndarray:
    """Returns the tokens of an example, int32 [n], with begin and end ids."""
    sequences, tables = self._sequences(index), self._tables
    parts = [
      tables.tokens[self._place(number)]
      for number in range(sequences.start, sequences.stop)
    ]
    stored = np.concatenate(parts) if parts else np.zeros(0, np.int32)
    self._check_ids(stored, index)
    begin, end = (
      [] if token is None else [token] for token in (self.begin_id, self.end_id)
    )
    return np.concatenate((begin, stored, end)).astype(np.int32)

  def signature(self) -> dict[str, Any]:
    """Returns a hash of the index, which says where each document is."""
    return {"index": self._index_hash}

  @functools.cached_property
  def _index_hash(self) -> str:
    digest = hashlib.sha256()
    tables = self._tables
    for each in (tables.lengths, tables.pointers, tables.documents):
      digest.update(str(len(each)).encode())
      # An index of a terabyte of tokens has gigabytes.
      digest.update(each[:: max(1, len(each) // _MAX_HASHED)].tobytes())
    return digest.hexdigest()[:16]

  def check_tokens(self) -> int:
    """Compares the tokens with their checksum; returns the number of tokens.

    This reads the whole `.bin`.

    Raises:
      ValueError: They differ, `NAME.json` has no checksums, or the index is
        damaged.
    """
    self.check()
    expected = self.facts.get(CHECKSUMS, {}).get("tokens")
    if expected is None:
      raise ValueError(f"{self.path}.json has no checksum of the tokens.")
    tokens, found = self._tables.tokens, 0
    for begin in range(0, len(tokens), _CHUNK):
      part = tokens[slice(begin, min(begin + _CHUNK, len(tokens)))]
      found = zlib.crc32(np.ascontiguousarray(part).data, found)
    if found != expected:
      raise ValueError(
        f"{self.path}.bin is damaged, or of another file: its CRC-32 is"
        f" {found}, and according to {self.path}.json it was {expected}."
      )
    return len(tokens)

  def check(self) -> None:
    """Checks the files and settings for consistency; reads no tokens.

    Raises:
      ValueError: A file is missing, truncated, not of this format, or does
        not match the settings.
    """
    _ = self._bounds
    required = self.required_vocab_size()
    ids = {"begin": self.begin_id, "end": self.end_id}
    for name, value in ids.items():
      if value is not None and required is not None and value >= required:
        raise ValueError(
          f"TokenFile.{name}_id is {value}, and the vocabulary of {self.path}"
          f" has {required} ids; give one of them, or vocab_size, if the model"
          " has more."
        )
    for name, value in ids.items():
      if self.facts.get(f"has_{name}") and value is not None:
        raise ValueError(
          f"TokenFile.{name}_id is set, and according to"
          f" {self.path}.json documents have their {name} already; leave it"
          " out."
        )
    if self.tokenizer is not None:
      self._check_tokenizer(self.tokenizer)

  def _check_tokenizer(self, tokenizer: tokenizer_protocol.Tokenizer) -> None:
    here = tokenizer_protocol.describe(tokenizer)
    for key, value in here.items():
      if key in self.facts and self.facts[key] != value:
        raise ValueError(
          f"{self.path}.json: the file was made by a tokenizer with {key}"
          f" {self.facts[key]}, and TokenFile.tokenizer has {value}: the same"
          " text has other ids."
        )

  @functools.cached_property
  def facts(self) -> dict[str, Any]:
    """The content of `NAME.json`; empty if it does not exist."""
    path = self.path + ".json"
    if not data_files.exists(path):
      return {}
    with open(data_files.local(path), encoding="utf-8") as file:
      try:
        found = json.load(file)
      except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON ({error}).") from error
    if not isinstance(found, dict):
      raise ValueError(f"{path} must be a JSON object, got {found!r}.")
    size = found.get("vocab_size")
    if size is not None and (type(size) is not int or size < 1):
      raise ValueError(
        f"{path}: vocab_size must be a positive integer, got {size!r}."
      )
    if (sums := found.get(CHECKSUMS)) is not None:
      if not isinstance(sums, dict) or sums.keys() != {*_CHECKED}:
        raise ValueError(
          f"{path}: {CHECKSUMS} must have the keys {', '.join(_CHECKED)}, got"
          f" {sums!r}."
        )
      if find_checksum(found) != sums["facts"]:
        raise ValueError(
          f"{path} was changed after it was written: its own checksum differs."
          f" Write it again, or remove {CHECKSUMS} from it."
        )
    return found

  @property
  def _num_added(self) -> int:
    return (self.begin_id is not None) + (self.end_id is not None)

  def _sequences(self, index: int) -> slice:
    """Returns the range of sequences of an example."""
    if not 0 <= index < len(self):
      raise IndexError(f"There is no example {index} of {len(self)}.")
    return slice(int(self._bounds[index]), int(self._bounds[index + 1]))

  def _place(self, number: int) -> slice:
    """Returns the range of a sequence in the token array."""
    tables = self._tables
    begin = int(tables.pointers[number]) // tables.tokens.itemsize
    return slice(begin, begin + int(tables.lengths[number]))

  def _check_ids(self, ids: np.ndarray, index: int) -> None:
    if not ids.size:
      return
    low, high = ids.min(), ids.max()
    size = self.required_vocab_size()
    if size is not None and high >= size:
      raise ValueError(
        f"{self.path}.bin: {self.unit.value} {index} has the id {int(high)},"
        f" and the vocabulary has {size} ids: it was made with another one, or"
        " has a token that the model does not embed."
      )
    whole = ids.dtype.kind in "iu" or bool((ids == np.floor(ids)).all())
    if low < 0 or high >= 2**31 or not whole:
      raise ValueError(
        f"{self.path}.bin: {self.unit.value} {index} has values that are no"
        f" ids of tokens (from {low} to {high}, {ids.dtype})."
      )

  @functools.cached_property
  def _bounds(self) -> np.ndarray:
    """The first sequence of each example, then the number of sequences."""
    tables = self._tables
    if self.unit is Unit.SEQUENCE:
      return np.arange(len(tables.lengths) + 1, dtype=np.int64)
    found = tables.documents
    if not len(found) or found[0] or found[-1] != len(tables.lengths):
      raise ValueError(
        f"{self.path}.idx: its documents do not span its"
        f" {len(tables.lengths)} sequences; read them one by one with"
        " TokenFile.unit SEQUENCE."
      )
    for i in range(0, len(found) - 1, _CHUNK):
      part = found[i : i + _CHUNK + 1]
      bad = (part[1:] < part[:-1]) | (part[1:] > found[-1])
      if bad.any():
        at = i + int(bad.argmax())
        raise ValueError(
          f"{self.path}.idx is damaged: document {at} has the sequences from"
          f" {found[at]} to {found[at + 1]}, of {found[-1]}."
        )
    return found

  @functools.cached_property
  def _tables(self) -> _Tables:
    """Opens both files."""
    path = self.path + ".idx"
    for name in (path, self.path + ".bin"):
      if not data_files.exists(name):
        raise ValueError(
          f"TokenFile.path: there is no file {name}; give the path of a .bin"
          " and .idx without the ending."
        )
    at = data_files.local(path)
    size = os.path.getsize(at)
    with open(at, "rb") as file:
      header = file.read(HEADER.size)
    if header[: len(MAGIC)] != MAGIC:
      raise ValueError(f"{path} is no index of tokens: it does not begin so.")
    if len(header) < HEADER.size:
      raise ValueError(f"{path} is cut off within its first bytes.")
    _, version, code, num_sequences, num_documents = HEADER.unpack(header)
    if version != VERSION or code not in DTYPES:
      raise ValueError(
        f"{path} has version {version} and dtype {code}; known are version"
        f" {VERSION} and dtypes 1 to {max(DTYPES)}."
      )
    counts = ((np.int32, num_sequences), (np.int64, num_sequences))
    least = HEADER.size + 12 * num_sequences + 8 * num_documents
    if size < least:
      raise ValueError(
        f"{path} is cut off: it has {size} bytes, and {num_sequences} sequences"
        f" with {num_documents} entries of documents need {least}."
      )
    if size not in (least, least + num_sequences):
      raise ValueError(
        f"{path} is damaged: it has {size} bytes, and {num_sequences} sequences"
        f" with {num_documents} entries of documents need {least}, or"
        f" {least + num_sequences} with modes."
      )
    sums = self.facts.get(CHECKSUMS)
    if sums is not None and checksum(at) != sums["index"]:
      raise ValueError(
        f"{path} is damaged, or of another file: its CRC-32 differs from that"
        f" in {self.path}.json."
      )
    tables, offset = [], HEADER.size
    for dtype, count in (*counts, (np.int64, num_documents)):
      tables.append(_map_file(at, np.dtype(dtype), offset, count))
      offset += np.dtype(dtype).itemsize * count
    dtype = np.dtype(DTYPES[code])
    lengths, pointers, documents = tables
    if sums is None:
      _check_contiguous(path, lengths, pointers, dtype.itemsize)
    return _Tables(
      tokens=self._mapped_tokens(dtype, lengths, pointers),
      lengths=lengths,
      pointers=pointers,
      documents=documents,
    )

  def _mapped_tokens(
    self, dtype: np.dtype, lengths: np.ndarray, pointers: np.ndarray
  ) -> "np.ndarray | _StoredTokens":
    """Maps the `.bin`; raises ValueError if it has not the indexed size."""
    path = self.path + ".bin"
    size, needed = data_files.size(path), 0
    if len(lengths):
      needed = int(pointers[-1]) + dtype.itemsize * int(lengths[-1])
    if size < needed:
      last = int(np.searchsorted(pointers, size, side="right")) - 1
      raise ValueError(
        f"{path} is cut short: it has {size} bytes, and the index requires"
        f" {needed}; sequence {last} of {len(lengths)} is the first that is"
        " not whole."
      )
    if size > needed:
      raise ValueError(
        f"{path} has {size} bytes, and the index requires {needed}: one of them"
        " is damaged, or of another file."
      )
    if stores.is_remote(path):
      file = data_files.DataFile(path)
      return _StoredTokens(file=file, dtype=dtype, size=size // dtype.itemsize)
    return _map_file(path, dtype, 0, size // dtype.itemsize)


def checksum(path: str) -> int:
  """Returns the CRC-32 of a local file."""
  if not os.path.getsize(path):
    return zlib.crc32(b"")  # An empty file cannot be mapped.
  return zlib.crc32(np.memmap(path, np.uint8, "r").data)


def find_checksum(facts: dict[str, Any]) -> int:
  """Returns the CRC-32 of facts without their own checksum."""
  sums = {k: v for k, v in facts[CHECKSUMS].items() if k != "facts"}
  text = json.dumps({**facts, CHECKSUMS: sums}, sort_keys=True)
  return zlib.crc32(text.encode())


def _check_contiguous(
  path: str, lengths: np.ndarray, pointers: np.ndarray, size: int
) -> None:
  """Raises ValueError unless each sequence begins where the last one ends."""
  if len(pointers) and pointers[0]:
    raise ValueError(
      f"{path} is damaged: sequence 0 begins at byte {pointers[0]}, not 0."
    )
  for i in range(0, len(lengths), _CHUNK):
    # The last pointer has no successor: `_mapped_tokens` checks the end.
    part, after = lengths[i : i + _CHUNK], pointers[i + 1 : i + _CHUNK + 1]
    ends = pointers[i : i + _CHUNK] + part.astype(np.int64) * size
    bad = part < 0
    bad[: len(after)] |= ends[: len(after)] != after
    if not bad.any():
      continue
    at = i + int(bad.argmax())
    follows = ""
    if at + 1 < len(pointers):
      follows = f", and sequence {at + 1} begins at byte {pointers[at + 1]}"
    raise ValueError(
      f"{path} is damaged: sequence {at} has {lengths[at]} tokens of"
      f" {size} bytes from byte {pointers[at]} on{follows}."
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _StoredTokens:
  """Tokens in an object store."""

  file: data_files.DataFile
  dtype: np.dtype
  size: int

  @property
  def itemsize(self) -> int:
    return self.dtype.itemsize

  def __len__(self) -> int:
    return self.size

  def __getitem__(self, place: slice) -> np.ndarray:
    if place.start == place.stop:
      return np.zeros(0, self.dtype)
    ends = place.start * self.itemsize, place.stop * self.itemsize
    data = self.file.read(*ends)
    return np.frombuffer(data, self.dtype.newbyteorder("<"))


def _map_file(
  path: str, dtype: np.dtype, offset: int, count: int
) -> np.ndarray:
  if not count:
    return np.zeros(0, dtype)  # An empty range cannot be mapped.
  little = dtype.newbyteorder("<")
  # A plain array: slicing a memmap is twenty times slower.
  return np.asarray(np.memmap(path, little, "r", offset=offset, shape=(count,)))
