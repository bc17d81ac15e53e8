"""A tokenizer whose tokens are the bytes of the text.

Ids: 0 padding, 1 begin of document, 2 end of document, 3 + b for the byte b.
It needs no vocabulary file and is lossless. Its loss per token is a loss per
byte, which is comparable between models with different tokenizers.
"""

import dataclasses

import numpy as np
import numpy.typing as npt

# The value of the knob `tokenizer` for this tokenizer.
NAME = "bytes"
_NUM_SPECIAL = 3
_NUM_BYTES = 256


@dataclasses.dataclass(frozen=True)
class ByteTokenizer:
  """Bytes as ids, after three special ids."""

  @property
  def vocab_size(self) -> int:
    """The number of ids: three special ones and 256 bytes."""
    return _NUM_SPECIAL + _NUM_BYTES

  @property
  def padded_vocab_size(self) -> int:
    """`vocab_size` rounded up to a multiple of 8.

    264 can be sharded over mesh axes of size 2, 4 and 8; 259 cannot. The added
    ids never occur in data.
    """
    return -(-self.vocab_size // 8) * 8

  @property
  def pad_id(self) -> int:
    """The id of padding."""
    return 0

  @property
  def begin_id(self) -> int:
    """The id before the first byte of a document."""
    return 1

  @property
  def end_id(self) -> int:
    """The id after the last byte of a document."""
    return 2

  def encode(self, text: str | bytes) -> npt.NDArray[np.int32]:
    """Returns the ids of text, int32 [T], without begin and end ids."""
    data = text.encode("utf-8") if isinstance(text, str) else text
    return np.frombuffer(data, np.uint8).astype(np.int32) + _NUM_SPECIAL

  def decode_bytes(self, ids: npt.ArrayLike) -> bytes:
    """Returns the bytes of ids [T]; special ids are dropped.

    Raises:
      ValueError: An id is not in [0, padded_vocab_size).
    """
    checked = self._check(ids)
    kept = checked[self.byte_counts(checked) == 1]
    return (kept - _NUM_SPECIAL).astype(np.uint8).tobytes()

  def decode(self, ids: npt.ArrayLike) -> str:
    """Returns `decode_bytes(ids)` as text, with U+FFFD for invalid UTF-8."""
    return self.decode_bytes(ids).decode("utf-8", errors="replace")

  def byte_counts(self, ids: npt.ArrayLike) -> npt.NDArray[np.int32]:
    """Returns 1 for ids that are bytes and 0 for others, int32."""
    array = self._check(ids)
    is_byte = (array >= _NUM_SPECIAL) & (array < self.vocab_size)
    return is_byte.astype(np.int32)

  def _check(self, ids: npt.ArrayLike) -> np.ndarray:
    array = np.asarray(ids)
    if not array.size:
      return array.astype(np.int32)
    if array.dtype.kind not in "iu":
      raise ValueError(f"Token ids must be integers, got {array.dtype}.")
    low, high = int(array.min()), int(array.max())
    if low < 0 or high >= self.padded_vocab_size:
      raise ValueError(
        f"Token ids of the ByteTokenizer must be at least 0 and less than"
        f" {self.padded_vocab_size}, got {low if low < 0 else high}."
      )
    return array
