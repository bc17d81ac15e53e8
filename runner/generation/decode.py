"""Text generation with the newest checkpoint of a run (`--mode=decode`).

Prompts (`--prompt`):

  --prompt="def "         this text
  --prompt=@prompts.txt   the lines of that file, one prompt each
  --prompt=@@home         the text `@home`

Samples are printed and written to `decode/<step>.jsonl`, one JSON object a
line:

  {"step": 1000, "prompt": "def ", "continuation": "f(x):", "ids": [102, ...],
   "sample": 0, "seed": 0, "sampler": "Greedy()", "max_new_tokens": 256}

With `--chat` a prompt is the message of a user, or a JSON list of messages such
as [{"role": "system", "content": "Be brief."}, {"role": "user", ...}], or an
object with `messages` and fields of `inputs.tokenizers.conversation`, such as
`tools`. The model's chat template makes the prompt of it, and its reply is
printed.

A sample of the same prompt with the same settings replaces its line; others
stay.
"""

from collections.abc import Mapping, Sequence
import contextlib
import dataclasses
import json
import os
import re
from typing import Any

from etils import epath

from paxon.inputs.tokenizers import conversation
from paxon.runner import files, user_error
from paxon.runner import job as job_lib
from paxon.runner import run_dir as run_dirs
from paxon.runner.generation import decoding_state, generation_program, samples
from paxon.runner.hosts import agreement
from paxon.runner.session import restore
from paxon.runner.settings import generation

_FILE = "@"
# Two samples with the same values of these are one.
_KEY = ("prompt", "sample", "seed", "sampler", "max_new_tokens", "stop")


def run(
  job: job_lib.Job,
  run_dir: epath.Path,
  prompt: str | None,
  *,
  step: int | None = None,
  chat: bool = False,
) -> int:
  """Continues a prompt, or the job's prompts; prints and writes samples.

  Reads the checkpoint of `step`, by default the newest. With `chat` a prompt is
  a user's message, or a JSON list of messages.

  Raises:
    UserError: There is no checkpoint that fits the job, no such file of
      prompts, the job does not generate text, or a prompt is too long.
  """
  texts: list[samples.Prompt] | None = None
  if prompt is not None:
    texts = [*parse_prompts(prompt, os.environ)]
  if chat and texts is not None:
    texts = [parse_chat(str(text)) for text in texts]
  if (
    job.generation is None
    and generation_program.generation_problem(job) is None
  ):
    job = dataclasses.replace(job, generation=generation.GenerationSettings())
  with contextlib.closing(job):
    checker = samples.Checker(job)
    given = checker.settings.prompts if texts is None else texts
    for text in given:
      checker.check(text)
    session, state = restore.open_trained(job, run_dir, step=step)
    session, state = decoding_state.prepare(session, state)
    drawn = samples.draw(session, state, prompts=given)
  print(samples.to_text(drawn), flush=True)
  if counts := samples.sum_speculation(drawn):
    print(samples.describe_drafts(counts), flush=True)
  if agreement.is_first():
    path = write_samples(run_dir, drawn, step=int(state.step), job=job)
    print(f"samples: {os.fspath(path)}", flush=True)
  return 0


def parse_prompts(given: str, environ: Mapping[str, str]) -> list[str]:
  """Returns the prompts of `--prompt`, at least one.

  Raises:
    UserError: There is no such file, it is not UTF-8, or it has no line.
  """
  if not given.startswith(_FILE):
    return [given]
  name = given.removeprefix(_FILE)
  if name.startswith(_FILE):
    return [name]
  flag = f"--prompt={given}"
  if not name:
    raise user_error.UserError(
      f"{flag} names no file; write --prompt=@FILE, or --prompt=@@ for the text"
      " '@'."
    )
  path = run_dirs.resolve(name, environ)
  files.check_store(path)
  try:
    text = path.read_text(encoding="utf-8")
  except UnicodeDecodeError as error:
    raise user_error.UserError(
      f"{flag}: {os.fspath(path)} is not UTF-8 text (byte {error.start})."
    ) from error
  except OSError as error:
    raise user_error.UserError(
      f"{flag}: {os.fspath(path)} cannot be read"
      f" ({error.strerror or type(error).__name__}); for a text that begins"
      " with @ write @@."
    ) from error
  if not text:
    raise user_error.UserError(
      f"{flag}: {os.fspath(path)} is empty; write one prompt per line."
    )
  # Not `splitlines`, which also splits at characters that a prompt may have.
  return [
    line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")
  ]


def parse_chat(prompt: str) -> conversation.Conversation:
  """Returns a chat: a user's text, a JSON list of messages, or a JSON object.

  Raises:
    UserError: The JSON is not a list of messages, or has a wrong field.
  """
  key = conversation.MESSAGES
  found: Any = {key: [{"role": "user", "content": prompt}]}
  # An object that does not begin with its messages is one if it is JSON.
  is_json = re.match(r'\s*(\[\s*\{|\{\s*"messages")', prompt) is not None
  if is_json or re.match(r"\s*\{", prompt) is not None:
    try:
      parsed = json.loads(prompt)
    except (ValueError, RecursionError) as error:
      if is_json:
        raise user_error.UserError(
          f"--prompt is not JSON ({error}); write a list of messages, or the"
          " text of one."
        ) from error
      parsed = None
    if isinstance(parsed, list):
      found = {key: parsed}
    elif isinstance(parsed, dict) and key in parsed:
      found = parsed
  try:
    unused = [x for x in found if x not in (key, *conversation.CONTEXT)]
    if unused:
      raise ValueError(f"unknown fields: {', '.join(unused)}.")
    return conversation.read_prompt(found, key=key)
  except ValueError as error:
    raise user_error.UserError(f"--prompt: {error}") from error


def write_samples(
  run_dir: epath.Path,
  drawn: Sequence[samples.Sample],
  *,
  step: int,
  job: job_lib.Job,
) -> epath.Path:
  """Adds samples to the file of a checkpoint; returns its path."""
  path = run_dir / run_dirs.DECODE / f"{step}.jsonl"
  settings = job.generation
  shared = {
    "seed": job.seed,
    "sampler": (
      get_name(settings.search or settings.sampler) if settings else None
    ),
    "max_new_tokens": settings.max_new_tokens if settings else None,
    "stop": list(settings.stop) if settings else [],
  }
  lines = {_key(line): line for line in _read_samples(path)}
  for sample in drawn:
    line: dict[str, Any] = {
      "step": step,
      "prompt": sample.prompt,
      "continuation": sample.continuation,
      "ids": list(sample.ids),
      "log_probs": list(sample.log_probs),
      "finish_reason": sample.finish,
      "sample": sample.index,
      **shared,
    }
    line |= samples.describe_optional(sample)
    lines[_key(line)] = line
  text = "".join(
    f"{files.to_json(line, ensure_ascii=False)}\n" for line in lines.values()
  )
  files.write_text(path, text)
  return path


def _read_samples(path: epath.Path) -> list[dict[str, Any]]:
  def make(value: Any) -> dict[str, Any]:
    # Lines of earlier versions have one sample of each prompt.
    line = {"sample": 0, "stop": [], **files.to_object(value)}
    hash(_key(line))
    return line

  try:
    return files.read_json_lines(path, make, kind="sample")
  except FileNotFoundError:
    return []


def _key(line: dict[str, Any]) -> tuple[Any, ...]:
  return (*(line[n] for n in _KEY[:-1]), tuple(line[_KEY[-1]]))


def get_name(sampler: Any) -> str:
  """Returns the repr of a dataclass or a value, or the name of a function."""
  return getattr(sampler, "__qualname__", None) or repr(sampler)
