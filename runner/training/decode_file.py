"""Text generation for a file of prompts (`--mode=decode --decode_file`).

The file has a line for each request, see `decode_requests`. The output has, in
the order of the input, `num_samples` lines for each line: its fields and those
of `decode_requests.OUTPUT_FIELDS`.

A line without a seed has that of the job plus its number, from 1, so its draws
do not depend on the lines around it.

A window of lines is decoded at a time, in batches of similar lengths, and
stored as a part beside the output. A run that was stopped keeps the parts that
are there. At the end the parts become the output, and `OUTPUT.json` describes
it: input, settings, counts, and with references `exact_match` and `f1`, those
of SQuAD (Rajpurkar et al. 2016, https://arxiv.org/abs/1606.05250): texts in
lower case without punctuation and articles, compared as a whole and as bags of
words, the best over the references.
"""

import collections
from collections.abc import Iterator, Sequence
import contextlib
import dataclasses
import hashlib
import json
import os
import re
import string
import time
from typing import Any

from etils import epath

from paxon.layers.decoding import sampling
from paxon.runner import files, user_error
from paxon.runner import job as job_lib
from paxon.runner import run_dir as run_dirs
from paxon.runner.hosts import agreement
from paxon.runner.settings import generation
from paxon.runner.training import (
  decode,
  decode_requests,
  generation_program,
  restore,
  run_files,
  samples,
  serving,
)
from paxon.runner.training import session as session_lib

