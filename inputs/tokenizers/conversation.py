"""Conversations: the one reader of chats, which checks every field.

A record is a JSON object: a line of a file, a row of a table, or the body of a
request. It has messages as OpenAI and transformers define them, and values that
a chat template reads besides them:

  {"messages": [{"role": "user", "content": "1 + 1?"},
                {"role": "assistant", "content": "2", "weight": 1}],
   "tools": [...], "documents": [...], "system": "Be brief.",
   "chat_template_kwargs": {"enable_thinking": false}}

Every field is used, passed to the template, or an error that names it. Columns
without a meaning here, such as an id, are listed by `Record.unused`.
"""

from collections.abc import Collection, Mapping, Sequence
import dataclasses
import json
from typing import Any, Final, TypeAlias

import numpy as np

Message: TypeAlias = dict[str, Any]

MESSAGES: Final = "messages"
PROMPT: Final = "prompt"
COMPLETION: Final = "completion"
ASSISTANT: Final = "assistant"
# Fields that any record may have besides its messages.
CONTEXT: Final = ("tools", "documents", "system", "chat_template_kwargs")

_MEDIA = "only text is supported"
_NO_TEXT = dict.fromkeys(
  ("image", "images", "video", "videos", "audio", "audios", "input_audio"),
  _MEDIA,
)
# Fields of a record that would change it, and what to do about them.
_REJECTED = {
  **_NO_TEXT,
  "functions": "write 'tools'",
  "function_call": "write 'tool_calls' in a message",
  "tool_calls": "write it in a message of the assistant",
  "weight": "write it in the messages of the assistant",
  "weights": "write 'weight' in the messages of the assistant",
  "system_prompt": "write 'system'",
}
# The same of a message.
_REJECTED_OF_MESSAGE = {
  **_NO_TEXT,
  "file": _MEDIA,
  "files": _MEDIA,
  "function_call": "write 'tool_calls'",
  "refusal": "write it as 'content'",
}
_STRINGS = ("name", "tool_call_id", "reasoning_content", "reasoning")
_OF_MESSAGE = (
  *("role", "content", "weight", "tool_calls", "thinking"),
  *_STRINGS,
)
_RESERVED = (MESSAGES, "add_generation_prompt", "continue_final_message")
_SYSTEMS = ("system", "developer")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conversation:
  """Messages, and the other values that a chat template reads.

  Attributes:
    messages: Objects with `role`, without `weight` and null values.
    variables: Values of the template by name, such as `tools`.
    trained: Indices of the assistant's messages that may have a loss.
  """

  messages: Sequence[Message]
  variables: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  trained: Sequence[int] = ()

  def extend(self, other: "Conversation") -> "Conversation":
    """Returns the conversation followed by the messages of another.

    Only those of the other may have a loss.
    """
    count = len(self.messages)
    return Conversation(
      messages=[*self.messages, *other.messages],
      variables=self.variables,
      trained=[count + i for i in other.trained],
    )

  def to_dict(self) -> dict[str, Any]:
    """Returns the fields, for JSON."""
    return {
      "messages": list(self.messages),
      "variables": dict(self.variables),
      "trained": list(self.trained),
    }


def find_unused(record: Mapping[str, Any], known: Collection[str]) -> list[str]:
  """Returns the columns of a record that mean nothing for a conversation.

  Fields of messages that neither OpenAI nor transformers know are listed, too,
  as `messages.NAME`. A template may read them.

  Args:
    record: A record.
    known: The columns that are read, besides those of `CONTEXT`.
  """
  columns = {name: x for name, x in record.items() if x is not None}
  found = [name for name in columns if name not in (*known, *CONTEXT)]
  for name in known:
    value = columns.get(name)
    for each in value if isinstance(value, list | tuple) else ():
      fields = each.items() if isinstance(each, Mapping) else ()
      more = [x for x, y in fields if x not in _OF_MESSAGE and y is not None]
      found += [f"{name}.{x}" for x in more]
  return list(dict.fromkeys(found))


def read(record: Any, *, key: str = MESSAGES) -> Conversation:
  """Returns the conversation of a record to train on.

  It has messages at `key`, or a prompt and a completion; of these only the
  completion has a loss.

  Raises:
    ValueError: A field is wrong; it has its name.
  """
  fields = _to_fields(record, "A chat")
  if key not in fields and PROMPT in fields:
    prompt, (answer,) = read_answers(fields, keys=[COMPLETION], what="A chat")
    return prompt.extend(answer)
  if key not in fields:
    raise ValueError(
      f"It has {list(fields)[:8]}. Give it a list of messages, or"
      f" {PROMPT!r} and {COMPLETION!r}."
    )
  return _add_context(fields, _to_messages(fields, key))


