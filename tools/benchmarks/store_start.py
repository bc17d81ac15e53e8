"""Starts of training on the same files on a disk and in an object store.

  tools/python -m paxon.tools.benchmarks.store_start HERE THERE [--window=10000]
    [--batches=100] [--text_key=text]

HERE is a folder, path or pattern on a disk, THERE a URL of a store with copies
of its files. Both are read in windows, from an empty cache, and every batch is
compared. It prints the seconds to the first batch, the bytes of chunks read
before it and over all batches, and the most that the cache had on the disk.
"""

import argparse
from collections.abc import Sequence
import dataclasses
import os
import sys
import tempfile
import time

from paxon.inputs import byte_tokenizer, packed_input
from paxon.inputs.sources import (
  grain_sources,
  json_lines,
  record_columns,
  record_files,
  stored_file,
)

_BATCH, _LENGTH = 8, 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class Start:
  """Measurements of one store.

  Attributes:
    stored_bytes: Bytes of all files.
    here_seconds: To the first batch from a disk.
    there_seconds: To the first batch from the store.
    first_bytes: Bytes of chunks on the disk after the first batch.
    most_bytes: The most after any batch.
    limit: The largest number that the cache may have.
    num_batches: Batches that were compared.
    num_different: Batches that differed.
  """

  stored_bytes: int
  here_seconds: float
  there_seconds: float
  first_bytes: int
  most_bytes: int
  limit: int
  num_batches: int
  num_different: int


def measure(
  here: str, there: str, *, window: int, num_batches: int, text_key: str
) -> Start:
  """Reads the same files from a disk and from a store; see `Start`."""
  inputs, seconds = [], []
  batches = []
  for files in (here, there):
    begin = time.monotonic()
    made = _make_input(files, window=window, text_key=text_key)
    batches.append(made.get_next())
    seconds.append(time.monotonic() - begin)
    inputs.append(made)
  first = most = _count_cached()
  different = int(not _are_equal(*batches))
  for _ in range(num_batches - 1):
    different += not _are_equal(*(made.get_next() for made in inputs))
    most = max(most, _count_cached())
  source = json_lines.JsonLines(files=there)
  return Start(
    stored_bytes=sum(source.measure_files()),
    here_seconds=seconds[0],
    there_seconds=seconds[1],
    first_bytes=first,
    most_bytes=most,
    limit=stored_file.find_limit(),
    num_batches=num_batches,
    num_different=different,
  )


def to_lines(start: Start) -> list[str]:
  """Returns the measurements as text."""
  return [
    f"files:                {start.stored_bytes:,} bytes",
    f"first batch, disk:    {start.here_seconds:.2f} s",
    f"first batch, store:   {start.there_seconds:.2f} s, after"
    f" {start.first_bytes:,} bytes",
    f"cache:                at most {start.most_bytes:,} of"
    f" {start.limit:,} bytes",
    f"batches:              {start.num_batches},"
    f" {start.num_different} different",
  ]


def _make_input(
  files: str, *, window: int, text_key: str
) -> packed_input.PackedInput:
  is_parquet = record_files.find(files, field="files")[0].endswith(".parquet")
  if is_parquet:
    rows = grain_sources.ParquetRows(files=files, columns=(text_key,))
    source = record_columns.TextColumn(rows=rows, column=text_key)
  else:
    source = json_lines.JsonLines(files=files, text_key=text_key)
  return packed_input.pack_documents(
    source=source,
    tokenizer=byte_tokenizer.ByteTokenizer(),
    global_batch_size=_BATCH,
    length=_LENGTH,
    shuffle_seed=0,
    shuffle_window=window,
  )


def _are_equal(first: dict, second: dict) -> bool:
  return first.keys() == second.keys() and all(
    (value == second[key]).all() for key, value in first.items()
  )


def _count_cached() -> int:
  folder = os.path.join(stored_file.find_folder(), "chunks")
  if not os.path.isdir(folder):
    return 0
  with os.scandir(folder) as entries:
    return sum(entry.stat().st_size for entry in entries)


def main(argv: Sequence[str]) -> int:
  """Prints the measurements; returns 1 if a batch differs."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("here")
  parser.add_argument("there")
  parser.add_argument("--window", type=int, default=10_000)
  parser.add_argument("--batches", type=int, default=100)
  parser.add_argument("--text_key", default="text")
  given = parser.parse_args(argv)
  with tempfile.TemporaryDirectory() as folder:
    os.environ[stored_file.FOLDER] = folder
    found = measure(
      given.here,
      given.there,
      window=given.window,
      num_batches=given.batches,
      text_key=given.text_key,
    )
  print("\n".join(to_lines(found)))
  return int(found.num_different > 0)


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
