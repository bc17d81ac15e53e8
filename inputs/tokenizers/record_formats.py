"""Other formats of conversations: ShareGPT and Alpaca, as `messages`.

  {"conversations": [{"from": "human", "value": "1 + 1?"},
                     {"from": "gpt", "value": "2"}]}
  {"instruction": "Add the numbers.", "input": "1 and 1", "output": "2"}

The format is named and never guessed. Roles of ShareGPT are those of FastChat
and LLaMA-Factory; the value of a `function_call` is JSON of one call of a tool,
or of a list. As there, an instruction of Alpaca and its input are joined
by a line break, and `history` is a list of earlier pairs of an instruction and
an answer. Both may have the text of a system message as `system`.
"""

from collections.abc import Callable, Mapping
import enum
import json
from typing import Any, Final

MESSAGES: Final = "messages"
_SYSTEM = "system"
_CALL = "function_call"
_ROLES: Mapping[str, str] = {
  **dict.fromkeys(("human", "user"), "user"),
  **dict.fromkeys(("gpt", "chatgpt", "assistant"), "assistant"),
  **dict.fromkeys(("observation", "tool"), "tool"),
  _CALL: "assistant",
  _SYSTEM: _SYSTEM,
}


class RecordFormat(enum.Enum):
  """The format of a conversation."""

  MESSAGES = MESSAGES
  SHAREGPT = "sharegpt"
  ALPACA = "alpaca"


# The key of the conversation, if there is one.
DEFAULT_KEYS: Mapping[RecordFormat, str | None] = {
  RecordFormat.MESSAGES: MESSAGES,
  RecordFormat.SHAREGPT: "conversations",
  RecordFormat.ALPACA: None,
}


def make_fields(form: str | None, key: str | None) -> dict[str, Any]:
  """Returns the fields `text_key` and `form` of a source of conversations.

  Args:
    form: The format; None for that of messages.
    key: The key of the conversation; None for the default of the format.

  Raises:
    ValueError: The format has no key, and one is given.
  """
  chosen = RecordFormat(form or MESSAGES)
  default = DEFAULT_KEYS[chosen]
  if default is None:
    if key is not None:
      raise ValueError(
        f"chat_format {chosen.value!r} has no key of messages; leave"
        f" messages_key ({key!r}) unset."
      )
    return {"form": chosen}
  fields: dict[str, Any] = {"text_key": key or default}
  # Stored configurations of the default format do not name it.
  return (
    fields if chosen is RecordFormat.MESSAGES else {**fields, "form": chosen}
  )


def to_messages(row: Any, form: RecordFormat, key: str) -> Any:
  """Returns a row with its conversation as `messages`.

  Args:
    row: An object of a line, or a row of a table.
    form: Its format.
    key: The key of the conversation; unused for ALPACA.

  Raises:
    ValueError: The row does not have the format.
  """
  if not isinstance(row, Mapping):
    raise ValueError(f"it must be an object, got {type(row).__name__}.")
  row = {name: value for name, value in row.items() if value is not None}
  convert: Callable[[dict[str, Any], str], list[dict[str, Any]]] = (
    _from_sharegpt if form is RecordFormat.SHAREGPT else _from_alpaca
  )
  if row.get(MESSAGES) and (form, key) != (RecordFormat.SHAREGPT, MESSAGES):
    raise ValueError(
      f"it has {MESSAGES!r} besides a chat of {form.value}; remove one."
    )
  system = _take_text(row, _SYSTEM, default="")
  messages = convert(row, key)
  if system:
    if messages[:1] and messages[0]["role"] == _SYSTEM:
      raise ValueError(
        f"it has {_SYSTEM!r} and a first message of that role; remove one."
      )
    messages.insert(0, {"role": _SYSTEM, "content": system})
  return {**row, MESSAGES: messages}


def _from_sharegpt(row: dict[str, Any], key: str) -> list[dict[str, Any]]:
  """Takes the messages out of a row."""
  if key not in row:
    raise ValueError(f"it has no {key!r}, only {sorted(row)[:8]}.")
  turns = row.pop(key)
  if not isinstance(turns, list):
    raise ValueError(f"{key!r} must be a list, got {type(turns).__name__}.")
  messages = []
  for number, turn in enumerate(turns):
    where = f"{key}[{number}]"
    if not isinstance(turn, Mapping):
      raise ValueError(f"{where} must be an object, got {type(turn).__name__}.")
    own = {name: value for name, value in turn.items() if value is not None}
    role = own.pop("from", None)
    if role not in _ROLES:
      raise ValueError(
        f"{where} has the unknown role {role!r} as 'from'; it must be one of"
        f" {', '.join(_ROLES)}."
      )
    text = _take_text(own, "value", where=f"{where}.")
    found = {"tool_calls": _to_calls(text, where)} if role == _CALL else {}
    found = found or {"content": text}
    messages.append({**own, "role": _ROLES[role], **found})
  return messages


def _to_calls(text: str, where: str) -> list[dict[str, Any]]:
  """Returns the calls of tools in a value of the role `function_call`."""
  try:
    found = json.loads(text)
  except (ValueError, RecursionError) as error:
    raise ValueError(f"{where}.value is not JSON ({error}).") from error
  calls = found if isinstance(found, list) else [found]
  if not calls or not all(isinstance(call, Mapping) for call in calls):
    raise ValueError(
      f"{where}.value must be JSON of an object with 'name' and 'arguments', or"
      f" of a list of them, got {text[:60]!r}."
    )
  return [{"type": "function", "function": call} for call in calls]


def _from_alpaca(row: dict[str, Any], key: str) -> list[dict[str, Any]]:
  """Takes the messages out of a row."""
  del key
  pairs = row.pop("history", [])
  if not isinstance(pairs, list) or not all(
    isinstance(pair, list | tuple)
    and len(pair) == 2
    and all(isinstance(text, str) for text in pair)
    for pair in pairs
  ):
    raise ValueError(
      "'history' must be a list of pairs of an instruction and an answer, got"
      f" {str(pairs)[:60]}."
    )
  parts = [_take_text(row, "instruction"), _take_text(row, "input", default="")]
  question = "\n".join(filter(None, parts))
  return [
    {"role": role, "content": text}
    for pair in [*pairs, (question, _take_text(row, "output"))]
    for role, text in zip(("user", "assistant"), pair, strict=True)
  ]


def _take_text(
  row: dict[str, Any],
  key: str,
  *,
  default: str | None = None,
  where: str = "",
) -> str:
  """Takes a string out of a row; raises ValueError if it is none."""
  text = row.pop(key, default)
  if text is None:
    raise ValueError(f"{where}{key} is missing; there is {sorted(row)[:8]}.")
  if not isinstance(text, str):
    raise ValueError(
      f"{where}{key} must be a string, got {type(text).__name__}."
    )
  return text
