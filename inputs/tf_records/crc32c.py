"""CRC-32C (Castagnoli), the checksum of TFRecord files, in numpy.

The checksum is linear over GF(2): that of n bytes is the exclusive or of one
term per byte, which depends on the byte and on how many bytes follow it. So a
block is one look-up per byte in a table [followers, value], and the previous
checksum enters with the first four bytes of the next block. Reflected,
polynomial 0x82F63B78, initial and final value all ones, as in RFC 3720.
"""

import functools
from typing import Any

import numpy as np
import numpy.typing as npt

_POLYNOMIAL = 0x82F63B78
_ONES = 0xFFFFFFFF
_BLOCK = 1024
_MASK_DELTA = 0xA282EAD8


def crc32c(data: bytes | memoryview) -> int:
  """Returns the checksum of some bytes, in [0, 2**32)."""
  array = np.frombuffer(data, np.uint8)
  state = _ONES
  begin = 0
  # The odd block comes first, so that those after it have at least four bytes.
  end = len(array) % _BLOCK
  while end <= len(array):
    state = _advance(state, array[begin:end])
    begin, end = end, end + _BLOCK
  return state ^ _ONES


def crc32c_rows(
  rows: npt.NDArray[np.uint8],
) -> npt.NDArray[np.uint32]:
  """Returns the checksum of each row of uint8 [N, K], 4 <= K <= 1024."""
  values = rows.copy()
  values[:, :4] ^= 0xFF
  followers = _followers(rows.shape[1])
  found = np.bitwise_xor.reduce(_table()[followers + values], axis=1)
  return found ^ np.uint32(_ONES)


def mask(checksum: Any) -> Any:
  """Returns an int or a uint64 array of checksums as TFRecord files store it.

  They are rotated and offset, as a checksum of data that holds its own checksum
  would be worthless.
  """
  return (((checksum >> 15) | (checksum << 17)) + _MASK_DELTA) & _ONES


def _advance(state: int, block: npt.NDArray[np.uint8]) -> int:
  """Returns the state after a block of at most `_BLOCK` bytes."""
  table = _table()
  if len(block) < 4:
    for byte in block.tolist():
      state = (state >> 8) ^ int(table[(state ^ byte) & 0xFF])
    return state
  followers = _followers(len(block))
  places = followers + block
  first = np.frombuffer(state.to_bytes(4, "little"), np.uint8)
  places[:4] = followers[:4] + (block[:4] ^ first)
  return int(np.bitwise_xor.reduce(table[places]))


@functools.cache
def _followers(length: int) -> npt.NDArray[np.intp]:
  """Returns where in the table the rows of the bytes of a block begin."""
  return np.arange(length - 1, -1, -1, dtype=np.intp) * 256


@functools.cache
def _table() -> npt.NDArray[np.uint32]:
  """Returns the CRC of byte b with k bytes after it as entry 256 * k + b."""
  first = np.arange(256, dtype=np.uint32)
  for _ in range(8):
    odd = (first & 1).astype(bool)
    first = np.where(odd, (first >> 1) ^ np.uint32(_POLYNOMIAL), first >> 1)
  rows = [first]
  for _ in range(_BLOCK - 1):
    last = rows[-1]
    rows.append((last >> 8) ^ first[last & 0xFF])
  return np.concatenate(rows).astype(np.uint32)
