"""Chat templates: the text of a conversation, as a model was trained on it.

A template is a Jinja program of the model's author. It runs in Jinja's
immutable sandbox with the options, filters and functions that transformers
gives it, in a process with limits (`template_process`), and sees `messages`,
`add_generation_prompt` and the special tokens of the model (`bos_token`,
`eos_token`, ...).
"""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import functools
import json
import os
import re
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from paxon.inputs import tokenizer_protocol
from paxon.inputs.sources import record_files
from paxon.inputs.tokenizers import (
  conversation,
  template_process,
  text_tokenizer,
)

Message: TypeAlias = Mapping[str, Any]
# Ids int32 [T], and which of them the assistant wrote, [T].
Tokens: TypeAlias = tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]

_FILE = "chat_template.jinja"
_JSON = "chat_template.json"
_CONFIG = "tokenizer_config.json"
_KEY = "chat_template"
_DEFAULT = "default"
_ASSISTANT = conversation.ASSISTANT
_GENERATION = re.compile(r"\{%[-+]?\s*generation\b")
# Mark generated text while the assistant's turns are searched. Unicode defines
# both as noncharacters, so no text has them.
_BEGIN, _END = "\ufdd0", "\ufdd1"
_MARKS = {"_generation_begin": _BEGIN, "_generation_end": _END}
_PROMPT = {"add_generation_prompt": True}
_TEXT = {"add_generation_prompt": False}
# Fields of a message that a template must use, each by one of its names.
_REASONING = ("reasoning_content", "thinking", "reasoning")
_USED = {"tool_calls": ("tool_calls",), **dict.fromkeys(_REASONING, _REASONING)}
# Roles whose earlier messages a template may leave out.
_FORGOTTEN = ("user", _ASSISTANT)
# Ends the reasoning in the content of DeepSeek R1 and Qwen 3.
_THOUGHT = "</think>"


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
      ValueError: The messages have no role, the template rejects them or does
        not use a variable, or it exceeds a limit of `template_process`.
    """
    check_messages(messages)
    given = conversation.Conversation(
      messages=[dict(message) for message in messages], variables=variables
    )
    more = {"add_generation_prompt": add_generation_prompt}
    return self._render(given, [(len(messages), more)])[0]

  def encode_prompt(
    self, document: bytes, tokenizer: Any
  ) -> npt.NDArray[np.int32]:
    """Returns the ids of the prompt for the next turn of the assistant.

    Args:
      document: A `conversation.Conversation` as JSON.
      tokenizer: The model's tokenizer, a `TextTokenizer`.

    Raises:
      ValueError: See `__call__`.
    """
    given = conversation.from_dict(json.loads(document))
    return tokenizer.encode_special(self(given.messages, **given.variables))

  def tokenize(
    self,
    messages: Sequence[Message],
    tokenizer: Any,
    *,
    first: int = 0,
  ) -> Tokens:
    """Returns the ids of a conversation, and which the assistant wrote.

    Args:
      messages: A conversation.
      tokenizer: The model's tokenizer, a `TextTokenizer`.
      first: Index of the first message that counts as the assistant's.

    Returns:
      Ids int32 [T] and a mask [T].

    Raises:
      ValueError: No single sequence has all turns; see `sequences`.
    """
    check_messages(messages)
    turns = [i for i, m in enumerate(messages) if m["role"] == _ASSISTANT]
    return self.tokenize_whole(
      conversation.Conversation(
        messages=[dict(message) for message in messages],
        trained=[i for i in turns if i >= first],
      ),
      tokenizer,
    )

  def tokenize_whole(
    self, given: conversation.Conversation, tokenizer: Any
  ) -> Tokens:
    """Returns the one sequence of a conversation; see `sequences`.

    Raises:
      ValueError: There are several, or the conversation has no turn to train.
    """
    found = self.sequences(given, tokenizer)
    if len(found) == 1:
      return found[0]
    if not found:
      raise ValueError("It has no turn of the assistant.")
    raise ValueError(
      f"The chat template changes the text before message {given.trained[1]}"
      " when it is added, so no one sequence has all turns of the assistant;"
      " train on the last turn alone (trained_turns=last)."
    )

  def sequences(
    self, given: conversation.Conversation, tokenizer: Any
  ) -> list[Tokens]:
    """Returns the sequences that train the assistant's turns.

    A turn follows the tokens of the prompt that inference would make of the
    messages before it. Turns share a sequence as long as each prompt begins
    with the tokens of the turns before; templates that drop the reasoning of
    earlier turns have a sequence for each turn.

    A mask has what the model is to generate: the text after the prompt up to
    its end token. If the template has `{% generation %}` blocks, it is what
    they have of it.

    Args:
      given: A conversation; its `trained` messages are the turns.
      tokenizer: The model's tokenizer, a `TextTokenizer`.

    Returns:
      For each sequence ids int32 [T] and a mask [T].

    Raises:
      ValueError: The template rejects the messages, or its prompt does not
        begin the turn.
    """
    found: list[Tokens] = []
    for prompt, answer, spans in self._turns(given):
      before = tokenizer.encode_special(prompt)
      after = _encode_after(tokenizer, prompt, before, answer)
      mask = np.full(len(after), spans is None)
      for begin, end in spans or ():
        # A token that also has text of the assistant counts, at both ends.
        start, stop = (
          _encode_after(tokenizer, prompt, before, answer[:x])
          for x in (begin, end)
        )
        last = _count_common(after, stop)
        last += last < len(stop)
        mask[_count_common(after, start) : last] = True
      mask &= np.arange(len(after)) < _count_generated(tokenizer, after)
      old = found[-1] if found else (before[:0], mask[:0])
      count = len(old[0])
      if found and np.array_equal(before[:count], old[0]):
        found.pop()
      else:
        old, count = (before, np.zeros(len(before), bool)), len(before)
      between = np.zeros(len(before) - count, bool)
      found.append(
        (
          np.concatenate([before, after]),
          np.concatenate([old[1], between, mask]),
        )
      )
    return found

  def _turns(
    self, given: conversation.Conversation
  ) -> Iterator[tuple[str, str, list[tuple[int, int]] | None]]:
    """Yields prompt, text and generated spans of each turn; None for all."""
    has_blocks = bool(_GENERATION.search(self.source))
    forms = [(0, _PROMPT), (1, _TEXT), *[(1, {**_TEXT, **_MARKS})] * has_blocks]
    calls = [(i + more, form) for i in given.trained for more, form in forms]
    texts = iter(self._render(given, calls))
    for i in given.trained:
      prompt, text = next(texts), next(texts)
      last = given.messages[i - 1].get("content", "") if i else ""
      end = _find_end(prompt, text, last.strip())
      answer = "" if end is None else text[end:]
      is_changed = end is None or self._drops_thought(given, i, answer)
      if is_changed:
        answer = self._restore(given, i, prompt)
      spans = None
      marked = next(texts) if has_blocks else ""
      if end is not None and has_blocks and not is_changed:
        spans = _find_spans(marked, text)
        spans = [(max(a, end) - end, b - end) for a, b in spans if b > end]
      yield prompt, answer, spans

  def _drops_thought(
    self, given: conversation.Conversation, index: int, answer: str
  ) -> bool:
    """Whether the text of a turn lacks the reasoning in its content."""
    content = given.messages[index].get("content", "")
    thought, mark, _ = content.partition(_THOUGHT)
    thought = thought.partition("<think>")[2] or thought
    return bool(mark) and thought.strip() not in answer

  def _restore(
    self, given: conversation.Conversation, index: int, prompt: str
  ) -> str:
    """Returns a turn as it is generated, for templates that change it.

    DeepSeek R1 drops the reasoning of each turn, and its prompt may end with
    `<think>`. What ends a turn is found by another content.

    Raises:
      ValueError: The content does not begin as the prompt ends.
    """
    message = given.messages[index]
    content = message.get("content", "")
    other = {"role": message["role"], "content": _BEGIN}
    messages = [*given.messages[:index], other]
    (text,) = self._render(
      dataclasses.replace(given, messages=messages), [(index + 1, _TEXT)]
    )
    head, mark, tail = text.partition(_BEGIN)
    opening = prompt[len(head) :]
    if mark and prompt.startswith(head) and "tool_calls" not in message:
      if content.startswith(opening):
        return content.removeprefix(opening) + tail
      # Without the begin of the reasoning, as it is generated.
      if _THOUGHT in content and opening.strip() not in content:
        return content + tail
    raise ValueError(
      f"The chat template changes the text before message {index} when it is"
      f" added: its prompt ends with {prompt[-40:]!r}, which the message does"
      " not continue. Write the reasoning that the model is to generate into"
      " the content, or pass another template (chat_template=PATH)."
    )

  def _render(
    self,
    given: conversation.Conversation,
    calls: Sequence[tuple[int, Mapping[str, Any]]],
  ) -> list[str]:
    """Returns the texts of the first messages of a conversation.

    Args:
      given: A conversation.
      calls: For each text the number of messages, and more variables.

    Raises:
      ValueError: See `__call__`.
    """
    self._check_used(given)
    try:
      texts = self._render_unchecked(given, calls)
    except ValueError as error:
      rest = [call for call in calls if call[0]]
      if not rest or len(rest) == len(calls):
        raise
      # Of message 0 that is trained: its prompt has no messages.
      self._render_unchecked(given, rest)
      raise ValueError(
        f"Message 0 has the role {given.messages[0]['role']!r}, and the chat"
        " template needs a message before it, of another role, to write its"
        f" prompt ({error}). Begin the conversation with one, or give message 0"
        ' "weight": 0, so that it has no loss.'
      ) from error
    for (count, _), text in zip(calls, texts, strict=True):
      if count and not text.strip():
        raise ValueError(
          f"The chat template returns no text for {count} messages."
        )
    self._check_written(given, calls, texts)
    return texts

  def _render_unchecked(
    self,
    given: conversation.Conversation,
    calls: Sequence[tuple[int, Mapping[str, Any]]],
  ) -> list[str]:
    variables = {
      "tools": None,
      "documents": None,
      **self.special_tokens,
      **given.variables,
    }

    def render(messages: Sequence[Message]) -> list[str]:
      return template_process.render(
        self.source, messages=messages, variables=variables, calls=calls
      )

    # OpenAI's arguments of a tool are JSON in a string. A template that reads
    # objects would write JSON of that string, or fail.
    decoded, encoded = _decode_arguments(given.messages)
    try:
      texts = render(given.messages)
    except ValueError:
      if not encoded:
        raise
      return render(decoded)
    if any(string in text for string in encoded for text in texts):
      return render(decoded)
    return texts

  def _check_written(
    self,
    given: conversation.Conversation,
    calls: Sequence[tuple[int, Mapping[str, Any]]],
    texts: Sequence[str],
  ) -> None:
    """Raises ValueError if no text has the content of a message.

    Many templates leave out messages of a role that they do not know, or a
    content besides calls of tools. A template may forget what the user and the
    assistant wrote earlier.
    """
    # Mistral's system prompt is written into prompts only.
    has_prompt = any(form == _PROMPT for _, form in calls)
    count = max(count for count, _ in calls) if has_prompt else 0
    for i, message in enumerate(given.messages[:count]):
      content = message.get("content", "").strip()
      is_checked = message["role"] not in _FORGOTTEN or "tool_calls" in message
      if not content or not is_checked or any(content in x for x in texts):
        continue
      # It may be written in another form, such as JSON.
      rest = [*given.messages]
      rest[i] = {**message, "content": message["content"] + _BEGIN}
      other = dataclasses.replace(given, messages=rest)
      if texts == self._render_unchecked(other, calls):
        more = " and has tool_calls" * ("tool_calls" in message)
        raise ValueError(
          f"The chat template does not use the content of message {i}, which"
          f" is of the role {message['role']!r}{more}."
        )

  def _check_used(self, given: conversation.Conversation) -> None:
    """Raises ValueError if the template drops a part of a conversation."""
    for name, value in given.variables.items():
      if value is not None and name not in self._names:
        raise ValueError(f"The chat template does not use {name!r}.")
    for i, message in enumerate(given.messages):
      for name, names in _USED.items():
        if not message.get(name) or not self._names.isdisjoint(names):
          continue
        # It may write all fields, whatever their names are.
        rest = [*given.messages]
        rest[i] = {k: v for k, v in message.items() if k not in names}
        if self._try_to_render(given) == self._try_to_render(
          dataclasses.replace(given, messages=rest)
        ):
          raise ValueError(
            f"The chat template does not use {name!r}, which message {i} has."
          )

  def _try_to_render(
    self, given: conversation.Conversation
  ) -> list[str] | None:
    """Returns the text of a conversation; None if the template rejects it."""
    try:
      return self._render_unchecked(given, [(len(given.messages), _TEXT)])
    except ValueError:
      return None

  @functools.cached_property
  def _names(self) -> frozenset[str]:
    return template_process.find_names(self.source)


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
      named = {
        each.get("name"): each.get("template")
        for each in found
        if isinstance(each, dict)
      }
      if _DEFAULT not in named:
        raise ValueError(
          f"{os.path.join(folder, name)} has the chat templates"
          f" {', '.join(map(str, named))}, but none named {_DEFAULT!r}."
        )
      found = named[_DEFAULT]
    if found is not None and not isinstance(found, str):
      raise ValueError(
        f"{os.path.join(folder, name)}: {_KEY} must be a text, or a list of"
        f" templates with 'name' and 'template', got {str(found)[:40]!r}."
      )
    if found is not None:
      return found
  return None


def load(folder: str, *, path: str | None = None) -> ChatTemplate:
  """Returns the chat template of a Hugging Face folder.

  Args:
    folder: The folder, which names the special tokens, too.
    path: Another file with a template, or another folder; None for its own.

  Raises:
    ValueError: The folder has none, or the file cannot be read.
  """
  if path is not None and not os.path.isdir(path):
    try:
      with open(path, encoding="utf-8", newline="") as file:
        source = file.read()
    except (OSError, UnicodeDecodeError) as error:
      raise ValueError(
        f"chat_template={path} is no file of text ({error})."
      ) from error
  else:
    source = find(path or folder)
  if source is None:
    raise ValueError(
      f"{path or folder} has no chat template: neither {_FILE}, nor {_KEY!r} in"
      f" {_CONFIG}."
    )
  named = {
    **text_tokenizer.read_json(folder, "special_tokens_map.json"),
    **text_tokenizer.read_json(folder, _CONFIG),
  }
  tokens = {
    name: value.get("content") if isinstance(value, dict) else value
    for name, value in named.items()
    if name.endswith("_token") and value and not isinstance(value, bool)
  }
  tokens = {name: text for name, text in tokens.items() if text is not None}
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


def _decode_arguments(
  messages: Sequence[Message],
) -> tuple[list[Message], list[str]]:
  """Returns messages with decoded arguments of tools, and JSON of the strings.

  Strings that are not JSON of an object stay.
  """
  decoded, encoded = [], []
  for message in messages:
    calls = []
    for call in message.get("tool_calls", ()):
      function = call.get("function", call)
      given = function.get("arguments")
      try:
        found = json.loads(given) if isinstance(given, str) else None
      except (ValueError, RecursionError):
        found = None
      if isinstance(found, dict):
        encoded.append(json.dumps(given, ensure_ascii=False))
        function = {**function, "arguments": found}
        call = (
          {**call, "function": function} if "function" in call else function
        )
      calls.append(call)
    decoded.append({**message, "tool_calls": calls} if calls else message)
  return decoded, encoded


def _find_end(prompt: str, text: str, last: str) -> int | None:
  """Returns where in the text of a turn its prompt ends; None if nowhere.

  A template may move what stands before: Mistral's writes the system prompt and
  the tools into the last message of the user, if it is the last of all. So the
  end is where the text has most of the end of the prompt, at least from the
  last message on.
  """
  if text.startswith(prompt):
    return len(prompt)
  required = len(prompt) - max(0, prompt.rfind(last)) if last else len(prompt)
  needle = prompt[len(prompt) - required :]
  best, at = (0, -1), text.find(needle)
  while at >= 0:
    end, common = at + required, required
    while common < min(end, len(prompt)) and (
      prompt[-common - 1] == text[end - common - 1]
    ):
      common += 1
    best, at = max(best, (common, end)), text.find(needle, at + 1)
  return best[1] if best[0] else None


def _find_spans(marked: str, text: str) -> list[tuple[int, int]]:
  """Returns begin and end of each `generation` block in a text."""
  if marked.replace(_BEGIN, "").replace(_END, "") != text:
    raise ValueError(
      "The chat template changes the text of its generation blocks, so the"
      " assistant's turns cannot be found."
    )
  found, end = [], 0
  for i, block in enumerate(marked.split(_BEGIN)):
    generated, mark, rest = block.partition(_END)
    if i and generated:
      found.append((end, end + len(generated)))
    end += len(generated) + len(rest) if mark or not i else len(block)
  return found


def _encode_after(
  tokenizer: Any, prompt: str, before: np.ndarray, text: str
) -> npt.NDArray[np.int32]:
  """Returns the ids of a text after those of a prompt.

  They are those of both together if these begin with the prompt's. Else a token
  would have text of both, which a model cannot continue, so the text has tokens
  of its own: those after a line break, because some vocabularies begin a text
  with a space.
  """
  for start in (prompt, "\n"):
    ids = before if start == prompt else tokenizer.encode_special(start)
    whole = tokenizer.encode_special(start + text)
    if np.array_equal(whole[: len(ids)], ids):
      return whole[len(ids) :]
  return tokenizer.encode_special(text)


def _count_generated(tokenizer: Any, ids: np.ndarray) -> int:
  """Returns how many ids of a turn are generated: up to its end token.

  White space that a template writes after it, such as ChatML's line break, is
  not.
  """
  has_special = isinstance(tokenizer, tokenizer_protocol.HasSpecialIds)
  special = tokenizer.special_ids if has_special else ()
  for i in range(len(ids) - 1, -1, -1):
    if int(ids[i]) in special:
      return i + 1
    if tokenizer.decode(ids[i : i + 1]).strip():
      break
  return len(ids)


def _count_common(x: np.ndarray, y: np.ndarray) -> int:
  """Returns the length of the common prefix."""
  n = min(len(x), len(y))
  differ = np.flatnonzero(x[:n] != y[:n])
  return int(differ[0]) if len(differ) else n
