"""A corpus cut into shards, from the sizes of its files alone.

A shard is some whole files, or a range of bytes of one file: the lines that
begin in it. So nothing is read to cut a corpus, any process can read any
shard, and the documents of all shards, in order, are those of the corpus.
"""

from collections.abc import Callable, Iterator, Sequence
import dataclasses
import enum
import gzip
import io
import os
import zlib

from paxon.inputs import json_lines

_GZIP = (".gz", ".gzip")


class Form(enum.Enum):
  """What a document is: a file, a line, or a string in a line of JSON."""

  FILE = "file"
  LINE = "line"
  JSON_LINE = "json_line"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shard:
  """A part of a corpus.

  Attributes:
    paths: Its files; just one, if it has a range.
    begin: The byte from which on lines begin.
    end: The byte before which they begin. None is the end of the file.
    size: Bytes of the files or the range, for a progress bar.
  """

  paths: tuple[str, ...]
  begin: int = 0
  end: int | None = None
  size: int


def cut(paths: Sequence[str], *, form: Form, shard_bytes: int) -> list[Shard]:
  """Cuts a corpus.

  Args:
    paths: Its files, in order.
    form: What its documents are.
    shard_bytes: The most bytes of a range, and the least of several files.

  Returns:
    The shards, in order. A compressed file is in one shard.
  """
  shards: list[Shard] = []
  some: list[str] = []
  size = 0
  for path in paths:
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
  """Yields the documents of a shard, and where each one is, for messages.

  Files and lines without any character but white space are left out.

  Raises:
    ValueError: A line is no JSON object with the string, or a compressed file
      is damaged.
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
  """Yields the lines that begin in the shard's range, without their ends."""
  (path,) = shard.paths
  with _open(path) as file:
    place = shard.begin
    if place:
      # The line that goes on here belongs to the shard before.
      file.seek(place - 1)
      place += len(_read(path, file.readline)) - 1
    while shard.end is None or place < shard.end:
      line = _read(path, file.readline)
      if not line:
        return
      yield f"{path}, byte {place}", line.removesuffix(b"\n")
      place += len(line)


def _read(path: str, read: Callable[[], bytes]) -> bytes:
  """Returns what is read; names the file where it cannot be."""
  try:
    return read()
  except (OSError, EOFError, zlib.error) as error:
    raise ValueError(f"{path} is damaged: {error}.") from error


def _open(path: str) -> io.BufferedIOBase:
  if path.endswith(_GZIP):
    return gzip.GzipFile(path)
  return open(path, "rb")