def read_prompt(record: Any, *, key: str = PROMPT) -> Conversation:
  """Returns the messages of a record that a model is to answer.

  They are a list at `key`, or a string, which is a message of the user; at
  `messages` a list alone.

  Raises:
    ValueError: A field is wrong; it has its name.
  """
  fields = _to_fields(record, "A chat")
  role = None if key == MESSAGES else "user"
  found = _to_messages(fields, key, role=role, has_weights=False)
  if not found.messages and key == MESSAGES:
    raise ValueError(f"{key!r} must be a list of messages, got [].")
  return _add_context(fields, dataclasses.replace(found, trained=()))


def read_answers(
  record: Any, *, keys: Sequence[str], what: str
) -> tuple[Conversation, list[Conversation]]:
  """Returns the prompt of a record and its answers, which have a loss.

  Without a prompt it is the messages that all answers begin with. Answers that
  repeat the messages of the prompt are whole conversations.

  Args:
    record: A record.
    keys: The fields of the answers.
    what: The name of the record for messages.

  Raises:
    ValueError: A field is wrong; it has its name.
  """
  fields = _to_fields(record, what)
  for key in keys:
    if key not in fields:
      raise ValueError(f"{what} must have {key!r}, got {sorted(fields)}.")
  answers = [_to_messages(fields, key, role=ASSISTANT) for key in keys]
  given = [answer.messages for answer in answers]
  if PROMPT in fields:
    prompt = read_prompt(fields)
    own = _to_messages(fields, PROMPT, role="user").messages
    count = len(own)
    if not all(len(x) > count and x[:count] == own for x in given):
      count = 0
    last = own[-1]["role"] if own else ASSISTANT
    for key, messages in zip(keys, given, strict=True):
      role = messages[count]["role"] if count < len(messages) else ASSISTANT
      if role in _SYSTEMS or (role == last and role != ASSISTANT):
        raise ValueError(
          f"{key!r} must continue {PROMPT!r}, or begin with all its messages;"
          f" message {count} is one of {role!r} after one of {last!r}."
        )
  else:
    count = 0
    for some in zip(*given, strict=False):
      if any(message != some[0] for message in some):
        break
      count += 1
    if not count or len(keys) == 1:
      raise ValueError(
        f"{what} must have {PROMPT!r}, or lists of messages that begin with"
        f" equal ones, got {sorted(fields)}."
      )
    first = Conversation(messages=given[0][:count])
    prompt = _add_context(fields, first)
  return prompt, [_drop_first(answer, count) for answer in answers]


def from_dict(found: Mapping[str, Any]) -> Conversation:
  """Returns the conversation of `Conversation.to_dict`."""
  return Conversation(**found)


def to_plain(value: Any) -> Any:
  """Returns nested values of a table as JSON values, without nulls in objects.

  Tables fill gaps with null.
  """
  if isinstance(value, Mapping):
    return {k: to_plain(v) for k, v in value.items() if v is not None}
  if isinstance(value, list | tuple | np.ndarray):
    return [to_plain(v) for v in value]
  return value.item() if isinstance(value, np.generic) else value


def _to_fields(record: Any, what: str) -> dict[str, Any]:
  """Returns the fields of a record that are not null."""
  if not isinstance(record, Mapping):
    raise ValueError(f"{what} must be an object.")
  fields = {key: value for key, value in record.items() if value is not None}
  _check_rejected(fields, _REJECTED, "")
  return fields


def _check_rejected(
  fields: Mapping[str, Any], rejected: Mapping[str, str], where: str
) -> None:
  for name, advice in rejected.items():
    value = fields.get(name)
    # Tables have empty lists and texts where nothing is.
    if value is not None and value != [] and value != "":
      raise ValueError(f"{where}{name} is not supported; {advice}.")


def _to_messages(
  fields: Mapping[str, Any],
  key: str,
  *,
  role: str | None = None,
  has_weights: bool = True,
) -> Conversation:
  """Returns the messages of a field; with `role` a string is one of them."""
  value = fields.get(key)
  if role is not None and isinstance(value, str):
    value = [{"role": role, "content": value}]
  if not isinstance(value, list | tuple):
    no_string = "" if role is None else "is no string: A chat "
    raise ValueError(
      f"{key!r} {no_string}must be a list of messages, got {repr(value)[:60]}."
    )
  messages, trained = [], []
  for i, each in enumerate(value):
    message = _to_message(each, f"{key}[{i}]")
    weight = message.pop("weight", None)
    if weight is not None and not has_weights:
      raise ValueError(
        f"{key}[{i}].weight has no meaning, because a prompt has no loss."
      )
    if message["role"] == ASSISTANT and weight != 0:
      trained.append(i)
    messages.append(message)
  return Conversation(messages=messages, trained=trained)


