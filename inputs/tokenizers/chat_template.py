"""Chat templates: the text of a conversation, as a model was trained on it.

A template is a Jinja program of the model's author. It runs in Jinja's
immutable sandbox with the options, filters and functions that transformers
gives it, and sees `messages`, `add_generation_prompt` and the special tokens of
the model (`bos_token`, `eos_token`, ...).
"""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import datetime
import functools
import json
import os
import re
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from paxon.inputs import optional_library, record_files
from paxon.inputs.tokenizers import text_tokenizer

Message: TypeAlias = Mapping[str, Any]

_FILE = "chat_template.jinja"
_JSON = "chat_template.json"
_CONFIG = "tokenizer_config.json"
_KEY = "chat_template"
_DEFAULT = "default"
_ASSISTANT = "assistant"
_GENERATION = re.compile(r"\{%[-+]?\s*generation\b")
# Mark generated text while the assistant's turns are searched. Unicode defines
# both as noncharacters, so no text has them.
_BEGIN, _END = "\ufdd0", "\ufdd1"
_MARKS = {"_generation_begin": _BEGIN, "_generation_end": _END}


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
    *,
    first: int = 0,
  ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]:
    """Returns the ids of a conversation, and which the assistant wrote.

    A template with `{% generation %}` blocks marks what the assistant wrote, as
    transformers reads them. In any other template a turn of the assistant is
    the text after the prompt for it, its end token included.

    Args:
      messages: A conversation.
      tokenizer: The model's tokenizer, a `TextTokenizer`.
      first: Index of the first message that counts as the assistant's.

    Returns:
      Ids int32 [T] and a mask [T].

    Raises:
      ValueError: A turn changes the text before it, as in templates that drop
        the reasoning of earlier turns.
    """
    text = self(messages, add_generation_prompt=False)
    ids = tokenizer.encode_special(text)
    mask = np.zeros(len(ids), bool)
    if _GENERATION.search(self.source):
      spans = self._generated(messages, text, first)
    else:
      spans = self._turns(messages, text, first)
    for begin, end in spans:
      # A token that also has text of the assistant counts, at both ends.
      start = _count_common(ids, tokenizer.encode_special(text[:begin]))
      until = tokenizer.encode_special(text[:end])
      stop = _count_common(ids, until)
      mask[start : stop + (stop < len(until))] = True
    return ids, mask

  def _turns(
    self, messages: Sequence[Message], text: str, first: int
  ) -> Iterator[tuple[int, int]]:
    """Yields begin and end of each turn in the text of a conversation."""
    for i, message in enumerate(messages[first:], start=first):
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
      yield len(before), len(after)

  def _generated(
    self, messages: Sequence[Message], text: str, first: int
  ) -> Iterator[tuple[int, int]]:
    """Yields begin and end of each `generation` block in the text."""
    marked = self(messages, add_generation_prompt=False, **_MARKS)
    if marked.replace(_BEGIN, "").replace(_END, "") != text:
      raise ValueError(
        "The chat template changes the text of its generation blocks, so the"
        " assistant's turns cannot be found."
      )
    least = 0
    if first:
      prompt = self(messages[:first], add_generation_prompt=False)
      if not text.startswith(prompt):
        raise ValueError(
          "The chat template changes the prompt when the completion is added."
        )
      least = len(prompt)
    end = 0
    for i, block in enumerate(marked.split(_BEGIN)):
      generated, mark, rest = block.partition(_END)
      if i and generated and end >= least:
        yield end, end + len(generated)
      end += len(generated) + len(rest) if mark or not i else len(block)

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
    """`{% generation %}...{% endgeneration %}`: what the assistant wrote."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
      line = next(parser.stream).lineno
      body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
      # Without values the marks are empty.
      begin, end = (
        nodes.Output([nodes.Name(name, "load")]).set_lineno(line)
        for name in _MARKS
      )
      # A scope of its own, as a call block has.
      return [begin, nodes.Scope(body).set_lineno(line), end]

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
