"""The interface of tokenizers, and a description to distinguish them.

Any class with the members of `Tokenizer` is a tokenizer, without inheritance.
The other protocols are optional features.
"""

import hashlib
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

# Words, numbers, spaces, code, several scripts and a four-byte character.
_PROBE = (
  "The quick brown fox jumps over 13 lazy dogs; 3.14159 isn't 22/7!\n\n"
  "def f(x):\n    return {x: [x ** 2, None]}\n\tÜber naïve façades, ¿qué? "
  "Быстрая лиса 敏捷的狐狸 すばやい狐 الثعلب 🦊 <s> </s> [SEP]"
)


@runtime_checkable
class Tokenizer(Protocol):
  """Converts text to ids, and counts the bytes of text of each id."""

  @property
  def vocab_size(self) -> int:
    """The number of ids; they are 0 to `vocab_size - 1`."""
    ...

  @property
  def pad_id(self) -> int:
    """The id of padding."""
    ...

  @property
  def begin_id(self) -> int:
    """The id before the first token of a document."""
    ...

  @property
  def end_id(self) -> int:
    """The id after the last token of a document."""
    ...

  def encode(self, text: str | bytes) -> npt.NDArray[np.int32]:
    """Returns the ids of `text`, int32 [T], without begin and end ids."""
    ...

  def decode(self, ids: npt.ArrayLike) -> str:
    """Returns the text of ids [T]."""
    ...

  def byte_counts(self, ids: npt.ArrayLike) -> npt.NDArray[np.int32]:
    """Returns the number of bytes of each id's text, int32, of ids' shape."""
    ...


@runtime_checkable
class NamesTokens(Protocol):
  """A tokenizer with names of its tokens."""

  def find_token(self, number: int) -> str | None:
    """Returns the name of an id's token, None if it has none."""
    ...


@runtime_checkable
class EncodesPrompts(Protocol):
  """A tokenizer that knows how its model expects a prompt to begin."""

  def encode_prompt(self, text: str) -> npt.NDArray[np.int32]:
    """Returns the ids of a prompt, int32 [T]."""
    ...


@runtime_checkable
class EncodesSpecial(Protocol):
  """A tokenizer that reads names of special tokens, such as a template's."""

  def encode_special(self, text: str) -> npt.NDArray[np.int32]:
    """Returns ids, int32 [T]; names of special tokens become their ids."""
    ...


@runtime_checkable
class EncodesPairs(Protocol):
  """A tokenizer with rules for the input of an encoder."""

  def encode_pair(
    self,
    text: str,
    pair: str | None = None,
    *,
    length: int,
    lower_case: bool = False,
  ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], int]:
    """Returns ids and types, int32 [T], and the number of tokens cut."""
    ...


@runtime_checkable
class HasSpecialIds(Protocol):
  """A tokenizer with ids that stand for no text."""

  @property
  def special_ids(self) -> frozenset[int]:
    """Ids such as begin, end and padding."""
    ...


@runtime_checkable
class FindsTokens(HasSpecialIds, Protocol):
  """A tokenizer that finds the ids of its special tokens."""

  def find_id(self, token: str) -> int | None:
    """Returns the id of a token, None if the vocabulary does not have it."""
    ...


@runtime_checkable
class HasContentHash(Protocol):
  """A tokenizer that can hash its vocabulary."""

  @property
  def content_hash(self) -> str:
    """A hash that does not depend on the file's format."""
    ...


@runtime_checkable
class HasPaddedSize(Protocol):
  """A tokenizer whose model may embed another number of ids."""

  @property
  def padded_size(self) -> int | None:
    """The number of ids that the model embeds; None for all."""
    ...


def describe(tokenizer: Tokenizer) -> dict[str, Any]:
  """Returns facts that differ between tokenizers, JSON values.

  Returns:
    `tokenizer`, the name of its class; `vocab_size`; `probe`, a hash of the ids
    of a fixed text; and `vocabulary`, its `content_hash` if it has one.
  """
  ids = np.asarray(tokenizer.encode(_PROBE)).astype("<i4")
  facts = {
    "tokenizer": type(tokenizer).__name__,
    "vocab_size": tokenizer.vocab_size,
    "probe": hashlib.sha256(ids.tobytes()).hexdigest()[:16],
  }
  if isinstance(tokenizer, HasContentHash):
    facts["vocabulary"] = tokenizer.content_hash
  return facts


def find_id_bound(tokenizer: Tokenizer) -> int:
  """Returns the exclusive upper bound of the ids of texts.

  A tokenizer whose model embeds fewer ids than it has rejects the others.
  """
  size = tokenizer.vocab_size
  if not isinstance(tokenizer, HasPaddedSize) or tokenizer.padded_size is None:
    return size
  return min(size, tokenizer.padded_size)


def padded_vocab_size(tokenizer: Tokenizer, *, multiple: int) -> int:
  """Returns `vocab_size` rounded up, so that mesh axes divide an embedding.

  Raises:
    ValueError: `multiple` is not positive.
  """
  if multiple <= 0:
    raise ValueError(f"multiple must be positive, got {multiple}.")
  return -(-tokenizer.vocab_size // multiple) * multiple
