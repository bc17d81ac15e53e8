"""Conversations as examples: the loss is that of the assistant's turns.

A row of data has a conversation in one of two forms:

  {"messages": [{"role": "user", "content": "1 + 1?"},
                {"role": "assistant", "content": "2"}]}
  {"prompt": "1 + 1?", "completion": "2"}

`prompt` and `completion` are lists of messages, too, or strings: a message of
the user and one of the assistant. Turns of the assistant in the prompt have no
weight. `conversation` has all fields of a row and its messages.
"""

import abc
from collections.abc import Mapping
import dataclasses
import enum
import functools
import json
from typing import Any, ClassVar

import numpy as np

from paxon.inputs import checks
from paxon.inputs.sources import example_source, json_lines, record_columns
from paxon.inputs.tokenizers import chat_template, record_formats
from paxon.inputs.tokenizers import conversation as conversations

_MESSAGES = conversations.MESSAGES


class TrainedTurns(enum.Enum):
  """Which turns of the assistant have a loss."""

  ALL = "all"
  LAST = "last"

  def select(
    self, given: conversations.Conversation
  ) -> conversations.Conversation:
    """Returns a conversation with these turns alone to train."""
    if self is TrainedTurns.ALL:
      return given
    return dataclasses.replace(given, trained=given.trained[-1:])


class TooLong(enum.Enum):
  """Treatment of a conversation that is longer than a sequence."""

  CUT_RIGHT = "cut_right"
  CUT_LEFT = "cut_left"
  DROP = "drop"
  ERROR = "error"


