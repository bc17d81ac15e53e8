"""Text generation for a file of prompts (`--mode=decode --decode_file`).

The file has a line for each request, see `decode_requests`. The output has, in
the order of the input, `num_samples` lines for each line: its fields and those
of `decode_requests.OUTPUT_FIELDS`.

A line without a seed has that of the job plus its number, from 1, so its draws
do not depend on the lines around it. The draws of a function as the sampler
depend on the seed of the job and the lines of its batch.

With an output `NAME.tfrecord` the lines are in `NAME.jsonl`, and the file
itself has a `tf.train.Example` for each of them.

A window of lines is decoded at a time, in batches of similar lengths, and
stored as a part beside the output. A run that was stopped keeps the parts that
are there. At the end the parts become the output, and `OUTPUT.json` describes
it: input, settings, counts, and with references `exact_match` and `f1`, those
of SQuAD (Rajpurkar et al. 2016, https://arxiv.org/abs/1606.05250): texts in
lower case without punctuation and articles, compared as a whole and as bags of
words, the best over the references.
"""

import collections
from collections.abc import Callable, Iterator, Sequence
import contextlib
import dataclasses
import hashlib
import json
import os
import re
import string
import tempfile
import time
from typing import Any

from etils import epath
import numpy as np

from paxon.layers.decoding import sampling
from paxon.runner import files, user_error
from paxon.runner import job as job_lib
from paxon.runner import run_dir as run_dirs
from paxon.runner.generation import (
  decode,
  decode_requests,
  decoding_state,
  generation_program,
  samples,
)
from paxon.runner.hosts import agreement
from paxon.runner.session import output_parts, restore
from paxon.runner.settings import generation

_FORMAT = "paxon decode_file 1"
_TF_RECORD = ".tfrecord"
# Batches whose prompts are sorted by length together.
_WINDOW = 16
# Prompts are padded to this length times a power of two.
_MIN_LENGTH = 16


def run(
  job: job_lib.Job,
  run_dir: epath.Path,
  given: str,
  *,
  output: str | None = None,
  batch_size: int = 32,
  step: int | None = None,
  chat: bool = False,
) -> int:
  """Decodes a file of prompts with a checkpoint and writes the samples.

  Args:
    job: Its settings of generation are the default of each line.
    run_dir: The directory of its run.
    given: Path of the file, JSON lines.
    output: Path of the output; None for `decode/STEP-NAME.jsonl` in the run.
    batch_size: Number of prompts that are decoded together.
    step: Step of the checkpoint; None for the newest.
    chat: Whether a `prompt` is the message of a user.

  Raises:
    UserError: There is no such checkpoint, a line is not a request, the model
      does not generate text, or the output has another origin.
  """
  file = read_file(job, given, chat=chat)
  job = dataclasses.replace(job, generation=file.settings)
  with contextlib.closing(job):
    session, state = restore.open_trained(job, run_dir, step=step)
    session, state = decoding_state.prepare(session, state)
    writer = write(
      file,
      run_dir,
      step=int(state.step),
      seed=job.seed,
      output=output,
      batch_size=batch_size,
      make_generator=lambda: samples.Generator(session, state),
    )
  for line in _describe_output(writer):
    print(line)
  return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptFile:
  """A file of prompts and how a job continues them.

  Attributes:
    path: The file.
    sha256: A hash of its content.
    requests: Its lines.
    settings: Settings of the job, or the defaults.
    base: Settings that a line can change; None for other samplers.
    chat: Whether a `prompt` is the message of a user.
  """

  path: epath.Path
  sha256: str
  requests: Sequence[decode_requests.Request]
  settings: generation.GenerationSettings
  base: sampling.Settings | None
  chat: bool


def read_file(
  job: job_lib.Job, given: str, *, chat: bool = False
) -> PromptFile:
  """Reads a file of prompts.

  Raises:
    UserError: A line is not a request, it is too long for the model, or the job
      does not generate text.
  """
  reason = generation_program.generation_problem(job)
  if reason is not None:
    raise user_error.UserError(
      f"--decode_file: {job.experiment} cannot generate text: {reason}."
    )
  path = run_dirs.resolve(given, os.environ)
  data = files.read_input(path, flag="--decode_file")
  settings = job.generation or generation.GenerationSettings()
  base = find_base(settings, job.seed)
  limits = decode_requests.Limits(
    chat=chat,
    has_settings=base is not None,
    max_new_tokens=settings.max_new_tokens,
  )
  requests = [*decode_requests.parse(data, path, limits)]
  checker = samples.Checker(dataclasses.replace(job, generation=settings))
  for request in requests:
    with _naming(request):
      checker.check(
        request.prompt, max_new_tokens=request.settings.get("max_new_tokens")
      )
  return PromptFile(
    path=path,
    sha256=hashlib.sha256(data).hexdigest(),
    requests=requests,
    settings=settings,
    base=base,
    chat=chat,
  )


