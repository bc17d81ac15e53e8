"""Shards of a corpus, determined by the sizes of its files.

A shard is a group of whole files, or a byte range of one file with the lines
that begin in it. Splitting a corpus reads no data, any process can read any
shard, and the documents of all shards in order are those of the corpus.
"""

from collections.abc import Callable, Iterator, Sequence
import dataclasses
import enum
import gzip
import io
import os
import zlib

from paxon.inputs.sources import data_files, json_lines

_GZIP = (".gz", ".gzip")


class Form(enum.Enum):
  """The format of documents: files, lines, or strings in lines of JSON."""

  FILE = "file"
  LINE = "line"
  JSON_LINE = "json_line"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shard:
  """A part of a corpus.

  Attributes:
    paths: Its files; only one if it is a byte range.
    begin: The begin of the byte range.
    end: The end of the byte range. None is the end of the file.
    size: The number of bytes, for progress reports.
  """

  paths: tuple[str, ...]
  begin: int = 0
  end: int | None = None
  size: int


def cut_shards(
  paths: Sequence[str], *, form: Form, shard_bytes: int
) -> list[Shard]:
  """Splits a corpus into shards, in order.

  A byte range has at most `shard_bytes`, a group of files at least. A
  compressed file of lines is one shard. Files of a store and `.zst` files are
  their copies on a disk (`data_files`).
  """
  shards: list[Shard] = []
  some: list[str] = []
  size = 0
  for path in map(data_files.local, paths):
    num_bytes = os.path.getsize(path)
    if form is Form.FILE:
      some.append(path)
      size += num_bytes
      if size >= shard_bytes:
        shards.append(Shard(paths=tuple(some), size=size))
        some, size = [], 0
    elif path.endswith(_GZIP):
      shards.append(Shard(paths=(path,), size=num_bytes))
    else:
      for begin in range(0, num_bytes, shard_bytes):
        end = min(begin + shard_bytes, num_bytes)
        shards.append(
          Shard(paths=(path,), begin=begin, end=end, size=end - begin)
        )
  if some:
    shards.append(Shard(paths=tuple(some), size=size))
  return shards


def documents(
  shard: Shard, *, form: Form, text_key: str
) -> Iterator[tuple[str, bytes]]:
  """Yields the documents of a shard, each with its location for messages.

  Blank files and lines are skipped.

  Raises:
    ValueError: A line is not a JSON object with the string `text_key` or is too
      long (see `json_lines`), or a compressed file is damaged.
  """
  if form is Form.FILE:
    for path in shard.paths:
      with _open(path) as file:
        text = _read(path, file.read)
      if text.strip():
        yield path, text
    return
  rows = json_lines.JsonLines(files=shard.paths[0], text_key=text_key)
  for place, line in _lines(shard):
    if line.strip():
      is_json = form is Form.JSON_LINE
      yield place, rows.document(line, place) if is_json else line


def _lines(shard: Shard) -> Iterator[tuple[str, bytes]]:
  """Yields the lines that begin in the shard's range, without newlines."""
  (path,) = shard.paths
  limit = json_lines.find_max_line()
  with _open(path) as file:
    place = shard.begin

    def read() -> bytes:
      line = _read(path, lambda: file.readline(limit + 1))
      if len(line) > limit and not line.endswith(b"\n"):
        raise json_lines.make_length_error(path, place, limit)
      return line

    if place:
      # The line that continues here belongs to the previous shard.
      file.seek(place - 1)
      place += len(read()) - 1
    while shard.end is None or place < shard.end:
      line = read()
      if not line:
        return
      yield f"{path}, byte {place}", line.removesuffix(b"\n")
      place += len(line)


def _read(path: str, read: Callable[[], bytes]) -> bytes:
  """Returns the result of `read`; an error names the file."""
  try:
    return read()
  except (OSError, EOFError, zlib.error) as error:
    raise ValueError(f"{path} is damaged: {error}.") from error


def _open(path: str) -> io.BufferedIOBase:
  if path.endswith(_GZIP):
    return gzip.GzipFile(path)
  return open(path, "rb")
