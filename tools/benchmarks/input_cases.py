"""Inputs whose speed is measured: the sources that need numpy only.

The text is that of Python's library, a few megabytes of it, cut into documents
of 200 to 3,000 bytes. Tokens are bytes.
"""

from collections.abc import Callable, Sequence
import gzip
import json
import pathlib

import numpy as np

from paxon.inputs import (
  base_input,
  byte_tokenizer,
  corpus_shards,
  corpus_tokenizer,
  document_source,
  example_source,
  example_stream,
  filtered,
  json_lines,
  mixture,
  packed_input,
  packed_lm_input,
  packing_plan,
  python_stdlib,
  synthetic_lm_input,
  text_files,
  token_file,
  tokenizer_protocol,
)

ROWS, LENGTH = 8, 1024
TOKENIZER = byte_tokenizer.ByteTokenizer()

Make = Callable[[], base_input.BaseInput]


def texts(num_bytes: int) -> list[bytes]:
  """Returns the documents."""
  source = python_stdlib.PythonStdlib(split="train")
  data = b""
  for i in range(len(source)):
    if len(data) >= num_bytes:
      break
    data += source[i]
  data, found, place = data[:num_bytes], [], 0
  sizes = np.random.Philox(key=0)
  while place < len(data):
    size = 200 + int(sizes.random_raw()) % 2800
    found.append(data[place : place + size])
    place += size
  return found


def strings(documents: Sequence[bytes]) -> list[str]:
  """Returns the documents as strings, each byte a character."""
  return [document.decode("latin-1") for document in documents]


def of_text(
  source: document_source.DocumentSource, *, shuffle_seed: int | None = 0
) -> base_input.BaseInput:
  """Returns documents, shuffled by default, as packed rows of bytes."""
  return packed_lm_input.PackedLmInput(
    source=source,
    tokenizer=TOKENIZER,
    shuffle_seed=shuffle_seed,
    global_batch_size=ROWS,
    length=LENGTH,
  )


def of_examples(source: example_source.ExampleSource) -> example_stream.Stream:
  """Returns shuffled examples."""
  return example_stream.Examples(source=source, shuffle_seed=0)


def packed(
  stream: example_stream.Stream,
  packing: packing_plan.Packing = packing_plan.Packing.SPLIT,
) -> base_input.BaseInput:
  """Returns packed rows of a stream."""
  return packed_input.PackedInput(
    examples=stream,
    packing=packing,
    global_batch_size=ROWS,
    length=LENGTH,
  )


def corpus(
  path: pathlib.Path,
  tokenizer: tokenizer_protocol.Tokenizer = TOKENIZER,
  form: corpus_shards.Form = corpus_shards.Form.JSON_LINE,
) -> corpus_tokenizer.Corpus:
  """Returns what `tools/tokenize` makes token files of."""
  return corpus_tokenizer.Corpus(
    paths=[str(path)], form=form, tokenizer=tokenizer
  )


def make(documents: Sequence[bytes], folder: pathlib.Path) -> dict[str, Make]:
  """Returns inputs by the name of the case, made when they are called.

  Args:
    documents: The text.
    folder: Where its files are written.
  """
  return {**_of_text(documents, folder), **_of_tokens(documents, folder)}


def _of_text(
  documents: Sequence[bytes], folder: pathlib.Path
) -> dict[str, Make]:
  rows = "\n".join(json.dumps({"text": text}) for text in strings(documents))
  (folder / "a.jsonl").write_text(rows)
  (folder / "a.jsonl.gz").write_bytes(gzip.compress(rows.encode()))
  (folder / "texts").mkdir()
  for i, text in enumerate(documents):
    (folder / "texts" / f"{i:05}.txt").write_bytes(text)
  memory = document_source.InMemoryDocuments(documents)
  return {
    "text in memory": lambda: of_text(memory),
    "text files": lambda: of_text(
      text_files.TextFiles(files=str(folder / "texts" / "*.txt"))
    ),
    "JSON lines": lambda: of_text(
      json_lines.JsonLines(files=str(folder / "a.jsonl"))
    ),
    "JSON lines, gzip": lambda: of_text(
      json_lines.JsonLines(files=str(folder / "a.jsonl.gz"))
    ),
  }


def _of_tokens(
  documents: Sequence[bytes], folder: pathlib.Path
) -> dict[str, Make]:
  corpus_tokenizer.run(
    corpus(folder / "a.jsonl"), str(folder / "tokens"), num_workers=0
  )
  tokens = token_file.TokenFile(path=str(folder / "tokens"), begin_id=1)
  arrays = example_source.InMemoryExamples(
    [TOKENIZER.encode(text) for text in documents]
  )
  mixed = {"a": of_examples(tokens), "b": of_examples(tokens)}
  kept = filtered.Filtered(
    stream=of_examples(tokens), keep=filtered.MinPlaces(places=300)
  )
  return {
    "arrays in memory": lambda: packed(of_examples(arrays)),
    "token file": lambda: packed(of_examples(tokens)),
    "token file, first fit": lambda: packed(
      of_examples(tokens), packing_plan.Packing.FIRST_FIT
    ),
    "token file, best fit": lambda: packed(
      of_examples(tokens), packing_plan.Packing.BEST_FIT
    ),
    "two token files mixed": lambda: packed(
      mixture.Mixture(members=mixed, weights={"a": 3.0, "b": 1.0})
    ),
    "token file, filtered": lambda: packed(kept),
    "synthetic, ones": lambda: _synthetic(None),
    "synthetic, random": lambda: _synthetic(0),
  }


def _synthetic(seed: int | None) -> base_input.BaseInput:
  return synthetic_lm_input.SyntheticLmInput(
    global_batch_size=ROWS,
    length=LENGTH,
    vocab_size=TOKENIZER.vocab_size,
    random_seed=seed,
  )
