"""How many tokens a second each source gives, alone, on one core.

The text is that of Python's library, 4 MB of it, cut into documents of 200 to
3,000 bytes; tokens are bytes, but for SentencePiece. Each case reads shuffled,
packed batches of 8 rows of 1,024 in one process that is bound to one core,
without workers and without a model. Text is tokenized as it is read; token
files and arrays hold tokens. Of gzip up to a megabyte is unpacked for one
document, and a task of SeqIO runs its steps for one record at a time: to read
such a corpus more than once, make a token file of it. Tokenizing is the work of
`tools/tokenize` with one worker, in megabytes of text. The last row is a run of
the quickstart on all cores: for how much of its loop's time there was no batch.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import io
import os
import pathlib
import tempfile
import time

from etils import epath
import fiddle as fdl
import numpy as np

from paxon.inputs import (
  corpus_shards,
  corpus_tokenizer,
  example_source,
  missing_library,
  packing_plan,
)
from paxon.runner import run_dir as run_dirs
from paxon.runner.configuration import find_experiment
from paxon.runner.monitoring import goodput
from paxon.runner.training import train
from paxon.tools.benchmarks import input_cases, input_library_cases

_BYTES = 4_000_000
_STEPS = 150
_FAR = 10_000_000
_QUICKSTART = "tasks.lm.params.quickstart.PythonStdlibLm"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Speed:
  """What was measured.

  Attributes:
    name: Of the case.
    text: The figure with its unit, or why there is none.
    filled: The share of places that hold a token; None for no rows.
  """

  name: str
  text: str
  filled: float | None = None


def measure(
  *, num_bytes: int = _BYTES, seconds: float = 1.5, num_steps: int = _STEPS
) -> list[Speed]:
  """Measures every case.

  Args:
    num_bytes: How much text there is.
    seconds: How long each case reads.
    num_steps: How long the quickstart trains; 0 leaves it out.
  """
  texts = input_cases.texts(num_bytes)
  with tempfile.TemporaryDirectory() as name:
    folder = pathlib.Path(name)
    with _one_core():
      cases = input_cases.make(texts, folder)
      cases |= input_library_cases.make(texts, folder)
      speeds = [_speed(case, make, seconds) for case, make in cases.items()]
      speeds += _tokenizing(texts, folder)
      speeds.append(_going_on())
    if num_steps:
      speeds.append(_waiting(folder / "run", num_steps))
  return speeds


def to_markdown(
  speeds: Sequence[Speed], *, environment: Mapping[str, str], command: str
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
    lines.append(f"| {speed.name} | {speed.text} | {filled} |")
  return "\n".join(lines) + "\n"


@contextlib.contextmanager
def _one_core() -> Iterator[None]:
  """Binds this thread, and those that it starts, to one core, if it can."""
  if not hasattr(os, "sched_setaffinity"):
    yield
    return
  before = os.sched_getaffinity(0)
  os.sched_setaffinity(0, {max(before)})
  try:
    yield
  finally:
    os.sched_setaffinity(0, before)


def _speed(name: str, make: input_cases.Make, seconds: float) -> Speed:
  """Reads an input for a while."""
  try:
    source = make()
    source.get_next()  # Opens what must be opened.
  except missing_library.MissingLibraryError as error:
    return Speed(name=name, text=f"not measured: {error}")
  tokens = places = 0
  begin = time.perf_counter()
  while (spent := time.perf_counter() - begin) < seconds or not places:
    weights = source.get_next()["weights"]
    tokens += int(np.count_nonzero(weights))
    places += weights.size
  return Speed(
    name=name,
    text=f"{tokens / spent / 1e6:,.2f} M tokens/s",
    filled=tokens / places,
  )


def _tokenizing(texts: Sequence[bytes], folder: pathlib.Path) -> list[Speed]:
  """Times the making of token files, by bytes of text."""
  lines = folder / "lines.txt"
  lines.write_bytes(b"\n".join(text.replace(b"\n", b" ") for text in texts))
  json_lines = folder / "a.jsonl"
  plain, as_json = corpus_shards.Form.LINE, corpus_shards.Form.JSON_LINE

  def of(
    path: pathlib.Path, form: corpus_shards.Form
  ) -> Callable[[], corpus_tokenizer.Corpus]:
    return lambda: input_cases.corpus(path, form=form)

  def of_pieces() -> corpus_tokenizer.Corpus:
    pieces = input_library_cases.sentence_pieces(texts, folder)
    pieces.encode("what must be opened")
    return input_cases.corpus(lines, pieces, plain)

  cases = {
    "tokenizing lines, bytes": of(lines, plain),
    "tokenizing JSON lines, bytes": of(json_lines, as_json),
    "tokenizing lines, SentencePiece of 4,096": of_pieces,
  }
  return [
    _tokenizing_speed(name, make, folder / f"timed{number}")
    for number, (name, make) in enumerate(cases.items())
  ]


def _tokenizing_speed(
  name: str, make: Callable[[], corpus_tokenizer.Corpus], out: pathlib.Path
) -> Speed:
  try:
    corpus = make()
  except missing_library.MissingLibraryError as error:
    return Speed(name=name, text=f"not measured: {error}")
  begin = time.perf_counter()
  corpus_tokenizer.run(corpus, str(out), num_workers=0)
  spent = time.perf_counter() - begin
  size = sum(os.path.getsize(path) for path in corpus.paths)
  return Speed(name=name, text=f"{size / spent / 1e6:,.1f} MB/s")


class _Numbers:
  """A billion examples that cost nothing."""

  def __len__(self) -> int:
    return 10**9

  def __getitem__(self, index: int, /) -> example_source.Example:
    return example_source.lm_features(np.full(500, index, np.int32))


def _going_on() -> Speed:
  """Times the first batch of a run that goes on far in a shuffled epoch."""
  stream = input_cases.of_examples(_Numbers())
  source = input_cases.packed(stream, packing_plan.Packing.BEST_FIT)
  state = source.get_state() | {"position": _FAR}
  begin = time.perf_counter()
  source.set_state(state)
  source.get_next()
  spent = time.perf_counter() - begin
  return Speed(
    name=f"going on at example {_FAR:,}, with a batch",
    text=f"{1e3 * spent:,.1f} ms",
  )


def _waiting(folder: pathlib.Path, num_steps: int) -> Speed:
  """Trains the quickstart for some steps; returns how it waited for data."""
  # By its name: the experiments are in the checkout, and nobody's edge.
  kind = find_experiment.find_experiment(_QUICKSTART)
  experiment = kind().replace(
    num_train_steps=num_steps,
    checkpoint_every_steps=num_steps,
    eval_every_steps=num_steps,
  )
  config = experiment.job()
  job = fdl.build(config)
  job = dataclasses.replace(
    job, baselines=None, generation=None, eval_inputs={}
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
    text=f"{waited / (waited + worked):.2%} of the loop's time",
  )
