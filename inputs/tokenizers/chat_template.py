"""Chat templates: the text of a conversation, as a model was trained on it.

A template is a Jinja program of the model's author. It runs in Jinja's
immutable sandbox with the options, filters and functions that transformers
gives it, and sees `messages`, `add_generation_prompt` and the special tokens of
the model (`bos_token`, `eos_token`, ...).
"""

from collections.abc import Mapping, Sequence
import dataclasses
import datetime
import functools
import json
import os
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from paxon.inputs import (
  example_source,
  json_lines,
  optional_library,
  record_files,
)
from paxon.inputs.tokenizers import text_tokenizer

Message: TypeAlias = Mapping[str, Any]

_FILE = "chat_template.jinja"
_JSON = "chat_template.json"
_CONFIG = "tokenizer_config.json"
_KEY = "chat_template"
_DEFAULT = "default"
_ASSISTANT = "assistant"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatTemplate(record_files.PickledFields):
  """A chat template and the special tokens that it names.

  Attributes:
    source: The Jinja program.
    special_tokens: Text of each special token by its name, such as `bos_token`.
  """

  source: str
  special_tokens: Mapping[str, str] = dataclasses.field(default_factory=dict)

  def __call__(
    self,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool = True,
    **variables: Any,
  ) -> str:
    """Returns the text of a conversation.

    Args:
      messages: Each with `role` and `content`.
      add_generation_prompt: Whether the text ends with the beginning of the
        assistant's turn.
      **variables: More variables of the template, such as `tools` and
        `enable_thinking`.

    Raises:
      ValueError: The messages have no role, or the template rejects them.
    """
    check_messages(messages)
    # Templates may only see and change a copy.
    own = [_name_reasoning(m) for m in json.loads(json.dumps(list(messages)))]
    given = {"tools": None, "documents": None, **variables}
    try:
      return self._program.render(
        messages=own,
        add_generation_prompt=add_generation_prompt,
        **self.special_tokens,
        **given,
      )
    except _jinja().TemplateError as error:
      raise ValueError(f"The chat template: {error}.") from error

  def tokenize(
    self,
    messages: Sequence[Message],
    tokenizer: Any,
  ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]:
    """Returns the ids of a conversation, and which the assistant wrote.

    A turn of the assistant is what follows the prompt for it, its end token
    included.

    Args:
      messages: A conversation.
      tokenizer: The model's tokenizer, a `TextTokenizer`.

    Returns:
      Ids int32 [T] and a mask [T].

    Raises:
      ValueError: A turn changes the text before it, as in templates that drop
        the reasoning of earlier turns.
    """
    text = self(messages, add_generation_prompt=False)
    ids = tokenizer.encode_special(text)
    mask = np.zeros(len(ids), bool)
    for i, message in enumerate(messages):
      if message["role"] != _ASSISTANT:
        continue
      before = self(messages[:i], add_generation_prompt=True)
      after = self(messages[: i + 1], add_generation_prompt=False)
      if not after.startswith(before) or not text.startswith(after):
        raise ValueError(
          f"The chat template changes the text before message {i} when it is"
          " added, so the assistant's turns cannot be found; train on text"
          " instead, or on chats with one turn of the assistant."
        )
      begin = _count_common(ids, tokenizer.encode_special(before))
      mask[begin : _count_common(ids, tokenizer.encode_special(after))] = True
    return ids, mask

  @functools.cached_property
  def _program(self) -> Any:
    jinja2 = _jinja()
    environment = _environment()
    try:
      return environment.from_string(self.source)
    except jinja2.TemplateError as error:
      raise ValueError(
        f"The chat template is not a Jinja program ({error})."
      ) from error


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatLines(json_lines.JsonLines):
  """Conversations in JSON lines, as documents of JSON.

  Attributes:
    text_key: The key of the messages in each line.
  """

  text_key: str = "messages"

  def document(self, line: bytes, path: str) -> bytes:
    """Returns the messages of a line as JSON.

    Raises:
      ValueError: The line has no messages.
    """
    try:
      row = json.loads(line)
      messages = row.get(self.text_key) if isinstance(row, dict) else None
      check_messages(messages)
    except ValueError as error:
      raise ValueError(
        f"{path}: a line has no {self.text_key!r}: {error}"
      ) from error
    return json.dumps(messages).encode()


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenizedChats:
  """Conversations as examples; only what the assistant wrote has weight.

  Attributes:
    source: The conversations, such as `ChatLines`.
    template: The model's chat template.
    tokenizer: The model's tokenizer, a `TextTokenizer`.
  """

  source: example_source.DocumentSource
  template: ChatTemplate
  tokenizer: Any

  def __len__(self) -> int:
    return len(self.source)

  def __getitem__(self, index: int, /) -> example_source.Example:
    """Returns `inputs`, `targets`, `target_bytes` and `weights` [n].

    Raises:
      ValueError: The template rejects the messages.
    """
    messages = json.loads(self.source[index])
    try:
      ids, mask = self.template.tokenize(messages, self.tokenizer)
    except ValueError as error:
      raise ValueError(f"Chat {index}: {error}") from error
    features = example_source.lm_features(ids, self.tokenizer)
    return {**features, "weights": mask[1:].astype(np.float32)}

  def required_vocab_size(self) -> int:
    """Returns the tokenizer's vocabulary size."""
    return self.tokenizer.vocab_size

  def token_dtypes(self) -> dict[str, np.dtype]:
    """Returns the dtypes of an example's arrays."""
    keys = ("inputs", "targets", "target_bytes")
    integers = dict.fromkeys(keys, np.dtype(np.int32))
    return {**integers, "weights": np.dtype(np.float32)}