class _Unused(abc.ABC):
  """Base of sources that list columns which they do not use, once each."""

  @property
  @abc.abstractmethod
  def columns(self) -> tuple[str, ...]:
    """The columns that may be read."""

  @property
  @abc.abstractmethod
  def content(self) -> str:
    """The required part of a row, for messages."""

  @abc.abstractmethod
  def convert(self, row: Any) -> bytes:
    """Returns the content of a row, as JSON.

    Raises:
      ValueError: The row has none.
    """

  @functools.cached_property
  def _listed(self) -> set[str]:
    return set()

  def to_record(self, row: Any) -> Any:
    """Returns a row in the format of messages."""
    return row

  def find_columns(self, row: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the columns of a row that are read."""
    del row
    return self.columns

  def _list_unused(self, row: Any, name: str) -> None:
    """Prints the columns of a row that no other row had."""
    if not isinstance(row, Mapping):
      return
    record = self.to_record(row)
    found = conversations.find_unused(record, self.find_columns(record))
    found = [column for column in found if column not in self._listed]
    if found:
      self._listed.update(found)
      print(f"{name}: not used: {', '.join(found)}", flush=True)


class MessageLines(_Unused, json_lines.JsonLines):
  """Base of JSON lines that are documents of messages."""

  def document(self, line: bytes, path: str) -> bytes:
    """Returns the content of a line, as JSON.

    Raises:
      ValueError: The line has none.
    """
    try:
      row = json.loads(line)
      found = self.convert(row)
      self._list_unused(row, path)
      return found
    except (ValueError, RecursionError) as error:
      raise ValueError(
        f"{path}: a line has no {self.content}: {error}"
      ) from error


@dataclasses.dataclass(frozen=True, kw_only=True)
class MessageRows(_Unused):
  """Base of rows of tabular data, such as Parquet files, as `MessageLines`.

  Attributes:
    rows: The rows.
  """

  rows: record_columns.Rows

  def __len__(self) -> int:
    return len(self.rows)

  def __getitem__(self, index: int, /) -> bytes:
    """Returns the content of a row, as JSON.

    Raises:
      ValueError: The row has none.
    """
    row = conversations.to_plain(self.rows[index])
    try:
      found = self.convert(row)
      self._list_unused(row, self.name(index))
      return found
    except ValueError as error:
      raise ValueError(
        f"{self.name(index)} has no {self.content}: {error}"
      ) from error

  def name(self, index: int) -> str:
    """Returns the name of a row for messages."""
    return record_columns.name(self.rows, index)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Chats:
  text_key: str = _MESSAGES
  form: record_formats.RecordFormat = record_formats.RecordFormat.MESSAGES

  @property
  def content(self) -> str:
    """The key that a row must have, or its format."""
    is_plain = self.form is record_formats.RecordFormat.MESSAGES
    return repr(self.text_key) if is_plain else f"chat of {self.form.value}"

  @property
  def columns(self) -> tuple[str, ...]:
    """The columns that are read."""
    is_plain = self.form is record_formats.RecordFormat.MESSAGES
    key = self.text_key if is_plain else _MESSAGES
    return key, conversations.PROMPT, conversations.COMPLETION

  def find_columns(self, row: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the columns of a row that are read."""
    key = self.columns[0]
    return self.columns if row.get(key) is None else (key,)

  def to_record(self, row: Any) -> Any:
    """Returns a row with its conversation as messages."""
    if self.form is record_formats.RecordFormat.MESSAGES:
      return row
    return record_formats.to_messages(row, self.form, self.text_key)

  def convert(self, row: Any) -> bytes:
    """Returns the conversation of a row."""
    return conversation(self.to_record(row), self.columns[0])


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatLines(_Chats, MessageLines):
  """Conversations in JSON lines, as documents of JSON.

  Attributes:
    text_key: The key of the messages in each line, if it has no prompt.
    form: The format of the conversations.
  """


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatRows(_Chats, MessageRows):
  """Conversations in rows of tabular data, such as Parquet files.

  Attributes:
    text_key: The column of the messages, if there is no prompt.
    form: The format of the conversations.
  """


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptLines(MessageLines):
  """Prompts in JSON lines, for the answers of a model.

  Attributes:
    text_key: The key of the messages, or of the text of a user, in each line.
  """

  text_key: str = conversations.PROMPT

  @property
  def content(self) -> str:
    """The key that a row must have."""
    return repr(self.text_key)

  @property
  def columns(self) -> tuple[str, ...]:
    """The column that is read."""
    return (self.text_key,)

  def convert(self, row: Any) -> bytes:
    """Returns the prompt of a row."""
    found = conversations.read_prompt(row, key=self.text_key)
    return json.dumps(found.to_dict()).encode()


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenizedChats(example_source.Tokenized):
  """Conversations as examples; only what the assistant wrote has weight.

  A chat template that changes earlier turns needs a sequence for each turn. An
  example then has several, one after the other, and `part`, the number of the
  sequence of each token, by which `example_stream.Examples` separates them.

  `cut_tokens` of an example is the number of tokens that were cut, at its first
  token and 0 at the others. A dropped conversation leaves one token without
  weight, so all tokens are counted and an index means the same for any length.

  Attributes:
    source: The conversations, such as `ChatLines`.
    template: The model's chat template.
    tokenizer: The model's tokenizer, a `TextTokenizer`.
    length: The maximum number of targets; None for any number.
    too_long: Treatment of a conversation with more.
    trained_turns: Which turns of the assistant have a loss.
  """

  source: example_source.DocumentSource
  template: chat_template.ChatTemplate
  tokenizer: Any
  length: int | None = None
  too_long: TooLong = TooLong.CUT_RIGHT
  trained_turns: TrainedTurns = TrainedTurns.ALL
  has_parts: ClassVar[bool] = True

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
    given = self.trained_turns.select(parse(self.source[index]))
    try:
      found = self.template.sequences(given, self.tokenizer)
      if not found and _has_answer(given):
        found = [self._tokenize_without_loss(given)]
      elif not any(mask[1:].any() for _, mask in found):
        raise ValueError(
          "The conversation has no turn of the assistant, so there is nothing"
          " to train on; remove it from the data."
        )
      parts = [
        fit(ids, mask, length=self.length, too_long=self.too_long)
        for ids, mask in found
      ]
    except ValueError as error:
      raise ValueError(f"{self._name(index)}: {error}") from error
    example = example_source.join_parts(parts)
    counts = self.tokenizer.byte_counts(example["targets"])
    return {**example, "target_bytes": np.asarray(counts, np.int32)}

  def _tokenize_without_loss(
    self, given: conversations.Conversation
  ) -> chat_template.Tokens:
    """Returns the first ids of a conversation whose turns have the weight 0."""
    text = self.template(
      given.messages, add_generation_prompt=False, **given.variables
    )
    ids = self.tokenizer.encode_special(text)[:2]
    return ids, np.zeros(len(ids), bool)

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


def _has_answer(given: conversations.Conversation) -> bool:
  return any(m["role"] == conversations.ASSISTANT for m in given.messages)


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
    too_long: Treatment of a longer conversation.

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
  """Returns a row's conversation as JSON.

  Raises:
    ValueError: The row has neither messages nor a prompt with a completion, or
      a field that is not supported.
  """
  return json.dumps(conversations.read(row, key=key).to_dict()).encode()


def parse(document: bytes) -> conversations.Conversation:
  """Returns the conversation of a document."""
  return conversations.from_dict(json.loads(document))
