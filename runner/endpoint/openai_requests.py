"""Requests of OpenAI's protocol: JSON bodies, checked.

`/v1/completions` and `/v1/chat/completions`. All values are checked before
anything is generated; `RequestError` has the status and the fields of OpenAI's
errors. A field that is not known is an error, too.

Fields besides OpenAI's, as in vLLM: `top_k`, `min_p`, `repetition_penalty`,
`min_tokens`, `structured_outputs`, `documents` and `chat_template_kwargs`.
"""

import collections
from collections.abc import Callable, Mapping, Sequence
import dataclasses
import json
import re
import secrets
from typing import Any

from paxon.inputs.tokenizers import conversation
from paxon.layers.decoding import sampling
from paxon.sharding import suggestions

_INVALID = "invalid_request_error"
# Largest number of choices of one request.
_MAX_CHOICES = 128
_MAX_STOPS = 16
_MAX_STOP_LENGTH = 256
# OpenAI's default for completions, if it fits; a chat may fill the cache.
_DEFAULT_MAX_TOKENS = 16
_MAX_INTEGER = 2**31 - 1
# Beyond these the logits would not be finite in float32, or all be equal.
_PENALTIES = 0.01, 100
# A lower temperature selects the most likely id: logits divided by it could
# overflow. vLLM has the same limit.
_MIN_TEMPERATURE = 1e-5
# Characters of a request that an error repeats.
_MAX_NAME = 64
_MAX_MESSAGE = 1000

_SHARED = (
  "model",
  "frequency_penalty",
  "logit_bias",
  "logprobs",
  "max_tokens",
  "min_p",
  "min_tokens",
  "n",
  "presence_penalty",
  "repetition_penalty",
  "seed",
  "stop",
  "stream",
  "stream_options",
  "structured_outputs",
  "temperature",
  "top_k",
  "top_p",
  "user",
)
_COMPLETION = (*_SHARED, "best_of", "echo", "prompt", "suffix")
# Those that make the prompt of a chat.
_OF_TEMPLATE = ("messages", "tools", "documents", "chat_template_kwargs")
_CHAT = (
  *_SHARED,
  *_OF_TEMPLATE,
  "max_completion_tokens",
  "response_format",
  "tool_choice",
  "top_logprobs",
)


class RequestError(Exception):
  """A request that cannot be answered.

  Attributes:
    status: HTTP status.
    param: The field that is wrong, if it is one.
    code: A short name of the error, if OpenAI has one.
    type: OpenAI's class of errors.
  """

  def __init__(
    self,
    message: str,
    *,
    status: int = 400,
    param: str | None = None,
    code: str | None = None,
    kind: str = _INVALID,
  ) -> None:
    """Records what is wrong; text of the request may have any length."""
    super().__init__(_shorten(message, _MAX_MESSAGE))
    self.status, self.code, self.type = status, code, kind
    self.param = None if param is None else _shorten(param, _MAX_NAME)

  def body(self) -> dict[str, Any]:
    """Returns the JSON of the response."""
    return {
      "error": {
        "message": str(self),
        "type": self.type,
        "param": self.param,
        "code": self.code,
      }
    }


def _shorten(text: str, length: int) -> str:
  """Returns text that UTF-8 can encode, cut to a length."""
  text = text.encode(errors="backslashreplace").decode()
  return text if len(text) <= length else f"{text[:length]}..."


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompt:
  """A prompt as ids, at least one.

  Attributes:
    ids: The ids.
    is_chat: Whether it is a chat, which the completion does not continue.
  """

  ids: Sequence[int]
  is_chat: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completion:
  """A request.

  Attributes:
    is_chat: Whether it is that of a chat.
    prompts: The prompts, one for a chat.
    n: Number of choices of each prompt.
    settings: Settings of all choices.
    max_tokens: Number of new tokens of each prompt.
    stops: Texts that end a choice.
    logprobs: Number of alternatives of each token; None without probabilities.
    stream: Whether tokens are sent as they are generated.
    include_usage: Whether a stream ends with the number of tokens.
    grammar: The grammar of all choices; None without one.
  """

  is_chat: bool
  prompts: tuple[Prompt, ...]
  n: int
  settings: sampling.Settings
  max_tokens: tuple[int, ...]
  stops: tuple[str, ...]
  logprobs: int | None
  stream: bool
  include_usage: bool
  grammar: "Grammar | None" = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grammar:
  """A grammar that is not compiled.

  Attributes:
    field: The field that has it.
    kind: See `grammars.Grammars.compile`.
    source: See there.
  """

  field: str
  kind: str
  source: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Served:
  """The model as requests see it.

  Attributes:
    name: Its name.
    context: Maximum number of tokens of a prompt and its completion.
    max_logprobs: Maximum number of alternatives of a token.
    max_choices: Maximum number of choices of a request, of all its prompts.
    max_n: Maximum number of choices of a prompt.
    vocab_size: Exclusive upper bound of the ids in `logit_bias`.
    encode: Returns the ids of a text, or of a chat; raises ValueError.
    check: Raises ValueError if the model cannot continue ids by a number of
      tokens.
  """

  name: str
  context: int
  max_logprobs: int
  vocab_size: int
  encode: Callable[[str | conversation.Conversation], list[int]]
  check: Callable[[Sequence[int], int], None] = lambda ids, count: None
  max_choices: int = _MAX_CHOICES
  max_n: int = _MAX_CHOICES


