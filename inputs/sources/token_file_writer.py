"""Writers of token files, Megatron's `.bin` and `.idx`; see `token_file`."""

import json
import os
from typing import Any, BinaryIO

import numpy as np

from paxon.inputs.sources import token_file


def dtype_for(vocab_size: int) -> np.dtype:
  """Returns the smallest dtype for the ids that Megatron supports."""
  return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.int32)


def write_index(
  path: str, *, dtype: np.dtype, lengths: np.ndarray, documents: np.ndarray
) -> None:
  """Writes an index atomically.

  `lengths` [n] are those of sequences in tokens; `documents` [d] the first
  sequence of each document, then n.

  Raises:
    ValueError: The format does not support the dtype or the length of a
      sequence.
  """
  codes = {np.dtype(kind): code for code, kind in token_file.DTYPES.items()}
  if dtype not in codes:
    raise ValueError(f"Token files cannot hold {dtype}.")
  sizes = np.asarray(lengths, np.int64)
  if len(sizes) and sizes.max() >= 1 << 31:
    raise ValueError(
      f"Sequence {int(sizes.argmax())} has {sizes.max()} tokens; the format"
      " allows less than 2**31."
    )
  ends = np.cumsum(sizes) * dtype.itemsize
  pointers = np.concatenate(([0], ends[:-1])) if len(sizes) else ends
  header = token_file.HEADER.pack(
    token_file.MAGIC,
    token_file.VERSION,
    codes[dtype],
    len(sizes),
    len(documents),
  )
  with open(path + ".part", "wb") as file:
    file.write(header)
    for table, kind in (
      (sizes, "<i4"),
      (pointers, "<i8"),
      (documents, "<i8"),
    ):
      file.write(np.asarray(table).astype(kind).tobytes())
  os.replace(path + ".part", path)


def write_token_facts(
  path: str, facts: dict[str, Any], *, index: str, tokens: int
) -> None:
  """Writes the facts of a token file with checksums.

  `index` is the path of the written index, `tokens` the CRC-32 of the tokens.
  """
  sums = {"index": token_file.checksum(index), "tokens": tokens}
  facts = {**facts, token_file.CHECKSUMS: sums}
  sums["facts"] = token_file.find_checksum(facts)
  write_facts(path, facts)


def write_facts(path: str, facts: dict[str, Any]) -> None:
  """Writes facts about the tokens as JSON."""
  with open(path + ".part", "w", encoding="utf-8") as file:
    json.dump(facts, file, indent=2, sort_keys=True)
    file.write("\n")
  os.replace(path + ".part", path)


def write_tokens(file: BinaryIO, ids: np.ndarray, *, dtype: np.dtype) -> None:
  """Appends ids to an open `.bin`.

  Raises:
    ValueError: An id does not fit in the dtype.
  """
  if ids.size and (ids.min() < 0 or ids.max() > np.iinfo(dtype).max):
    raise ValueError(
      f"Ids from {ids.min()} to {ids.max()} do not fit in {dtype}."
    )
  file.write(ids.astype(dtype.newbyteorder("<")).tobytes())


def write(
  path: str,
  documents: list[np.ndarray],
  *,
  dtype: np.dtype,
  facts: dict[str, Any] | None = None,
) -> None:
  """Writes whole documents, one sequence each, for small data and tests.

  `path` has no extension; `documents` are ids [n]. Without `facts` there is no
  `NAME.json`.
  """
  with open(path + ".bin", "wb") as file:
    for ids in documents:
      write_tokens(file, ids, dtype=dtype)
  write_index(
    path + ".idx",
    dtype=dtype,
    lengths=np.array([len(ids) for ids in documents], np.int64),
    documents=np.arange(len(documents) + 1),
  )
  if facts is not None:
    write_token_facts(
      path + ".json",
      facts,
      index=path + ".idx",
      tokens=token_file.checksum(path + ".bin"),
    )