def write(
  file: PromptFile,
  run_dir: epath.Path,
  *,
  step: int,
  seed: int,
  make_generator: Callable[[], samples.Generator],
  output: str | None = None,
  batch_size: int = 32,
  tf_record: bool = False,
) -> output_parts.Parts:
  """Decodes what of a file has no part yet; returns the finished output.

  Args:
    file: The prompts.
    run_dir: The directory of the run.
    step: Step of the state.
    seed: Seed of the job.
    make_generator: Returns the model; not called if nothing is left to do.
    output: Path of the output; None for `decode/STEP-NAME.jsonl` in the run.
    batch_size: Number of prompts that are decoded together.
    tf_record: Whether to write the output as TFRecord, too; so it is if
      `output` ends with `.tfrecord`.

  Raises:
    UserError: The output has another origin.
  """
  target = _output(run_dir, file.path, step) if output is None else _at(output)
  if target.suffix == _TF_RECORD:
    target, tf_record = target.with_suffix(".jsonl"), True
  description = {
    "format": _FORMAT,
    "input": os.fspath(file.path),
    "sha256": file.sha256,
    "step": step,
    "run": os.fspath(run_dir),
    "seed": seed,
    "settings": _describe(file.settings),
    "batch_size": batch_size,
    "chat": file.chat,
    "lines": len(file.requests),
  }
  writer = output_parts.Parts(
    target, description, advice=", or set --decode_output"
  )
  if not writer.is_finished:
    _decode(make_generator(), file.requests, file.base, writer, batch_size)
    writer.finish(
      lambda text: _summarize(text, file.requests, file.settings.num_samples)
    )
  if tf_record and agreement.is_first():
    _write_tf_record(writer.path)
  return writer


def _write_tf_record(path: epath.Path) -> None:
  """Writes the lines of an output as a TFRecord file with its name.

  Numbers, texts and lists of numbers are features; other fields, such as
  messages, are JSON texts.
  """
  # The runner needs no protobuf otherwise.
  from paxon.inputs.tf_records import tf_example, tf_record_files

  def to_feature(value: Any) -> np.ndarray:
    values = value if isinstance(value, list) else [value]
    if values and all(isinstance(x, int | float) for x in values):
      is_real = any(isinstance(x, float) for x in values)
      return np.asarray(values, np.float32 if is_real else np.int64)
    text = value if isinstance(value, str) else json.dumps(value)
    return np.asarray([text.encode()], object)

  text = files.read_text(path, max_bytes=files.MAX_LINES_BYTES)
  records = [
    tf_example.serialize(
      {k: to_feature(x) for k, x in json.loads(line).items()}
    )
    for line in text.split("\n")[:-1]
  ]
  # Written here first: a store takes a file as a whole.
  with tempfile.TemporaryDirectory() as folder:
    local = os.path.join(folder, "records")
    tf_record_files.write(local, records)
    epath.Path(local).copy(path.with_suffix(_TF_RECORD), overwrite=True)


def find_base(
  settings: generation.GenerationSettings, seed: int
) -> sampling.Settings | None:
  """Returns settings that a prompt can change; None for other samplers."""
  if settings.search is not None:
    return None
  base = generation.to_settings(settings.sampler)
  if base is None:
    return None
  return dataclasses.replace(base, seed=(base.seed + seed) % 2**31)


def _describe(settings: generation.GenerationSettings) -> dict[str, str]:
  """Returns the settings as texts that are equal in each process."""
  return {
    field.name: decode.get_name(getattr(settings, field.name))
    for field in dataclasses.fields(settings)
    if field.name not in ("prompts", "chat_template")
  }


def _at(given: str) -> epath.Path:
  return run_dirs.resolve(given, os.environ)


def _output(run_dir: epath.Path, path: epath.Path, step: int) -> epath.Path:
  return run_dir / run_dirs.DECODE / f"{step}-{path.stem}.jsonl"


def _decode(
  generator: samples.Generator,
  requests: Sequence[decode_requests.Request],
  base: sampling.Settings | None,
  writer: output_parts.Parts,
  batch_size: int,
) -> None:
  """Decodes the windows that have no part yet."""
  size = batch_size * _WINDOW
  for number, first in enumerate(range(0, len(requests), size)):
    if number in writer.found:
      continue
    start = time.monotonic()
    window = requests[first : first + size]
    drawn = _decode_window(generator, window, base, batch_size)
    lines = [
      _line(request, sample, writer.step)
      for request, group in zip(window, drawn, strict=True)
      for sample in group
    ]
    writer.write(number, "".join(lines))
    tokens = sum(len(sample.ids) for group in drawn for sample in group)
    rate = tokens / (time.monotonic() - start)
    done = first + len(window)
    if agreement.is_first():
      print(
        f"decoded {done:,} of {len(requests):,} lines, {rate:,.0f} tokens/s",
        flush=True,
      )


