"""Pairs of answers to one prompt as examples of a preference loss.

A row of data has a pair in one of three forms; strings are one message of the
user or of the assistant:

  {"prompt": "1 + 1?", "chosen": "2", "rejected": "3"}
  {"prompt": [messages], "chosen": [messages], "rejected": [messages]}
  {"chosen": [messages], "rejected": [messages]}

In the last form the prompt is the messages that both conversations begin with.
Turns of the assistant in the prompt have no weight.
"""

from collections.abc import Mapping
import dataclasses
import json
from typing import Any

import numpy as np

from paxon.inputs import (
  base_input,
  checks,
  example_source,
  json_lines,
  record_columns,
  unset_input,
)
from paxon.inputs.tokenizers import chat_template, chats

_ANSWERS = ("chosen", "rejected")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairLines(json_lines.JsonLines):
  """Pairs in JSON lines, as documents of JSON.

  Attributes:
    text_key: Unused.
  """

  text_key: str = _ANSWERS[0]

  def document(self, line: bytes, path: str) -> bytes:
    """Returns the pair of a line.

    Raises:
      ValueError: The line has none, or its answers are equal.
    """
    try:
      return pair(json.loads(line))
    except (ValueError, RecursionError) as error:
      raise ValueError(f"{path}: a line has no pair: {error}") from error


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairRows:
  """Pairs in rows of tabular data, such as Parquet files.

  Attributes:
    rows: The rows.
  """

  rows: record_columns.Rows

  def __len__(self) -> int:
    return len(self.rows)

  def __getitem__(self, index: int, /) -> bytes:
    """Returns a pair.

    Raises:
      ValueError: The row has none, or its answers are equal.
    """
    try:
      return pair(chats.without_nulls(self.rows[index]))
    except ValueError as error:
      raise ValueError(f"{self.name(index)} has no pair: {error}") from error

  def name(self, index: int) -> str:
    """Returns the name of a row for messages."""
    return record_columns.name(self.rows, index)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenizedPairs:
  """Pairs as examples of 2 T tokens, for `layers.models.preference_lm`.

  The conversation with the chosen answer is padded to T, and that with the
  rejected one follows. Pack them with `Packing.NONE`.

  Attributes:
    source: The pairs, such as `PairLines`.
    template: The model's chat template.
    tokenizer: The model's tokenizer, a `TextTokenizer`.
    length: T, the maximum number of targets of each conversation.
    too_long: What becomes of a longer conversation. If one of a pair is
      dropped, or loses its answer, the pair has no effect.
  """

  source: example_source.DocumentSource
  template: chat_template.ChatTemplate
  tokenizer: Any
  length: int
  too_long: chats.TooLong = chats.TooLong.CUT_RIGHT

  def __post_init__(self) -> None:
    checks.check_positive(self, "length")

  def __len__(self) -> int:
    return len(self.source)

  def __getitem__(self, index: int, /) -> example_source.Example:
    """Returns arrays [2 T].

    These are `inputs`, `targets`, `is_token` and `cut_tokens`, int32, and
    `weights`, float32.

    Raises:
      ValueError: The template rejects the messages, an answer has no tokens, or
        a conversation is too long and `too_long` is ERROR.
    """
    found = json.loads(self.source[index])
    first = len(found["prompt"])
    halves = []
    for key in _ANSWERS:
      try:
        ids, mask = self.template.tokenize(
          [*found["prompt"], *found[key]], self.tokenizer, first=first
        )
        if not mask[1:].any():
          raise ValueError("It has no turn of the assistant.")
        example = chats.fit(
          ids, mask, length=self.length, too_long=self.too_long
        )
      except ValueError as error:
        name = example_source.call_optional(self.source, "name", index)
        name = f"Pair {index}" if name is None else name
        raise ValueError(f"{name}, {key!r}: {error}") from error
      halves.append(self._pad(example))
    return {
      key: np.concatenate([half[key] for half in halves]) for key in halves[0]
    }

  def _pad(self, example: example_source.Example) -> example_source.Example:
    count = len(example["inputs"])
    is_token = np.ones(count, np.int32)
    pads = {"inputs": self.tokenizer.pad_id, "targets": self.tokenizer.pad_id}
    return {
      key: np.pad(
        value, (0, self.length - count), constant_values=pads.get(key, 0)
      )
      for key, value in {**example, "is_token": is_token}.items()
    }

  def signature(self) -> dict[str, Any]:
    """Returns the values on which the meaning of an index depends."""
    return {"num_pairs": len(self)}

  def required_vocab_size(self) -> int:
    """Returns the tokenizer's vocabulary size."""
    return self.tokenizer.vocab_size

  def token_dtypes(self) -> dict[str, np.dtype]:
    """Returns the dtypes of an example's arrays."""
    keys = ("inputs", "targets", "is_token", "cut_tokens")
    integers = dict.fromkeys(keys, np.dtype(np.int32))
    return {**integers, "weights": np.dtype(np.float32)}

  def num_tokens(self, index: int) -> int:
    """Returns 2 T, for any example."""
    del index
    return 2 * self.length


