"""How many tokens a second each source gives, alone, on one core.

The text is that of Python's library, a few megabytes of it, cut into documents
of 200 to 3,000 bytes; tokens are bytes. Each case reads packed batches of 8
rows of 1,024 in this one process, without workers and without a model.
"""

from collections.abc import Callable, Mapping
import dataclasses
import gzip
import json
import pathlib
import tempfile
import time

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
)

_BYTES = 4_000_000
_ROWS, _LENGTH = 8, 1024
_TOKENIZER = byte_tokenizer.ByteTokenizer()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Speed:
  """What was measured.

  Attributes:
    name: Of the case.
    value: Millions of tokens a second, or megabytes of text.
    unit: Which of the two.
    filled: The share of places that hold a token; None for no rows.
  """

  name: str
  value: float
  unit: str
  filled: float | None = None


def measure(*, num_bytes: int = _BYTES, seconds: float = 1.5) -> list[Speed]:
  """Measures every case.

  Args:
    num_bytes: How much text there is.
    seconds: How long each case reads.
  """
  texts = _texts(num_bytes)
  with tempfile.TemporaryDirectory() as folder:
    cases = _cases(texts, pathlib.Path(folder))
    speeds = _tokenizing(texts, pathlib.Path(folder))
    for name, make in cases.items():
      speeds.append(_read(name, make(), seconds))
  return speeds


def to_markdown(
  speeds: list[Speed], *, environment: Mapping[str, str], command: str
) -> str:
  """Returns the page.

  Args:
    speeds: What was measured.
    environment: Facts of the machine.
    command: What made it.
  """
  lines = [
    "# Speed of inputs",
    "",
    f"Made by `{command}`; do not edit.",
    "",
    *(f"- {key}: {value}" for key, value in environment.items()),
    "",
    " ".join((__doc__ or "").split("\n\n", 1)[1].split()),
    "",
    "| case | speed | places filled |",
    "| --- | ---: | ---: |",
  ]
  for speed in speeds:
    filled = "" if speed.filled is None else f"{speed.filled:.1%}"
    value = f"{speed.value:,.1f} {speed.unit}"
    lines.append(f"| {speed.name} | {value} | {filled} |")
  return "\n".join(lines) + "\n"


def _texts(num_bytes: int) -> list[bytes]:
  source = python_stdlib.PythonStdlib(split="train")
  data = b""
  for i in range(len(source)):
    if len(data) >= num_bytes:
      break
    data += source[i]
  data, texts, place = data[:num_bytes], [], 0
  sizes = np.random.Philox(key=0)
  while place < len(data):
    size = 200 + int(sizes.random_raw()) % 2800
    texts.append(data[place : place + size])
    place += size
  return texts


def _cases(
  texts: list[bytes], folder: pathlib.Path
) -> dict[str, Callable[[], base_input.BaseInput]]:
  rows = "\n".join(
    json.dumps({"text": text.decode("latin-1")}) for text in texts
  )
  (folder / "a.jsonl").write_text(rows)
  (folder / "a.jsonl.gz").write_bytes(gzip.compress(rows.encode()))
  (folder / "texts").mkdir()
  for i, text in enumerate(texts):
    (folder / "texts" / f"{i:05}.txt").write_bytes(text)
  corpus_tokenizer.run(
    _corpus(folder / "a.jsonl"), str(folder / "tokens"), num_workers=0
  )
  tokens = token_file.TokenFile(path=str(folder / "tokens"), begin_id=1)
  runs = [_TOKENIZER.encode(text) for text in texts]
  arrays = example_source.InMemoryExamples(runs)
  memory = document_source.InMemoryDocuments(texts)

  def examples(source: example_source.ExampleSource) -> example_stream.Stream:
    return example_stream.Examples(source=source, shuffle_seed=0)

  def packed(
    stream: example_stream.Stream,
    packing: packing_plan.Packing = packing_plan.Packing.SPLIT,
  ) -> base_input.BaseInput:
    return packed_input.PackedInput(
      examples=stream,
      packing=packing,
      global_batch_size=_ROWS,
      length=_LENGTH,
    )

  def text(source: document_source.DocumentSource) -> base_input.BaseInput:
    return packed_lm_input.PackedLmInput(
      source=source,
      tokenizer=_TOKENIZER,
      shuffle_seed=0,
      global_batch_size=_ROWS,
      length=_LENGTH,
    )

  def synthetic(seed: int | None) -> base_input.BaseInput:
    return synthetic_lm_input.SyntheticLmInput(
      global_batch_size=_ROWS,
      length=_LENGTH,
      vocab_size=259,
      random_seed=seed,
    )

  mixed = {"a": examples(tokens), "b": examples(tokens)}
  kept = filtered.Filtered(
    stream=examples(tokens), keep=filtered.MinPlaces(places=300)
  )
  return {
    "text in memory": lambda: text(memory),
    "text files": lambda: text(
      text_files.TextFiles(files=str(folder / "texts" / "*.txt"))
    ),
    "JSON lines": lambda: text(
      json_lines.JsonLines(files=str(folder / "a.jsonl"))
    ),
    "JSON lines, gzip, shuffled": lambda: text(
      json_lines.JsonLines(files=str(folder / "a.jsonl.gz"))
    ),
    "arrays in memory": lambda: packed(examples(arrays)),
    "token file": lambda: packed(examples(tokens)),
    "token file, first fit": lambda: packed(
      examples(tokens), packing_plan.Packing.FIRST_FIT
    ),
    "token file, best fit": lambda: packed(
      examples(tokens), packing_plan.Packing.BEST_FIT
    ),
    "two token files mixed": lambda: packed(
      mixture.Mixture(members=mixed, weights={"a": 3.0, "b": 1.0})
    ),
    "token file, filtered": lambda: packed(kept),
    "synthetic, ones": lambda: synthetic(None),
    "synthetic, random": lambda: synthetic(0),
  }


def _corpus(path: pathlib.Path) -> corpus_tokenizer.Corpus:
  return corpus_tokenizer.Corpus(
    paths=[str(path)],
    form=corpus_shards.Form.JSON_LINE,
    tokenizer=_TOKENIZER,
  )


def _tokenizing(texts: list[bytes], folder: pathlib.Path) -> list[Speed]:
  """Times the tokenizing of lines of JSON, by bytes."""
  path = folder / "corpus.jsonl"
  path.write_text(
    "\n".join(json.dumps({"text": text.decode("latin-1")}) for text in texts)
  )
  begin = time.perf_counter()
  corpus_tokenizer.run(_corpus(path), str(folder / "timed"), num_workers=0)
  seconds = time.perf_counter() - begin
  size = path.stat().st_size / 1e6
  return [
    Speed(
      name="tokenizing JSON lines into a token file",
      value=size / seconds,
      unit="MB/s",
    )
  ]


def _read(name: str, source: base_input.BaseInput, seconds: float) -> Speed:
  source.get_next()  # Opens what must be opened.
  tokens = places = 0
  begin = time.perf_counter()
  while (spent := time.perf_counter() - begin) < seconds or not places:
    weights = source.get_next()["weights"]
    tokens += int(np.count_nonzero(weights))
    places += weights.size
  return Speed(
    name=name,
    value=tokens / spent / 1e6,
    unit="M tokens/s",
    filled=tokens / places,
  )
