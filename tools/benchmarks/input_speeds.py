"""Throughput of the data sources on one core, without a model.

The text is 4 MB of Python's standard library, cut into documents of 200 to
3,000 bytes; tokens are bytes. Each case reads shuffled, packed batches of 8
sequences of 1,024 tokens in one process, bound to one core, without workers.
Text is tokenized as it is read; token files and arrays hold tokens. Tokenizing
is measured in megabytes of text, as `tools/tokenize` does it with one worker.
The last row is a run of the quickstart on all cores, and the share of its loop
time in which it waited for a batch.
"""

from collections.abc import Iterator, Sequence
import contextlib
import dataclasses
import gzip
import io
import json
import os
import pathlib
import tempfile
import time

from etils import epath
import fiddle as fdl
import numpy as np

from paxon.inputs import base_input, byte_tokenizer, packed_input
from paxon.inputs import packing as packing_lib
from paxon.inputs.sources import (
  corpus_shards,
  corpus_tokenizer,
  example_source,
  json_lines,
  python_stdlib,
  text_files,
  token_file,
)
from paxon.inputs.streams import example_stream, mixture
from paxon.inputs.tf_records import tf_record_files
from paxon.runner import run_dir as run_dirs
from paxon.runner.checkpoints import text_table
from paxon.runner.configuration import find_experiment
from paxon.runner.monitoring import goodput
from paxon.runner.training import train

_BYTES = 4_000_000
_STEPS = 150
_FAR = 10_000_000
_QUICKSTART = "tasks.lm.params.quickstart.PythonStdlibLm"
_BATCH, _LENGTH = 8, 1024
_TOKENIZER = byte_tokenizer.ByteTokenizer()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Speed:
  """The result of a case.

  Attributes:
    name: Of the case.
    text: The rate with its unit.
    filled: The share of positions that hold a token; None for no batches.
  """

  name: str
  text: str
  filled: float | None = None


def measure(
  *, num_bytes: int = _BYTES, seconds: float = 1.5, num_steps: int = _STEPS
) -> list[Speed]:
  """Measures every case.

  Args:
    num_bytes: Size of the text.
    seconds: How long each case reads.
    num_steps: Training steps of the quickstart; 0 leaves it out.
  """
  documents = _documents(num_bytes)
  with tempfile.TemporaryDirectory() as name:
    folder = pathlib.Path(name)
    with _one_core():
      cases = {**_from_text(documents, folder), **_from_tokens(folder)}
      speeds = [_speed(case, source, seconds) for case, source in cases.items()]
      speeds += _tokenizing(documents, folder)
      speeds.append(_resuming())
    if num_steps:
      speeds.append(_waiting(folder / "run", num_steps))
  return speeds


def to_lines(speeds: Sequence[Speed]) -> list[str]:
  """Returns the lines of a table."""
  rows = [("case", "speed", "positions filled")]
  rows += [
    (s.name, s.text, "" if s.filled is None else f"{s.filled:.1%}")
    for s in speeds
  ]
  return text_table.format_lines(rows, right=(1, 2))


def _documents(num_bytes: int) -> list[bytes]:
  source = python_stdlib.PythonStdlib(split="train")
  data = b""
  for i in range(len(source)):
    if len(data) >= num_bytes:
      break
    data += source[i]
  data, found, begin = data[:num_bytes], [], 0
  sizes = np.random.Philox(key=0)
  while begin < len(data):
    size = 200 + int(sizes.random_raw()) % 2800
    found.append(data[begin : begin + size])
    begin += size
  return found


