"""Tokenizes a corpus into one token file, in parallel and resumable.

The corpus is cut into shards (`corpus_shards`) whatever the number of workers.
Each worker writes shards into `NAME.parts/`, each of which appears whole or not
at all; at the end they are joined into `NAME.bin` and `NAME.idx`
(`token_file`), in order. So the bytes are the same with any number of workers,
and a command that was killed goes on with the shards that are missing.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
import dataclasses
import json
import multiprocessing
import os
import shutil
from typing import Any

import numpy as np

from paxon.inputs import corpus_shards, token_file_writer, tokenizer_protocol

_PLAN = "plan.json"
_COPY_BYTES = 1 << 24


@dataclasses.dataclass(frozen=True, kw_only=True)
class Corpus:
  """What to tokenize, and how.

  Attributes:
    paths: The files, in order.
    form: What a document is.
    tokenizer: Makes the ids; it is pickled for processes.
    text_key: Which string of a line of JSON is the document.
    append_end: Whether the tokenizer's end stands after each document.
    prepend_begin: Whether its begin stands before each document.
    shard_bytes: About the size of a shard, in bytes of text.
  """

  paths: Sequence[str]
  form: corpus_shards.Form
  tokenizer: tokenizer_protocol.Tokenizer
  text_key: str = "text"
  append_end: bool = True
  prepend_begin: bool = False
  shard_bytes: int = 16 << 20

  def __post_init__(self) -> None:
    if not self.paths:
      raise ValueError("Corpus.paths must not be empty.")
    if self.shard_bytes <= 0:
      raise ValueError(
        f"Corpus.shard_bytes must be positive, got {self.shard_bytes}."
      )

  def facts(self) -> dict[str, Any]:
    """Returns what is written beside the token file."""
    return {
      **tokenizer_protocol.describe(self.tokenizer),
      "has_begin": self.prepend_begin,
      "has_end": self.append_end,
      "begin_id": self.tokenizer.begin_id,
      "end_id": self.tokenizer.end_id,
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Progress:
  """How far a command is.

  Attributes:
    bytes_done: Of files, before decompression.
    bytes_total: Of all files.
    bytes_found: Those that were done by an earlier command.
    documents: How many have been written.
    tokens: How many have been written.
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
  """Tokenizes a corpus, or what is missing of it.

  Args:
    corpus: What to tokenize.
    path: Of the token file, without an ending.
    num_workers: Processes that tokenize; 0 is this one.
    report: Is told after each shard.

  Returns:
    The last progress.

  Raises:
    ValueError: A document cannot be read, there is none, the file is there
      already, or what was begun is of another corpus.
  """
  pair = token_file_writer.Pair(path=path)
  parts = path + ".parts"
  for existing in (pair.tokens, pair.index):
    # With parts beside it, it is of a command that was stopped at the end.
    if os.path.exists(existing) and not os.path.exists(parts):
      raise ValueError(
        f"{existing} is there already; remove it, or choose another output."
      )
  shards = corpus_shards.cut(
    corpus.paths, form=corpus.form, shard_bytes=corpus.shard_bytes
  )
  _begin(parts, corpus)
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
  for number in _written(corpus, shards, missing, parts, num_workers):
    counted = _counts(parts, number)
    documents, tokens = documents + counted[0], tokens + counted[1]
    done += shards[number].size
    report(progress())
  if not documents:
    raise ValueError(
      f"The {len(corpus.paths)} files from {corpus.paths[0]} on hold no"
      " documents, so there is nothing to write."
    )
  _join(parts, len(shards), pair, corpus)
  return progress()


def _begin(parts: str, corpus: Corpus) -> None:
  """Makes the folder of parts, or checks that it is of the same corpus."""
  status = {path: os.stat(path) for path in corpus.paths}
  plan = {
    # A file that was changed since, its size not, is another one.
    "files": [[p, s.st_size, s.st_mtime_ns] for p, s in status.items()],
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
        f"{parts} was begun with another {key}; remove that folder to begin"
        " again, or go on with the same arguments."
      )


def _part(parts: str, number: int) -> str:
  return os.path.join(parts, f"{number:08}")


def _is_done(parts: str, number: int) -> bool:
  # Written after the tokens, so that both are there.
  return os.path.exists(_part(parts, number) + ".npy")


def _counts(parts: str, number: int) -> tuple[int, int]:
  """Returns the documents and the tokens of a part."""
  lengths = np.load(_part(parts, number) + ".npy")
  return len(lengths), int(lengths.sum())


def _written(
  corpus: Corpus,
  shards: list[corpus_shards.Shard],
  missing: list[int],
  parts: str,
  num_workers: int,
) -> Iterator[int]:
  """Yields the numbers of shards as they are written."""
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
      # After a mistake, or a key, what nobody has begun is left.
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


def _join(
  parts: str,
  num_parts: int,
  pair: token_file_writer.Pair,
  corpus: Corpus,
) -> None:
  """Makes one file of all parts and removes them."""
  lengths = np.concatenate(
    [np.load(_part(parts, i) + ".npy") for i in range(num_parts)]
  )
  with open(pair.tokens + ".part", "wb") as file:
    for number in range(num_parts):
      with open(_part(parts, number) + ".bin", "rb") as part:
        shutil.copyfileobj(part, file, _COPY_BYTES)
    file.flush()
    os.fsync(file.fileno())
  token_file_writer.write_facts(pair.facts, corpus.facts())
  os.replace(pair.tokens + ".part", pair.tokens)
  token_file_writer.write_index(
    pair.index,
    dtype=token_file_writer.dtype_for(corpus.tokenizer.vocab_size),
    lengths=lengths,
    documents=np.arange(len(lengths) + 1),
  )
  # What an earlier command did not get to remove.
  shutil.rmtree(parts + ".done", ignore_errors=True)
  # In one moment, so that no command finds half of them.
  os.replace(parts, parts + ".done")
  shutil.rmtree(parts + ".done")
