"""Requests of `--decode_file`: JSON lines of prompts, checked.

A line is a JSON object:

  {"prompt": "2 + 2 =", "reference": "4", "id": "q17"}
  {"messages": [{"role": "user", "content": "What is 2 + 2?"}],
   "settings": {"temperature": 0.7, "seed": 3}}

It has `prompt`, a text, or a chat: `messages`, or a list of them as `prompt`.
A chat may have fields of `inputs.tokenizers.conversation`, such as `tools` and
`system`. `settings` replaces fields of
`sampling.Settings` for its line; `reference` is the expected text, or a list of
texts of which any is right; all other fields are copied to the output.
"""

from collections.abc import Iterator
import dataclasses
import json
import os
from typing import Any

from etils import epath

from paxon.inputs.tokenizers import conversation
from paxon.layers.decoding import sampling
from paxon.runner import user_error
from paxon.runner.generation import samples
from paxon.sharding import suggestions

OUTPUT_FIELDS = (
  "step",
  "line",
  "sample",
  "continuation",
  "ids",
  "log_probs",
  "finish_reason",
  "alternatives",
  "speculation",
  "suffix_log_probs",
)
_INTEGERS = ("top_k", "min_new_tokens", "max_new_tokens", "seed")
# Arrays of biases would be as large as the logits; one way to count suffices.
_NOT_HERE = ("logit_bias", "global_normalize")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
  """A line of the file.

  Attributes:
    number: Number of the line, from 1.
    prompt: A text, or a chat.
    fields: All fields of the line.
    settings: Settings that replace the job's.
    references: Expected texts.
  """

  number: int
  prompt: samples.Prompt
  fields: dict[str, Any]
  settings: dict[str, Any]
  references: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
  """Limits of a line.

  Attributes:
    chat: Whether a `prompt` is the message of a user.
    has_settings: Whether `settings` are possible.
    max_new_tokens: The job's limit, for which the cache is made.
  """

  chat: bool
  has_settings: bool
  max_new_tokens: int


def parse(data: bytes, path: epath.Path, limits: Limits) -> Iterator[Request]:
  """Yields the requests of a file.

  Raises:
    UserError: The first mistake, with its line from 1.
  """
  is_empty = True
  for number, line in enumerate(data.split(b"\n"), start=1):
    if not line.strip():
      continue
    where = f"--decode_file={os.fspath(path)}, line {number}:"
    try:
      fields = json.loads(line.decode(), parse_constant=_reject_constant)
    except (ValueError, RecursionError) as error:
      raise user_error.UserError(f"{where} not JSON ({error}).") from error
    try:
      yield _request(number, fields, limits)
    except (ValueError, TypeError) as error:
      raise user_error.UserError(f"{where} {error}") from error
    is_empty = False
  if is_empty:
    raise user_error.UserError(
      f"--decode_file={os.fspath(path)} has no line; write one JSON object a"
      ' line, such as {"prompt": "2 + 2 ="}.'
    )


def _reject_constant(name: str) -> None:
  raise ValueError(f"{name} is no JSON number")


def _request(number: int, fields: Any, limits: Limits) -> Request:
  """Returns a request.

  Raises:
    ValueError: A field is not valid.
  """
  if not isinstance(fields, dict):
    raise ValueError(f"a line must be a JSON object, got {fields!r}.")
  if ("prompt" in fields) == ("messages" in fields):
    raise ValueError("a line needs either 'prompt' or 'messages'.")
  for name in OUTPUT_FIELDS:
    if name in fields:
      raise ValueError(f"{name!r} is a field of the output; rename it.")
  prompt = fields.get("prompt")
  if "messages" in fields:
    prompt = conversation.read_prompt(fields, key=conversation.MESSAGES)
  elif not isinstance(prompt, str | list):
    raise ValueError(
      f"'prompt' must be a text, got {prompt!r}; or a list of messages."
    )
  elif limits.chat or not isinstance(prompt, str):
    prompt = conversation.read_prompt(fields)
  else:
    for name in conversation.CONTEXT:
      if fields.get(name):
        raise ValueError(f"{name!r} requires a chat: 'messages', or --chat.")
  references = fields.get("reference", [])
  if isinstance(references, str):
    references = [references]
  if not isinstance(references, list) or not all(
    isinstance(text, str) for text in references
  ):
    raise ValueError(
      f"'reference' must be a text or a list of texts, got {references!r}."
    )
  given = _parse_settings(fields.get("settings", {}), limits)
  return Request(
    number=number,
    prompt=prompt,
    fields=fields,
    settings=given,
    references=tuple(references),
  )


def _parse_settings(given: Any, limits: Limits) -> dict[str, Any]:
  """Returns fields of `sampling.Settings`.

  Raises:
    ValueError: A value is not valid.
  """
  if not isinstance(given, dict):
    raise ValueError(f"'settings' must be an object, got {given!r}.")
  if given and not limits.has_settings:
    raise ValueError(
      "'settings' is not possible with a search or a sampler of your own."
    )
  fields = dataclasses.fields(sampling.Settings)
  known = [field.name for field in fields if field.name not in _NOT_HERE]
  for name, value in given.items():
    if name not in known:
      raise ValueError(
        f"unknown setting {name!r}{suggestions.suggest(name, known)}"
      )
    kinds = int if name in _INTEGERS else int | float
    if isinstance(value, bool) or not isinstance(value, kinds):
      kind = "an integer" if name in _INTEGERS else "a number"
      raise ValueError(f"setting {name!r} must be {kind}, got {value!r}.")
  settings: dict[str, Any] = {
    name: value if name in _INTEGERS else float(value)
    for name, value in given.items()
  }
  try:
    sampling.Settings(**settings)
  except ValueError as error:
    raise ValueError(str(error).removeprefix("Settings.")) from error
  if settings.get("max_new_tokens", 0) > limits.max_new_tokens:
    raise ValueError(
      f"setting 'max_new_tokens' must be at most {limits.max_new_tokens}, that"
      f" of the job, got {settings['max_new_tokens']}."
    )
  return settings