def _to_message(value: Any, where: str) -> Message:
  """Returns a message without null values, its content as a string."""
  if not isinstance(value, Mapping):
    raise ValueError(f"{where} must be an object.")
  found = {key: x for key, x in value.items() if x is not None}
  role = found.get("role")
  if not isinstance(role, str):
    raise ValueError(f"{where}.role must be a string.")
  _check_rejected(found, _REJECTED_OF_MESSAGE, f"{where}.")
  for name in _STRINGS:
    if not isinstance(found.get(name, ""), str):
      raise ValueError(f"{where}.{name} must be a string.")
  calls = found.pop("tool_calls", [])
  if calls != []:
    _check_calls(calls, role, where)
    found["tool_calls"] = calls
  weight = found.get("weight", 1)
  if weight not in (0, 1) or ("weight" in found and role != ASSISTANT):
    raise ValueError(
      f"{where}.weight must be 0 or 1, in a message of the assistant, got"
      f" {weight!r} in one of {role!r}."
    )
  if "content" in found:
    found["content"] = _join(found["content"], where)
  elif calls == []:
    raise ValueError(
      f"{where}.content must be a string or a list of parts, got null."
    )
  return found


def _join(content: Any, where: str) -> str:
  """Returns the text of a content."""
  if isinstance(content, str):
    return content
  if not isinstance(content, list | tuple):
    raise ValueError(f"{where}.content must be a string or a list of parts.")
  texts = []
  for part in content:
    fields = part if isinstance(part, Mapping) else {"type": part}
    fields = {key: x for key, x in fields.items() if x is not None}
    text = fields.get("text")
    if fields.keys() != {"type", "text"} or fields["type"] != "text":
      others = [key for key in fields if key not in ("type", "text")]
      raise ValueError(
        f"{where}.content: only parts of type 'text' are supported, with"
        f" 'text', got {fields.get('type')!r}"
        f"{f' with {others}' if others else ''}."
      )
    if not isinstance(text, str):
      raise ValueError(f"{where}.content: the text of a part is no string.")
    texts.append(text)
  return "".join(texts)


def _check_calls(calls: Any, role: str, where: str) -> None:
  where = f"{where}.tool_calls"
  if role != ASSISTANT:
    raise ValueError(f"{where} must be in a message of the assistant.")
  if not isinstance(calls, list | tuple):
    raise ValueError(f"{where} must be a list.")
  for i, call in enumerate(calls):
    function = call.get("function", call) if isinstance(call, Mapping) else {}
    if not isinstance(function, Mapping) or not isinstance(
      function.get("name"), str
    ):
      raise ValueError(
        f"{where}[{i}] must be an object with 'function', which has a 'name'."
      )
    if not isinstance(function.get("arguments", {}), str | Mapping):
      raise ValueError(
        f"{where}[{i}]: 'arguments' must be an object, or JSON in a string."
      )


def _add_context(
  fields: Mapping[str, Any], given: Conversation
) -> Conversation:
  """Returns messages with the record's other fields."""
  variables = {}
  for name in ("tools", "documents"):
    if found := _decode(fields, name, list, "a list of objects"):
      if not all(isinstance(each, Mapping) for each in found):
        raise ValueError(f"{name!r} must be a list of objects.")
      variables[name] = list(found)
  more = _decode(fields, "chat_template_kwargs", Mapping, "an object") or {}
  for name in more:
    if name in (*_RESERVED, *variables) or name.startswith("_"):
      raise ValueError(f"'chat_template_kwargs' must not have {name!r}.")
  variables |= more
  system = fields.get("system", "")
  if not isinstance(system, str):
    raise ValueError("'system' must be a string.")
  if not system:
    return dataclasses.replace(given, variables=variables)
  if given.messages and given.messages[0]["role"] in _SYSTEMS:
    raise ValueError(
      "'system' is a second system prompt: the messages begin with one, too."
    )
  first = Conversation(messages=[{"role": "system", "content": system}])
  return dataclasses.replace(first.extend(given), variables=variables)


def _decode(
  fields: Mapping[str, Any], name: str, kind: type, expected: str
) -> Any:
  """Returns a field, which may be JSON in a string, as in tables."""
  value = fields.get(name)
  if isinstance(value, str) and value:
    try:
      value = json.loads(value)
    except (ValueError, RecursionError) as error:
      raise ValueError(f"{name!r} is not JSON ({error}).") from error
  if value not in (None, "") and not isinstance(value, kind):
    raise ValueError(f"{name!r} must be {expected}, or JSON of it.")
  return value


def _drop_first(given: Conversation, count: int) -> Conversation:
  """Returns a conversation without its first messages."""
  trained = [i - count for i in given.trained if i >= count]
  return Conversation(messages=given.messages[count:], trained=trained)