def _from_text(
  documents: Sequence[bytes], folder: pathlib.Path
) -> dict[str, base_input.BaseInput]:
  """Returns inputs that tokenize as they read, with their files written."""
  # Each byte becomes a character.
  strings = [document.decode("latin-1") for document in documents]
  lines = "\n".join(json.dumps({"text": text}) for text in strings)
  (folder / "a.jsonl").write_text(lines)
  (folder / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
  (folder / "texts").mkdir()
  for i, document in enumerate(documents):
    (folder / "texts" / f"{i:05}.txt").write_bytes(document)
  records = folder / "a.tfrecord"
  tf_record_files.write(str(records), documents)
  sources: dict[str, example_source.DocumentSource] = {
    "text in memory": example_source.InMemoryDocuments(documents),
    "text files": text_files.TextFiles(files=str(folder / "texts" / "*.txt")),
    "JSON lines": json_lines.JsonLines(files=str(folder / "a.jsonl")),
    "JSON lines, gzip": json_lines.JsonLines(files=str(folder / "a.jsonl.gz")),
    "TFRecord": tf_record_files.TfRecordFiles(files=str(records)),
  }
  return {
    name: packed_input.pack_documents(
      source=source,
      tokenizer=_TOKENIZER,
      shuffle_seed=0,
      global_batch_size=_BATCH,
      length=_LENGTH,
    )
    for name, source in sources.items()
  }


def _from_tokens(folder: pathlib.Path) -> dict[str, base_input.BaseInput]:
  """Returns inputs that read a token file, made of the JSON lines."""
  corpus = _corpus(folder / "a.jsonl", corpus_shards.Form.JSON_LINE)
  corpus_tokenizer.run(corpus, str(folder / "tokens"), num_workers=0)
  tokens = _shuffle(
    token_file.TokenFile(path=str(folder / "tokens"), begin_id=1)
  )
  mixed = mixture.Mixture(
    members={"a": tokens, "b": tokens}, weights={"a": 3.0, "b": 1.0}
  )
  return {
    "token file": _pack(tokens),
    "token file, first fit": _pack(tokens, packing_lib.Packing.FIRST_FIT),
    "token file, best fit": _pack(tokens, packing_lib.Packing.BEST_FIT),
    "two token files mixed": _pack(mixed),
  }


def _shuffle(source: example_source.ExampleSource) -> example_stream.Stream:
  return example_stream.Examples(source=source, shuffle_seed=0)


def _pack(
  stream: example_stream.Stream,
  packing: packing_lib.Packing = packing_lib.Packing.SPLIT,
) -> base_input.BaseInput:
  return packed_input.PackedInput(
    examples=stream,
    packing=packing,
    global_batch_size=_BATCH,
    length=_LENGTH,
  )


def _corpus(
  path: pathlib.Path, form: corpus_shards.Form
) -> corpus_tokenizer.Corpus:
  return corpus_tokenizer.Corpus(
    paths=[str(path)], form=form, tokenizer=_TOKENIZER
  )


@contextlib.contextmanager
def _one_core() -> Iterator[None]:
  """Binds this thread, and those that it starts, to one core, if supported."""
  if not hasattr(os, "sched_setaffinity"):
    yield
    return
  before = os.sched_getaffinity(0)
  os.sched_setaffinity(0, {max(before)})
  try:
    yield
  finally:
    os.sched_setaffinity(0, before)


def _speed(name: str, source: base_input.BaseInput, seconds: float) -> Speed:
  source.get_next()  # Opens files.
  tokens = positions = 0
  begin = time.perf_counter()
  while (spent := time.perf_counter() - begin) < seconds or not positions:
    weights = source.get_next()["weights"]
    tokens += int(np.count_nonzero(weights))
    positions += weights.size
  return Speed(
    name=name,
    text=f"{tokens / spent / 1e6:,.2f} M tokens/s",
    filled=tokens / positions,
  )


def _tokenizing(
  documents: Sequence[bytes], folder: pathlib.Path
) -> Iterator[Speed]:
  lines = folder / "lines.txt"
  lines.write_bytes(b"\n".join(d.replace(b"\n", b" ") for d in documents))
  forms = corpus_shards.Form
  for name, path, form in (
    ("tokenizing lines", lines, forms.LINE),
    ("tokenizing JSON lines", folder / "a.jsonl", forms.JSON_LINE),
  ):
    begin = time.perf_counter()
    out = str(folder / f"tokens of {form.name}")
    corpus_tokenizer.run(_corpus(path, form), out, num_workers=0)
    rate = os.path.getsize(path) / (time.perf_counter() - begin)
    yield Speed(name=name, text=f"{rate / 1e6:,.1f} MB/s")


class _Numbers:
  """A billion examples that cost nothing."""

  def __len__(self) -> int:
    return 10**9

  def __getitem__(self, index: int, /) -> example_source.Example:
    return example_source.lm_features(np.full(500, index, np.int32))


def _resuming() -> Speed:
  """Times restoring a position far into a shuffled epoch, and a batch."""
  source = _pack(_shuffle(_Numbers()), packing_lib.Packing.BEST_FIT)
  state = source.get_state() | {"position": _FAR}
  begin = time.perf_counter()
  source.set_state(state)
  source.get_next()
  spent = time.perf_counter() - begin
  return Speed(
    name=f"resuming at example {_FAR:,}, with a batch",
    text=f"{1e3 * spent:,.1f} ms",
  )


def _waiting(folder: pathlib.Path, num_steps: int) -> Speed:
  """Trains the quickstart for some steps; returns its waiting time."""
  # By name: the tools depend on no experiment.
  kind = find_experiment.find_experiment(_QUICKSTART)
  config = (
    kind()
    .replace(
      num_train_steps=num_steps,
      checkpoint_every_steps=num_steps,
      eval_every_steps=num_steps,
    )
    .job()
  )
  job = dataclasses.replace(
    fdl.build(config), baselines=None, generation=None, eval_inputs={}
  )
  path = epath.Path(folder)
  path.mkdir()
  with contextlib.redirect_stdout(io.StringIO()):
    train.run(job, config, path)
  (attempt,) = goodput.read(path / run_dirs.GOODPUT)
  waited, worked = (
    attempt.seconds.get(cause.value, 0.0)
    for cause in (goodput.Cause.DATA, goodput.Cause.PRODUCTIVE)
  )
  return Speed(
    name=f"quickstart, {num_steps} steps: waiting for input",
    text=f"{waited / (waited + worked):.2%} of the loop time",
  )