def _decode_window(
  generator: samples.Generator,
  window: Sequence[decode_requests.Request],
  base: sampling.Settings | None,
  batch_size: int,
) -> list[list[samples.Sample]]:
  """Returns the samples of each request."""
  encoded = [generator.encode(request.prompt) for request in window]
  count = generator.settings.num_samples
  drawn: list[list[samples.Sample]] = [[] for _ in window]
  order = sorted(range(len(window)), key=lambda i: (len(encoded[i].ids), i))
  for first in range(0, len(order), batch_size):
    batch = order[first : first + batch_size]
    each = None
    if base is not None:
      each = [_settings(base, window[i]) for i in batch]
    found = generator.draw(
      [encoded[i] for i in batch],
      each=each,
      length=_round_up(len(encoded[batch[-1]].ids)),
      batch_size=batch_size,
      stream=0 if base is not None else window[batch[0]].number,
    )
    for n, i in enumerate(batch):
      drawn[i] = found[n * count : (n + 1) * count]
  return drawn


@contextlib.contextmanager
def _naming(request: decode_requests.Request) -> Iterator[None]:
  """Adds the number of the line to an error."""
  try:
    yield
  except user_error.UserError as error:
    raise type(error)(
      f"--decode_file, line {request.number}: {error}"
    ) from error


def _settings(
  base: sampling.Settings, request: decode_requests.Request
) -> sampling.Settings:
  seed = (base.seed + request.number) % 2**31
  fields: dict[str, Any] = {"seed": seed, **request.settings}
  return dataclasses.replace(base, **fields)


def _round_up(length: int) -> int:
  """Returns a length that many batches share, since each compiles once."""
  rounded = _MIN_LENGTH
  while rounded < length:
    rounded *= 2
  return rounded


def _line(
  request: decode_requests.Request, sample: samples.Sample, step: int
) -> str:
  line = {
    **request.fields,
    "step": step,
    "line": request.number,
    "sample": sample.index,
    "continuation": sample.continuation,
    "ids": list(sample.ids),
    "log_probs": list(sample.log_probs),
    "finish_reason": sample.finish,
  }
  line |= samples.describe_optional(sample)
  return f"{files.to_json(line, ensure_ascii=False)}\n"


def _summarize(
  text: str, requests: Sequence[decode_requests.Request], num_samples: int
) -> dict[str, Any]:
  """Returns counts and metrics of the whole output."""
  lines = text.split("\n")[:-1]
  assert len(lines) == len(requests) * num_samples
  decoded = [json.loads(line) for line in lines]
  return {
    "samples": len(decoded),
    "tokens": sum(len(line["ids"]) for line in decoded),
    "stopped": sum(line["finish_reason"] == "stop" for line in decoded),
    **_speculation(decoded),
    **_metrics(requests, [line["continuation"] for line in decoded]),
  }


def _describe_output(writer: output_parts.Parts) -> Iterator[str]:
  """Yields lines about the finished output; on process 0."""
  if not agreement.is_first():
    return
  about = writer.read_about()
  counts = (
    f"{about['samples']:,} samples, {about['tokens']:,} tokens,"
    f" {about['stopped']:,} ended by themselves"
  )
  yield f"step {writer.step}: {counts}"
  if "drafted" in about:
    yield samples.describe_drafts(about)
  if "references" in about:
    yield (
      f"exact_match {about['exact_match']:.4f}, f1 {about['f1']:.4f} over"
      f" {about['references']:,} lines with a reference"
    )
  yield f"samples: {os.fspath(writer.path)}"


def _speculation(lines: Sequence[dict[str, Any]]) -> dict[str, int]:
  """Returns sums over samples of which tokens were drafted."""
  found = [line["speculation"] for line in lines if "speculation" in line]
  names = found[0] if found else ()
  return {name: sum(each[name] for each in found) for name in names}


def _metrics(
  requests: Sequence[decode_requests.Request], texts: Sequence[str]
) -> dict[str, Any]:
  """Returns means over the samples of lines with a reference."""
  count = len(texts) // len(requests)
  exact, f1 = [], []
  for text, request in zip(
    texts, (r for r in requests for _ in range(count)), strict=True
  ):
    if wanted := request.references:
      exact.append(max(_normalize(text) == _normalize(r) for r in wanted))
      f1.append(max(word_f1(text, r) for r in wanted))
  if not exact:
    return {}
  return {
    "references": len(exact) // count,
    "exact_match": sum(exact) / len(exact),
    "f1": sum(f1) / len(f1),
  }


def word_f1(text: str, reference: str) -> float:
  """Returns SQuAD's F1 of the words of two texts, from 0 to 1."""
  got, wanted = _normalize(text).split(), _normalize(reference).split()
  if not got or not wanted:
    return float(got == wanted)
  shared = (collections.Counter(got) & collections.Counter(wanted)).total()
  return 2 * shared / (len(got) + len(wanted))


_PUNCTUATION = str.maketrans("", "", string.punctuation)


def _normalize(text: str) -> str:
  text = text.lower().translate(_PUNCTUATION)
  return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())