def parse(body: bytes, served: Served, *, is_chat: bool) -> Completion:
  """Returns the request of a body.

  Raises:
    RequestError: A value is not valid.
  """
  fields = _Fields(_read_json(body), _CHAT if is_chat else _COMPLETION)
  model = fields.get("model", str, required=True)
  if model != served.name:
    raise RequestError(
      f"The model {model!r} does not exist; it is {served.name!r}.",
      status=404,
      param="model",
      code="model_not_found",
    )
  fields.get("user", str)
  n = fields.integer("n", 1, _MAX_CHOICES, default=1)
  if n > served.max_n:
    fields.fail("n", f"must be at most {served.max_n}, the number of slots")
  if is_chat:
    prompts = (_chat_prompt(fields, served),)
  else:
    prompts = _text_prompts(fields, served, most=served.max_choices // n)
    for name, only in (("echo", False), ("suffix", "")):
      if fields.get(name, type(only), default=only) != only:
        fields.fail(name, "is not supported")
  if not is_chat and fields.integer("best_of", 1, n, default=n) != n:
    fields.fail("best_of", f"must equal n ({n})")
  stream = fields.get("stream", bool, default=False)
  options = fields.get("stream_options", dict, default={})
  if options and not stream:
    fields.fail("stream_options", "requires stream")
  if options.keys() - {"include_usage"}:
    fields.fail("stream_options", "may only have include_usage")
  if not isinstance(options.get("include_usage", False), bool):
    fields.fail("stream_options", "must have a boolean include_usage")
  max_tokens = tuple(_max_tokens(fields, p, served, is_chat) for p in prompts)
  settings = _settings(fields, min(max_tokens), served.vocab_size)
  grammar = _grammar(fields)
  if grammar is not None and settings.min_new_tokens:
    fields.fail("min_tokens", "must be 0 with a grammar")
  return Completion(
    is_chat=is_chat,
    prompts=prompts,
    n=n,
    settings=settings,
    max_tokens=max_tokens,
    stops=_stops(fields),
    logprobs=_logprobs(fields, served, is_chat),
    stream=stream,
    include_usage=options.get("include_usage", False),
    grammar=grammar,
  )


class _Fields:
  """The fields of a body; null counts as missing."""

  def __init__(self, body: Mapping[str, Any], known: Sequence[str]) -> None:
    for name in body:
      if name not in known:
        short = _shorten(name, _MAX_NAME)
        raise RequestError(
          f"Unrecognized request argument {short!r}"
          f"{suggestions.suggest(short, known)}",
          param=name,
        )
    self._body = {k: v for k, v in body.items() if v is not None}

  def __contains__(self, name: str) -> bool:
    return name in self._body

  def fail(self, name: str, required: str) -> None:
    """Raises the error of a field."""
    raise RequestError(f"{name!r} {required}.", param=name)

  def get(
    self,
    name: str,
    *kinds: type,
    default: Any = None,
    required: bool = False,
  ) -> Any:
    """Returns the value of one of some types."""
    if name not in self._body:
      if required:
        self.fail(name, "is missing")
      return default
    value = self._body[name]
    is_wrong_bool = isinstance(value, bool) and bool not in kinds
    if is_wrong_bool or not isinstance(value, kinds):
      names = {str: "a string", int: "an integer", float: "a number"}
      names |= {bool: "a boolean", dict: "an object", list: "a list"}
      self.fail(name, f"must be {' or '.join(names[kind] for kind in kinds)}")
    if isinstance(value, str):
      _check_text(value, name)
    return value

  def integer(self, name: str, low: int, high: int, *, default: Any) -> Any:
    """Returns an integer of an interval."""
    value = self.get(name, int, default=default)
    if value is not None and not low <= value <= high:
      self.fail(name, f"must be from {low} to {high}")
    return value

  def number(
    self,
    name: str,
    low: int | float,
    high: int | float,
    *,
    default: int | float,
  ) -> float:
    """Returns a number of an interval."""
    value = self.get(name, int, float, default=default)
    if not low <= value <= high:
      self.fail(name, f"must be from {low:g} to {high:g}")
    return float(value)


def _read_json(body: bytes) -> dict[str, Any]:
  def reject(name: str) -> None:
    raise ValueError(f"{name} is not JSON")

  def to_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
      counts = collections.Counter(name for name, _ in pairs)
      twice = counts.most_common(1)[0][0]
      raise ValueError(f"the name {_shorten(twice, _MAX_NAME)!r} occurs twice")
    return found

  try:
    found = json.loads(
      body.decode(), parse_constant=reject, object_pairs_hook=to_dict
    )
  except (ValueError, RecursionError) as error:
    raise RequestError(f"The body is not valid JSON: {error}.") from error
  if not isinstance(found, dict):
    raise RequestError("The body must be a JSON object.")
  return found


def _check_text(text: str, name: str) -> None:
  try:
    text.encode()
  except UnicodeEncodeError as error:
    raise RequestError(
      f"{name!r} is not valid Unicode (character {error.start}).", param=name
    ) from error


def _text_prompts(
  fields: _Fields, served: Served, *, most: int
) -> tuple[Prompt, ...]:
  """Returns the prompts, at most a number."""
  given = fields.get("prompt", str, list, required=True)
  if isinstance(given, str) or (given and _is_integer(given[0])):
    given = [given]
  if not given:
    fields.fail("prompt", "must not be empty")
  if len(given) > most:
    fields.fail(
      "prompt",
      f"has {len(given)} prompts; there can be {most} at once (with n, at most"
      f" {served.max_choices} choices)",
    )
  found = []
  for prompt in given:
    if isinstance(prompt, str):
      _check_text(prompt, "prompt")
      ids = _encode(served, prompt, "prompt")
    elif isinstance(prompt, list) and prompt and all(map(_is_integer, prompt)):
      ids = prompt
      if min(ids) < 0 or max(ids) > _MAX_INTEGER:
        fields.fail("prompt", f"must have ids from 0 to {_MAX_INTEGER}")
    else:
      fields.fail(
        "prompt", "must be a string, a list of strings, or lists of token ids"
      )
      raise AssertionError
    found.append(Prompt(ids=ids))
  return tuple(found)


def _chat_prompt(fields: _Fields, served: Served) -> Prompt:
  if not fields.get("messages", list, required=True):
    fields.fail("messages", "must not be empty")
  kinds = {"chat_template_kwargs": dict}
  record = {
    name: fields.get(name, kinds.get(name, list)) for name in _OF_TEMPLATE
  }
  # The model is free to call a tool; a call is text.
  if "tool_choice" in fields and fields.get("tool_choice", str) != "auto":
    fields.fail("tool_choice", "must be 'auto'")
  try:
    _check_text(json.dumps(record, ensure_ascii=False), "messages")
    found = conversation.read_prompt(record, key="messages")
  except (ValueError, RecursionError) as error:
    names = (n for n in _OF_TEMPLATE if str(error).startswith(repr(n)))
    param = next(names, "messages")
    raise RequestError(str(error), param=param) from error
  return Prompt(ids=_encode(served, found, "messages"), is_chat=True)


def _encode(served: Served, given: Any, name: str) -> list[int]:
  try:
    return served.encode(given)
  except (ValueError, TypeError, RecursionError) as error:
    raise RequestError(str(error), param=name) from error


def _is_integer(value: Any) -> bool:
  return isinstance(value, int) and not isinstance(value, bool)


def _max_tokens(
  fields: _Fields, prompt: Prompt, served: Served, is_chat: bool
) -> int:
  """Returns the number of new tokens of a prompt."""
  size, names = len(prompt.ids), ["max_tokens"]
  if is_chat:
    names.append("max_completion_tokens")
  given = [
    value
    for name in names
    if (value := fields.integer(name, 1, _MAX_INTEGER, default=None))
  ]
  count = min(given, default=None)
  if count is None:
    count = max(1, served.context - size)
    count = count if is_chat else min(count, _DEFAULT_MAX_TOKENS)
  if size + count > served.context:
    what = "messages" if is_chat else "prompt"
    raise RequestError(
      f"This model's maximum context length is {served.context} tokens."
      f" However, you requested {size + count} tokens ({size} in the {what},"
      f" {count} in the completion). Please reduce the length of the {what} or"
      " completion.",
      param="messages" if is_chat else "prompt",
      code="context_length_exceeded",
    )
  try:
    served.check(prompt.ids, count)
  except ValueError as error:
    name = "messages" if is_chat else "prompt"
    raise RequestError(str(error), param=name) from error
  return count


def _settings(
  fields: _Fields, max_tokens: int, vocab_size: int
) -> sampling.Settings:
  bias = {}
  for key, value in fields.get("logit_bias", dict, default={}).items():
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    is_id = re.fullmatch("0|[1-9][0-9]{0,9}", key) is not None
    if not is_id or not is_number or not -100 <= value <= 100:
      fields.fail("logit_bias", "must map token ids to numbers of -100 to 100")
    if int(key) >= vocab_size:
      required = f"must have ids from 0 to {vocab_size - 1}, got {key}"
      fields.fail("logit_bias", required)
    bias[int(key)] = float(value)
  top_k = fields.integer("top_k", -1, _MAX_INTEGER, default=None)
  top_p = fields.number("top_p", 0, 1, default=1)
  seed = fields.get("seed", int)
  temperature = fields.number("temperature", 0, 2, default=1)
  return sampling.Settings(
    temperature=temperature if temperature >= _MIN_TEMPERATURE else 0.0,
    # vLLM writes -1 or 0 for all ids.
    top_k=top_k if top_k is not None and top_k > 0 else None,
    # At 0 only the most likely id is left.
    top_p=max(top_p, 1e-9),
    min_p=fields.number("min_p", 0, 1, default=0),
    repetition_penalty=fields.number(
      "repetition_penalty", *_PENALTIES, default=1
    ),
    presence_penalty=fields.number("presence_penalty", -2, 2, default=0),
    frequency_penalty=fields.number("frequency_penalty", -2, 2, default=0),
    logit_bias=bias,
    min_new_tokens=fields.integer("min_tokens", 0, max_tokens, default=0),
    seed=(
      secrets.randbelow(_MAX_INTEGER) if seed is None else seed & _MAX_INTEGER
    ),
  )


def _grammar(fields: _Fields) -> Grammar | None:
  name = "response_format"
  given = fields.get(name, dict, default={})
  wanted: Any = given.get("type", "text")
  found: Grammar | None = None
  if wanted == "json_object":
    found = Grammar(field=name, kind="json", source={"type": "object"})
  elif wanted == "json_schema":
    inner = given.get("json_schema")
    schema = inner.get("schema") if isinstance(inner, dict) else None
    if not isinstance(schema, dict):
      fields.fail(name, "must have an object json_schema.schema")
    found = Grammar(field=name, kind="json", source=schema)
  elif wanted != "text":
    fields.fail(name, "must be of type 'text', 'json_object' or 'json_schema'")
  name = "structured_outputs"
  given = fields.get(name, dict, default={})
  if not given:
    return found
  ((kind, source),) = [*given.items()][:1]
  if len(given) > 1 or kind not in ("json", "regex", "grammar"):
    fields.fail(name, "must have one of 'json', 'regex' and 'grammar'")
  if not isinstance(source, dict if kind == "json" else str):
    fields.fail(name, f"must have {kind} of another type")
  if found is not None:
    fields.fail(name, "must not be set with a response_format")
  return Grammar(field=name, kind=kind, source=source)


def _stops(fields: _Fields) -> tuple[str, ...]:
  stops = fields.get("stop", str, list, default=[])
  stops = [stops] if isinstance(stops, str) else stops
  if len(stops) > _MAX_STOPS or not all(
    isinstance(stop, str) and 0 < len(stop) <= _MAX_STOP_LENGTH
    for stop in stops
  ):
    fields.fail(
      "stop",
      f"must be at most {_MAX_STOPS} strings of 1 to {_MAX_STOP_LENGTH}"
      " characters",
    )
  _check_text("".join(stops), "stop")
  return tuple(stops)


def _logprobs(fields: _Fields, served: Served, is_chat: bool) -> int | None:
  """Returns the number of alternatives; None without probabilities."""
  if not is_chat:
    return fields.integer("logprobs", 0, served.max_logprobs, default=None)
  wanted = fields.get("logprobs", bool, default=False)
  count = fields.integer("top_logprobs", 0, served.max_logprobs, default=None)
  if count is not None and not wanted:
    fields.fail("top_logprobs", "requires logprobs")
  return (count or 0) if wanted else None