@dataclasses.dataclass(kw_only=True, eq=False)
class UnsetPairs(unset_input.UnsetInput):
  """A placeholder for pairs whose files are not configured."""

  def batch_shapes(self) -> base_input.Shapes:
    """Returns the shapes of pairs."""
    shapes = dict(super().batch_shapes())
    del shapes["target_bytes"]
    shape = shapes["inputs"]
    return {**shapes, "is_token": shape, "cut_tokens": shape}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ContinuationPairs:
  """Pairs from text, to try a preference loss without data.

  The prompt is the beginning of a document; its own continuation is preferred
  to that of the document before.

  Attributes:
    source: The documents.
    tokenizer: The tokenizer.
    length: The tokens of each half.
  """

  source: example_source.DocumentSource
  tokenizer: Any
  length: int

  def __len__(self) -> int:
    return len(self.source)

  def __getitem__(self, index: int, /) -> example_source.Example:
    """Returns the arrays of `TokenizedPairs`, [2 length]."""
    own, other = (
      np.resize(self._tokens(i), self.length + 1)
      for i in (index, (index or len(self)) - 1)
    )
    middle = self.length // 2
    weights = (np.arange(self.length) >= middle).astype(np.float32)
    halves = [own, np.concatenate([own[:middle], other[middle:]])]
    return {
      "inputs": np.concatenate([half[:-1] for half in halves]),
      "targets": np.concatenate([half[1:] for half in halves]),
      "weights": np.tile(weights, 2),
      "is_token": np.ones(2 * self.length, np.int32),
      "cut_tokens": np.zeros(2 * self.length, np.int32),
    }

  def _tokens(self, index: int) -> np.ndarray:
    begin = [self.tokenizer.begin_id]
    ids = self.tokenizer.encode(self.source[index])
    return np.concatenate([begin, ids]).astype(np.int32)

  def required_vocab_size(self) -> int:
    """Returns the tokenizer's vocabulary size."""
    return self.tokenizer.vocab_size


def pair(row: Any) -> bytes:
  """Returns a row's prompt and answers, lists of messages, as JSON.

  Raises:
    ValueError: The row has no such pair, or its answers are equal.
  """
  if not isinstance(row, Mapping):
    raise ValueError("A pair must be an object.")
  for key in _ANSWERS:
    if key not in row:
      raise ValueError(f"A pair must have {key!r}, got {sorted(row)}.")
  answers = [
    chats.to_messages(row[key], role="assistant", what=repr(key))
    for key in _ANSWERS
  ]
  if answers[0] == answers[1]:
    raise ValueError(
      "The chosen and the rejected answer are equal, so there is nothing to"
      " prefer; remove the pair from the data."
    )
  if "prompt" in row:
    prompt = chats.to_messages(row["prompt"], role="user", what="'prompt'")
  else:
    common = 0
    for one, other in zip(*answers, strict=False):
      if one != other:
        break
      common += 1
    prompt, answers = answers[0][:common], [x[common:] for x in answers]
  found = {"prompt": prompt, **dict(zip(_ANSWERS, answers, strict=True))}
  return json.dumps(found).encode()
