"""The interface of tokenizers, and a description to distinguish them.

Any class with these members is a tokenizer, without inheritance.
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
  content_hash = getattr(tokenizer, "content_hash", None)
  return facts if content_hash is None else facts | {"vocabulary": content_hash}


def find_id_bound(tokenizer: Tokenizer) -> int:
  """Returns the exclusive upper bound of the ids of texts.

  A tokenizer whose model embeds fewer ids than it has rejects the others.
  """
  embedded = getattr(tokenizer, "padded_size", None)
  size = tokenizer.vocab_size
  return size if embedded is None else min(size, embedded)


def padded_vocab_size(tokenizer: Tokenizer, *, multiple: int) -> int:
  """Returns `vocab_size` rounded up, so that mesh axes divide an embedding.

  Raises:
    ValueError: `multiple` is not positive.
  """
  if multiple <= 0:
    raise ValueError(f"multiple must be positive, got {multiple}.")
  return -(-tokenizer.vocab_size // multiple) * multiple
