"""Conversations as examples: the loss is that of the assistant's turns.

A row of data has a conversation in one of two forms:

  {"messages": [{"role": "user", "content": "1 + 1?"},
                {"role": "assistant", "content": "2"}]}
  {"prompt": "1 + 1?", "completion": "2"}

`prompt` and `completion` are lists of messages, too, or strings: a message of
the user and one of the assistant. Turns of the assistant in the prompt have no
weight.
"""

from collections.abc import Mapping
import dataclasses
import enum
import json
from typing import Any

import numpy as np

from paxon.inputs import checks, example_source, json_lines, record_columns
from paxon.inputs.tokenizers import chat_template

_PROMPT = "prompt"
_COMPLETION = "completion"
_MESSAGES = "messages"
_FIRST = "first"


class TooLong(enum.Enum):
  """What becomes of a conversation that is longer than a sequence."""

  CUT_RIGHT = "cut_right"
  CUT_LEFT = "cut_left"
  DROP = "drop"
  ERROR = "error"


class MessageLines(json_lines.JsonLines):
  """Base of JSON lines that are documents of messages.

  Subclasses define `convert(row) -> bytes`, which raises ValueError, and
  `content`, what a row has.
  """

  def document(self, line: bytes, path: str) -> bytes:
    """Returns what a line has, as JSON.

    Raises:
      ValueError: The line has none.
    """
    fields: Any = self
    try:
      return fields.convert(json.loads(line))
    except (ValueError, RecursionError) as error:
      raise ValueError(
        f"{path}: a line has no {fields.content}: {error}"
      ) from error


@dataclasses.dataclass(frozen=True, kw_only=True)
class MessageRows:
  """Base of rows of tabular data, such as Parquet files, as `MessageLines`.

  Attributes:
    rows: The rows.
  """

  rows: record_columns.Rows

  def __len__(self) -> int:
    return len(self.rows)

  def __getitem__(self, index: int, /) -> bytes:
    """Returns what a row has, as JSON.

    Raises:
      ValueError: The row has none.
    """
    fields: Any = self
    try:
      return fields.convert(without_nulls(self.rows[index]))
    except ValueError as error:
      raise ValueError(
        f"{self.name(index)} has no {fields.content}: {error}"
      ) from error

  def name(self, index: int) -> str:
    """Returns the name of a row for messages."""
    return record_columns.name(self.rows, index)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Chats:
  text_key: str = _MESSAGES

  @property
  def content(self) -> str:
    """The key that a row must have."""
    return repr(self.text_key)

  def convert(self, row: Any) -> bytes:
    """Returns the conversation of a row."""
    return conversation(row, self.text_key)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatLines(_Chats, MessageLines):
  """Conversations in JSON lines, as documents of JSON.

  Attributes:
    text_key: The key of the messages in each line, if it has no prompt.
  """


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatRows(_Chats, MessageRows):
  """Conversations in rows of tabular data, such as Parquet files.

  Attributes:
    text_key: The column of the messages, if there is no prompt.
  """


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenizedChats(example_source.Tokenized):
  """Conversations as examples; only what the assistant wrote has weight.

  `cut_tokens` of an example is the number of tokens that were cut, at its first
  token and 0 at the others. A dropped conversation leaves one token without
  weight, so all tokens are counted and an index means the same for any length.

  Attributes:
    source: The conversations, such as `ChatLines`.
    template: The model's chat template.
    tokenizer: The model's tokenizer, a `TextTokenizer`.
    length: The maximum number of targets; None for any number.
    too_long: What becomes of a conversation with more.
  """

  source: example_source.DocumentSource
  template: chat_template.ChatTemplate
  tokenizer: Any
  length: int | None = None
  too_long: TooLong = TooLong.CUT_RIGHT

  def __post_init__(self) -> None:
    checks.check_positive(self, optional=["length"])

  def __getitem__(self, index: int, /) -> example_source.Example:
    """Returns arrays [n].

    These are `inputs`, `targets`, `target_bytes` and `cut_tokens`, int32, and
    `weights`, float32.

    Raises:
      ValueError: The template rejects the messages, the assistant wrote
        nothing, or the conversation is too long and `too_long` is ERROR.
    """
    messages, first = parse(self.source[index])
    try:
      ids, mask = self.template.tokenize(messages, self.tokenizer, first=first)
      if not mask[1:].any():
        raise ValueError(
          "The conversation has no turn of the assistant, so there is nothing"
          " to train on; remove it from the data."
        )
      example = fit(ids, mask, length=self.length, too_long=self.too_long)
    except ValueError as error:
      raise ValueError(f"{self._name(index)}: {error}") from error
    counts = self.tokenizer.byte_counts(example["targets"])
    return {**example, "target_bytes": np.asarray(counts, np.int32)}

  def _name(self, index: int) -> str:
    name = example_source.call_optional(self.source, "name", index)
    return f"Chat {index}" if name is None else name

  def signature(self) -> dict[str, Any]:
    """Returns the values on which the meaning of an index depends."""
    return {"num_chats": len(self)}

  def token_dtypes(self) -> dict[str, np.dtype]:
    """Returns the dtypes of an example's arrays."""
    keys = ("inputs", "targets", "target_bytes", "cut_tokens")
    integers = dict.fromkeys(keys, np.dtype(np.int32))
    return {**integers, "weights": np.dtype(np.float32)}


