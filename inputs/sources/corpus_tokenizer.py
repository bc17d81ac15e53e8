"""Parallel, resumable tokenization of a corpus into one token file.

The corpus is split into shards (`corpus_shards`) independently of the number of
workers. Workers write the shards atomically to `NAME.parts/`; at the end they
are concatenated in order into `NAME.bin` and `NAME.idx` (`token_file`). The
output is therefore the same with any number of workers, and an interrupted
command resumes with the missing shards. An output in an object store is written
to the data cache (`stored_file`) and uploaded, the index last.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
import dataclasses
import hashlib
import json
import multiprocessing
import os
import shutil
from typing import Any
import zlib

import numpy as np

from paxon.inputs import checks, stores, tokenizer_protocol
from paxon.inputs.sources import (
  corpus_shards,
  data_files,
  stored_file,
  token_file_writer,
)

_PLAN = "plan.json"
_COPY_BYTES = 1 << 24


@dataclasses.dataclass(frozen=True, kw_only=True)
class Corpus:
  """Files to tokenize, with their format and tokenizer.

  Attributes:
    paths: The files, in order.
    form: The format of documents in the files.
    tokenizer: The tokenizer; pickled for worker processes.
    text_key: The key of the document in a line of JSON.
    append_end: Whether to append the tokenizer's end id to each document.
    prepend_begin: Whether to prepend its begin id to each document.
    shard_bytes: The approximate size of a shard, in bytes of text.
  """

  paths: Sequence[str]
  form: corpus_shards.Form
  tokenizer: tokenizer_protocol.Tokenizer
  text_key: str = "text"
  append_end: bool = True
  prepend_begin: bool = False
  shard_bytes: int = 16 << 20

  def __post_init__(self) -> None:
    checks.check_not_empty(self, "paths")
    checks.check_positive(self, "shard_bytes")

  def facts(self) -> dict[str, Any]:
    """Returns the content of the token file's `NAME.json`."""
    return {
      **tokenizer_protocol.describe(self.tokenizer),
      "has_begin": self.prepend_begin,
      "has_end": self.append_end,
      "begin_id": self.tokenizer.begin_id,
      "end_id": self.tokenizer.end_id,
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Progress:
  """The progress of a command.

  Attributes:
    bytes_done: Bytes of the files processed, before decompression.
    bytes_total: Bytes of all files.
    bytes_found: Bytes that an earlier command had processed.
    documents: The number of documents written.
    tokens: The number of tokens written.
  """

  bytes_done: int
  bytes_total: int
  bytes_found: int
  documents: int
  tokens: int


def run(
  corpus: Corpus,
  path: str,
  *,
  num_workers: int = 1,
  report: Callable[[Progress], None] = lambda _: None,
) -> Progress:
  """Tokenizes the missing shards of a corpus and writes the token file.

  Args:
    corpus: The corpus.
    path: The path or URL of the token file, without an extension.
    num_workers: The number of worker processes; 0 uses this process.
    report: Called once at the start and after each shard with the progress,
      which is also returned at the end.

  Raises:
    ValueError: A document cannot be read, there are none, the output exists
      already, or the shards on disk are of another corpus.
  """
  local = _find_local(path)
  parts = local + ".parts"
  for existing in (path + ".bin", path + ".idx"):
    # With shards next to it, it is the output of an interrupted command.
    if data_files.exists(existing) and not os.path.exists(parts):
      raise ValueError(
        f"{existing} is there already; remove it, or choose another output."
      )
  shards = corpus_shards.cut_shards(
    corpus.paths, form=corpus.form, shard_bytes=corpus.shard_bytes
  )
  _begin(parts, corpus, num_shards=len(shards))
  total = sum(shard.size for shard in shards)
  missing = [i for i in range(len(shards)) if not _is_done(parts, i)]
  found = total - sum(shards[i].size for i in missing)
  counts = [_counts(parts, i) for i in range(len(shards)) if i not in missing]
  documents, tokens = (sum(c[i] for c in counts) for i in (0, 1))
  done = found

  def progress() -> Progress:
    return Progress(
      bytes_done=done,
      bytes_total=total,
      bytes_found=found,
      documents=documents,
      tokens=tokens,
    )

  report(progress())
  for number in _write_missing(corpus, shards, missing, parts, num_workers):
    counted = _counts(parts, number)
    documents, tokens = documents + counted[0], tokens + counted[1]
    done += shards[number].size
    report(progress())
  if not documents:
    raise ValueError(
      f"The {len(corpus.paths)} files from {corpus.paths[0]} on hold no"
      " documents, so there is nothing to write."
    )
  _join(parts, len(shards), local, corpus)
  if local != path:
    for ending in (".bin", ".json", ".idx"):
      stores.upload(local + ending, path + ending)
      os.remove(local + ending)
  _remove(parts)
  return progress()


def _find_local(path: str) -> str:
  """Returns where the output is written first; the path itself on a disk."""
  if not stores.is_remote(path):
    return path
  name = hashlib.sha256(path.encode()).hexdigest()[:16]
  return os.path.join(stored_file.find_folder(), "outputs", name, "tokens")


def _begin(parts: str, corpus: Corpus, *, num_shards: int) -> None:
  """Creates the shard folder, or checks that its plan matches."""
  plan = {
    # Detects changes that keep the size.
    "files": [[path, data_files.find_version(path)] for path in corpus.paths],
    "num_shards": num_shards,
    "form": corpus.form.value,
    "text_key": corpus.text_key,
    "shard_bytes": corpus.shard_bytes,
    **corpus.facts(),
  }
  os.makedirs(parts, exist_ok=True)
  path = os.path.join(parts, _PLAN)
  if not os.path.exists(path):
    token_file_writer.write_facts(path, plan)
    return
  with open(path, encoding="utf-8") as file:
    begun = json.load(file)
  for key, value in plan.items():
    if begun.get(key) != value:
      raise ValueError(
        f"{parts} was begun with another {key}; remove that folder to start"
        " over, or resume with the same arguments."
      )


def _part(parts: str, number: int) -> str:
  return os.path.join(parts, f"{number:08}")


def _is_done(parts: str, number: int) -> bool:
  # Written after the tokens, so it exists only if both do.
  return os.path.exists(_part(parts, number) + ".npy")


def _counts(parts: str, number: int) -> tuple[int, int]:
  """Returns the numbers of documents and tokens of a shard."""
  lengths = np.load(_part(parts, number) + ".npy")
  return len(lengths), int(lengths.sum())


def _write_missing(
  corpus: Corpus,
  shards: list[corpus_shards.Shard],
  missing: list[int],
  parts: str,
  num_workers: int,
) -> Iterator[int]:
  """Tokenizes the missing shards; yields their numbers as they finish."""
  if not num_workers:
    for number in missing:
      yield _write(corpus, shards[number], _part(parts, number), number)
    return
  context = multiprocessing.get_context("spawn")
  with futures.ProcessPoolExecutor(num_workers, mp_context=context) as pool:
    tasks = [
      pool.submit(_write, corpus, shards[i], _part(parts, i), i)
      for i in missing
    ]
    try:
      for task in futures.as_completed(tasks):
        yield task.result()
    finally:
      # After an error or an interrupt, pending shards are cancelled.
      pool.shutdown(wait=True, cancel_futures=True)


def _write(
  corpus: Corpus, shard: corpus_shards.Shard, part: str, number: int
) -> int:
  """Tokenizes one shard; returns its number."""
  tokenizer = corpus.tokenizer
  dtype = token_file_writer.dtype_for(tokenizer.vocab_size)
  begin = [tokenizer.begin_id] if corpus.prepend_begin else []
  end = [tokenizer.end_id] if corpus.append_end else []
  lengths = []
  with open(part + ".bin", "wb") as file:
    for place, text in corpus_shards.documents(
      shard, form=corpus.form, text_key=corpus.text_key
    ):
      ids = np.concatenate((begin, tokenizer.encode(text), end))
      ids = ids.astype(np.int64)
      if ids.size and ids.max() >= tokenizer.vocab_size:
        raise ValueError(
          f"{place}: the tokenizer gave the id {ids.max()}, and its vocab_size"
          f" is {tokenizer.vocab_size}."
        )
      token_file_writer.write_tokens(file, ids, dtype=dtype)
      lengths.append(len(ids))
    file.flush()
    os.fsync(file.fileno())
  with open(part + ".npy.part", "wb") as file:
    np.save(file, np.array(lengths, np.int64))
  os.replace(part + ".npy.part", part + ".npy")
  return number


def _join(parts: str, num_parts: int, path: str, corpus: Corpus) -> None:
  """Concatenates the shards into one file."""
  lengths = np.concatenate(
    [np.load(_part(parts, i) + ".npy") for i in range(num_parts)]
  )
  checksum = 0
  with open(path + ".bin.part", "wb") as file:
    for number in range(num_parts):
      with open(_part(parts, number) + ".bin", "rb") as part:
        while data := part.read(_COPY_BYTES):
          checksum = zlib.crc32(data, checksum)
          file.write(data)
    file.flush()
    os.fsync(file.fileno())
  os.replace(path + ".bin.part", path + ".bin")
  index = path + ".idx.new"
  token_file_writer.write_index(
    index,
    dtype=token_file_writer.dtype_for(corpus.tokenizer.vocab_size),
    lengths=lengths,
    documents=np.arange(len(lengths) + 1),
  )
  token_file_writer.write_token_facts(
    path + ".json", corpus.facts(), index=index, tokens=checksum
  )
  os.replace(index, path + ".idx")


def _remove(parts: str) -> None:
  # Left by an interrupted command.
  shutil.rmtree(parts + ".done", ignore_errors=True)
  # Renamed first, so that no command finds a partial folder.
  os.replace(parts, parts + ".done")
  shutil.rmtree(parts + ".done")