_FORMAT = "paxon decode_file 1"
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
    step: That of the checkpoint; None for the newest.
    chat: Whether a `prompt` is the message of a user.

  Raises:
    UserError: There is no such checkpoint, a line is not a request, the model
      does not generate text, or the output has another origin.
  """
  reason = generation_program.why_none(job)
  if reason is not None:
    raise user_error.UserError(
      f"--decode_file: {job.experiment} cannot generate text: {reason}."
    )
  path = run_dirs.resolve(given, os.environ)
  data = decode_requests.read(path)
  settings = job.generation or generation.GenerationSettings()
  base = _base(settings, job.seed)
  limits = decode_requests.Limits(
    chat=chat,
    has_settings=base is not None,
    max_new_tokens=settings.max_new_tokens,
  )
  requests = [*decode_requests.parse(data, path, limits)]
  job = dataclasses.replace(job, generation=settings)
  with contextlib.closing(job):
    run_files.check_tokenizer(job, run_dir)
    session = session_lib.open_session(job)
    folder = serving.checkpoints(job, run_dir)
    session, state = restore.read_for_evaluation(session, folder, step=step)
    at = int(state.step)
    target = _output(run_dir, path, at) if output is None else _at(output)
    description = {
      "format": _FORMAT,
      "input": os.fspath(path),
      "sha256": hashlib.sha256(data).hexdigest(),
      "step": at,
      "run": os.fspath(run_dir),
      "seed": job.seed,
      "settings": _describe(settings),
      "batch_size": batch_size,
      "chat": chat,
      "lines": len(requests),
    }
    writer = _Parts(target, description)
    if not writer.is_finished:
      generator = samples.Generator(session, state)
      _decode(generator, requests, base, writer, batch_size)
      writer.finish(requests, settings.num_samples)
  for line in writer.describe():
    print(line)
  return 0


def _base(
  settings: generation.GenerationSettings, seed: int
) -> sampling.Settings | None:
  """Returns settings that a line can change; None for other samplers."""
  if settings.search is not None:
    return None
  base = generation.to_settings(settings.sampler)
  if base is None:
    return None
  return dataclasses.replace(base, seed=(base.seed + seed) % 2**31)


def _describe(settings: generation.GenerationSettings) -> dict[str, str]:
  """Returns the settings as texts that are equal in each process."""
  return {
    field.name: decode.name_of(getattr(settings, field.name))
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
  writer: "_Parts",
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
  encoded = [_encode(generator, request) for request in window]
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
    )
    for n, i in enumerate(batch):
      drawn[i] = found[n * count : (n + 1) * count]
  return drawn


def _encode(
  generator: samples.Generator, request: decode_requests.Request
) -> samples.Encoded:
  try:
    return generator.encode(request.prompt)
  except user_error.UserError as error:
    raise user_error.UserError(
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
  if sample.speculation is not None:
    line["speculation"] = sample.speculation
  if sample.alternatives:
    line["alternatives"] = [list(map(list, a)) for a in sample.alternatives]
  return f"{json.dumps(line, ensure_ascii=False)}\n"


class _Parts:
  """The output, while it is made in parts.

  Attributes:
    step: That of the checkpoint.
    found: Numbers of the parts that were there.
    is_finished: Whether the whole output was there.
  """

  def __init__(self, path: epath.Path, description: dict[str, Any]) -> None:
    """Finds what an earlier command has left.

    Raises:
      UserError: There is an output of another origin.
    """
    self.step: int = description["step"]
    self._path = path
    self._about = epath.Path(f"{os.fspath(path)}.json")
    self._folder = epath.Path(f"{os.fspath(path)}.parts")
    self._description = description
    self.is_finished, found = agreement.from_first(self._open)
    self.found = frozenset(found)
    self._written = [*found]

  def _open(self) -> tuple[bool, list[int]]:
    files.check_store(self._path)
    if self._about.exists() and (self._path.exists() or self._folder.exists()):
      self._check()
      if self._path.exists():
        return True, []
    elif self._path.exists():
      raise user_error.UserError(
        f"{os.fspath(self._path)} exists; move it away, or set --decode_output."
      )
    files.write_text(self._about, json.dumps(self._description, indent=1))
    if not self._folder.exists():
      return False, []
    names = [part.name for part in self._folder.iterdir()]
    matches = [re.fullmatch(r"(\d{6})\.jsonl", name) for name in names]
    return False, sorted(int(match[1]) for match in matches if match)

  def _check(self) -> None:
    try:
      before = json.loads(self._about.read_text())
      changed = [
        name
        for name, value in self._description.items()
        if before.get(name) != value
      ]
    except (ValueError, AttributeError) as error:
      raise user_error.UserError(
        f"{os.fspath(self._about)} does not describe samples ({error}); move it"
        " away."
      ) from error
    if changed:
      name = changed[0]
      raise user_error.UserError(
        f"{os.fspath(self._path)} was begun with another {name}"
        f" ({before.get(name)!r}, now {self._description[name]!r}); move it and"
        f" {self._about.name} away, or set --decode_output."
      )

  def _part(self, number: int) -> epath.Path:
    return self._folder / f"{number:06}.jsonl"

  def write(self, number: int, text: str) -> None:
    """Writes a part."""
    self._written.append(number)
    if agreement.is_first():
      files.write_text(self._part(number), text)

  def finish(
    self, requests: Sequence[decode_requests.Request], num_samples: int
  ) -> None:
    """Joins the parts, describes the whole and removes them."""
    if not agreement.is_first():
      return
    parts = [self._part(number) for number in sorted(self._written)]
    text = "".join(part.read_text() for part in parts)
    lines = text.split("\n")[:-1]
    assert len(lines) == len(requests) * num_samples
    decoded = [json.loads(line) for line in lines]
    about = {
      **self._description,
      "samples": len(decoded),
      "tokens": sum(len(line["ids"]) for line in decoded),
      "stopped": sum(line["finish_reason"] == "stop" for line in decoded),
      **_speculation(decoded),
      **_metrics(requests, [line["continuation"] for line in decoded]),
    }
    files.write_text(self._path, text)
    files.write_text(self._about, f"{json.dumps(about, indent=1)}\n")
    self._folder.rmtree()

  def describe(self) -> Iterator[str]:
    """Yields lines about the finished output; on process 0."""
    if not agreement.is_first():
      return
    about = json.loads(self._about.read_text())
    counts = (
      f"{about['samples']:,} samples, {about['tokens']:,} tokens,"
      f" {about['stopped']:,} ended by themselves"
    )
    yield f"step {self.step}: {counts}"
    if "drafted" in about:
      yield samples.describe_drafts(about)
    if "references" in about:
      yield (
        f"exact_match {about['exact_match']:.4f}, f1 {about['f1']:.4f} over"
        f" {about['references']:,} lines with a reference"
      )
    yield f"samples: {os.fspath(self._path)}"


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