def fit(
  ids: np.ndarray,
  mask: np.ndarray,
  *,
  length: int | None,
  too_long: TooLong,
) -> example_source.Example:
  """Returns `inputs`, `targets`, `weights` and `cut_tokens` of a conversation.

  Args:
    ids: Its ids, int32 [T].
    mask: Which of them the assistant wrote.
    length: The maximum number of targets; None for any number.
    too_long: What becomes of a longer conversation.

  Raises:
    ValueError: It is too long, and `too_long` is ERROR.
  """
  count = len(ids) - 1
  cut = 0 if length is None else max(0, count - length)
  weights = mask[1:].astype(np.float32)
  kept = slice(0, count - cut)
  if cut and too_long is TooLong.ERROR:
    raise ValueError(
      f"The conversation has {count} tokens, and a sequence {length}; set a"
      " larger length, or cut or drop such conversations."
    )
  if cut and too_long is TooLong.DROP:
    kept, cut = slice(0, 1), count - 1
    weights = np.zeros_like(weights)
  elif too_long is TooLong.CUT_LEFT:
    kept = slice(cut, count)
  cut_tokens = np.zeros(count, np.int32)
  cut_tokens[kept.start] = cut
  example = {
    **example_source.lm_features(ids),
    "weights": weights,
    "cut_tokens": cut_tokens,
  }
  return {key: value[kept] for key, value in example.items()}


def conversation(row: Any, key: str = _MESSAGES) -> bytes:
  """Returns a row's messages as JSON, with the first that may be trained.

  Raises:
    ValueError: The row has neither messages nor a prompt with a completion.
  """
  if not isinstance(row, Mapping):
    raise ValueError("A chat must be an object.")
  if key not in row and _PROMPT in row:
    prompt = to_messages(row[_PROMPT], role="user", what=repr(_PROMPT))
    answer = to_messages(
      row.get(_COMPLETION), role="assistant", what=repr(_COMPLETION)
    )
    messages = [*prompt, *answer]
    return json.dumps({_MESSAGES: messages, _FIRST: len(prompt)}).encode()
  if key not in row:
    raise ValueError(
      f"It has {list(row)[:8]}. Give it a list of messages, or"
      f" {_PROMPT!r} and {_COMPLETION!r}."
    )
  messages = row[key]
  chat_template.check_messages(messages)
  return json.dumps(messages).encode()


def to_messages(value: Any, *, role: str, what: str) -> list[Any]:
  """Returns a list of messages; a string is one message of `role`.

  Raises:
    ValueError: The value, called `what`, is neither.
  """
  if isinstance(value, str):
    return [{"role": role, "content": value}]
  try:
    chat_template.check_messages(value)
  except ValueError as error:
    raise ValueError(f"{what} is no string: {error}") from error
  return list(value)


def parse(document: bytes) -> tuple[list[Any], int]:
  """Returns the messages of a `conversation`, and the first to train."""
  found = json.loads(document)
  if isinstance(found, dict):
    return found[_MESSAGES], found[_FIRST]
  return found, 0


def without_nulls(value: Any) -> Any:
  """Returns nested values without None, with which tables fill gaps."""
  if isinstance(value, Mapping):
    return {k: without_nulls(v) for k, v in value.items() if v is not None}
  if isinstance(value, list | tuple | np.ndarray):
    return [without_nulls(v) for v in value]
  return value
