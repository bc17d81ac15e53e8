"""Shards of a corpus, determined by the sizes of its files.

A shard is a group of whole files, or a byte range of one file with the lines
that begin in it. Splitting a corpus reads no data, any process can read any
shard, and the documents of all shards in order are those of the corpus.
"""

from collections.abc import Iterator, Sequence
import dataclasses
import enum

from paxon.inputs.sources import data_files, json_lines

_COMPRESSED = (*data_files.GZIP, *data_files.ZSTD)


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
  compressed file of lines is one shard. Files of a store are read by ranges.
  """
  shards: list[Shard] = []
  some: list[str] = []
  size = 0
  for path in paths:
    num_bytes = data_files.size(path)
    if form is Form.FILE:
      some.append(path)
      size += num_bytes
      if size >= shard_bytes:
        shards.append(Shard(paths=tuple(some), size=size))
        some, size = [], 0
    elif path.endswith(_COMPRESSED):
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
      with data_files.DataFile(path).open_text() as file:
        text = file.read()
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
  begin = shard.begin
  with data_files.DataFile(path).open_text(max(begin - 1, 0)) as file:
    if begin:
      # The line that continues here belongs to the previous shard.
      begin += len(next(json_lines.read_lines(file, path, begin=begin))[1]) - 1
    for place, line in json_lines.read_lines(file, path, begin=begin):
      if shard.end is not None and place >= shard.end:
        return
      yield f"{path}, byte {place}", line.removesuffix(b"\n")