def find(folder: str) -> str | None:
  """Returns the template in a Hugging Face folder; None if it has none.

  Raises:
    ValueError: A file is not a JSON object, or has several templates and none
      is the default.
  """
  path = os.path.join(folder, _FILE)
  if os.path.isfile(path):
    with open(path, encoding="utf-8", newline="") as file:
      return file.read()
  for name in (_JSON, _CONFIG):
    found = text_tokenizer.read_json(folder, name).get(_KEY)
    if isinstance(found, list):
      named = {each.get("name"): each.get("template") for each in found}
      if _DEFAULT not in named:
        raise ValueError(
          f"{os.path.join(folder, name)} has the chat templates"
          f" {', '.join(map(str, named))}, but none named {_DEFAULT!r}."
        )
      found = named[_DEFAULT]
    if found is not None:
      return found
  return None


def load(folder: str) -> ChatTemplate:
  """Returns the chat template of a Hugging Face folder.

  Raises:
    ValueError: The folder has none.
  """
  source = find(folder)
  if source is None:
    raise ValueError(
      f"{folder} has no chat template: neither {_FILE}, nor {_KEY!r} in"
      f" {_CONFIG}."
    )
  named = {
    **text_tokenizer.read_json(folder, "special_tokens_map.json"),
    **text_tokenizer.read_json(folder, _CONFIG),
  }
  tokens = {
    name: value["content"] if isinstance(value, dict) else value
    for name, value in named.items()
    if name.endswith("_token") and value and not isinstance(value, bool)
  }
  return ChatTemplate(source=source, special_tokens=tokens)


def check_messages(messages: Any) -> None:
  """Raises ValueError if messages are not a list of objects with a role."""
  if not isinstance(messages, Sequence) or isinstance(messages, str):
    raise ValueError("A chat must be a list of messages.")
  for i, message in enumerate(messages):
    if not isinstance(message, Mapping) or not isinstance(
      message.get("role"), str
    ):
      raise ValueError(
        f"Message {i} of a chat must be an object with a string 'role'."
      )


def _name_reasoning(message: dict[str, Any]) -> dict[str, Any]:
  """Returns a message with its reasoning under the names that templates use."""
  names = ("reasoning_content", "thinking", "reasoning")
  found = (message[name] for name in names if message.get(name) is not None)
  reasoning = next(found, None)
  if reasoning is None:
    return message
  return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _count_common(x: np.ndarray, y: np.ndarray) -> int:
  """Returns the length of the common prefix."""
  n = min(len(x), len(y))
  differ = np.flatnonzero(x[:n] != y[:n])
  return int(differ[0]) if len(differ) else n


def _jinja() -> Any:
  with optional_library.explain("jinja2", extra="text"):
    import jinja2
  return jinja2


def _environment() -> Any:
  """Returns a sandbox as transformers makes it."""
  jinja2 = _jinja()
  from jinja2 import ext, nodes, sandbox

  class Generation(ext.Extension):
    """`{% generation %}...{% endgeneration %}`, which marks nothing here."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
      line = next(parser.stream).lineno
      body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
      # A scope of its own, as a call block has.
      return nodes.Scope(body).set_lineno(line)

  def raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)

  def tojson(
    x: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
  ) -> str:
    return json.dumps(
      x,
      ensure_ascii=ensure_ascii,
      indent=indent,
      separators=separators,
      sort_keys=sort_keys,
    )

  def strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)

  environment = sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True,
    lstrip_blocks=True,
    extensions=[Generation, ext.loopcontrols],
  )
  environment.filters["tojson"] = tojson
  names: Any = environment.globals
  names.update(raise_exception=raise_exception, strftime_now=strftime_now)
  return environment
