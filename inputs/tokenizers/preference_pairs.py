"""Answers to prompts as examples of a preference loss.

A row of data has a pair of answers in one of three forms, or one answer with a
label; strings are one message of the user or of the assistant:

  {"prompt": "1 + 1?", "chosen": "2", "rejected": "3"}
  {"prompt": [messages], "chosen": [messages], "rejected": [messages]}
  {"chosen": [messages], "rejected": [messages]}
  {"prompt": "1 + 1?", "completion": "2", "label": true}

In the third form the prompt is the messages that both conversations begin with.
Turns of the assistant in the prompt have no weight.
"""

from collections.abc import Mapping
import dataclasses
import json
from typing import Any, Final

import numpy as np

from paxon.inputs import base_input, checks, unset_input
from paxon.inputs.sources import example_source
from paxon.inputs.tokenizers import chat_template, chats
from paxon.inputs.tokenizers import conversation as conversations

_ANSWERS = ("chosen", "rejected")
_PROMPT, _COMPLETION, _LABEL = "prompt", "completion", "label"
_CUT = "cut_tokens"
DESIRABLE: Final = "is_desirable"


class _Pairs:
  content = "pair"
  columns = (_PROMPT, *_ANSWERS)

  def convert(self, row: Any) -> bytes:
    """Returns the pair of a row."""
    return pair(row)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairLines(_Pairs, chats.MessageLines):
  """Pairs in JSON lines, as documents of JSON.

  Attributes:
    text_key: Unused.
  """

  text_key: str = _ANSWERS[0]


class PairRows(_Pairs, chats.MessageRows):
  """Pairs in rows of tabular data, such as Parquet files."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenizedPairs(example_source.Tokenized):
  """Pairs as examples of 2 T tokens, for `layers.models.preference_lm`.

  The conversation with the chosen answer is padded to T, and that with the
  rejected one follows. Pack them with `Packing.NONE`.

  Attributes:
    source: The pairs, such as `PairLines`.
    template: The model's chat template.
    tokenizer: The model's tokenizer, a `TextTokenizer`.
    length: T, the maximum number of targets of each conversation.
    too_long: Treatment of a longer conversation. If one of a pair is
      dropped or loses its answer, or both become equal, the pair has no
      weights.
    trained_turns: Which turns of an answer count.
  """

  source: example_source.DocumentSource
  template: chat_template.ChatTemplate
  tokenizer: Any
  length: int
  too_long: chats.TooLong = chats.TooLong.CUT_RIGHT
  trained_turns: chats.TrainedTurns = chats.TrainedTurns.ALL

  def __post_init__(self) -> None:
    checks.check_positive(self, "length")

  def __getitem__(self, index: int, /) -> example_source.Example:
    """Returns arrays [2 T].

    These are `inputs`, `targets`, `is_token` and `cut_tokens`, int32, and
    `weights`, float32.

    Raises:
      ValueError: The template rejects the messages, an answer has no tokens, or
        a conversation is too long and `too_long` is ERROR.
    """
    found = json.loads(self.source[index])
    answers = {k: found[k] for k in _ANSWERS}
    example = self.tokenize(index, found[_PROMPT], answers)
    chosen, rejected = (
      {key: part[half] for key, part in example.items() if key != _CUT}
      for half in (slice(self.length), slice(self.length, None))
    )
    is_equal = all(np.array_equal(chosen[k], rejected[k]) for k in chosen)
    if is_equal or not (chosen["weights"].any() and rejected["weights"].any()):
      example["weights"] = np.zeros_like(example["weights"])
    return example

  def tokenize(
    self, index: int, prompt: Mapping[str, Any], answers: Mapping[str, Any]
  ) -> example_source.Example:
    """Returns the arrays of two answers, by name, to a prompt."""
    halves, begin = [], conversations.from_dict(prompt)
    for key, answer in answers.items():
      given = begin.extend(conversations.from_dict(answer))
      try:
        ids, mask = self.template.tokenize_whole(
          self.trained_turns.select(given), self.tokenizer
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

  def token_dtypes(self) -> dict[str, np.dtype]:
    """Returns the dtypes of an example's arrays."""
    keys = ("inputs", "targets", "is_token", "cut_tokens")
    integers = dict.fromkeys(keys, np.dtype(np.int32))
    return {**integers, "weights": np.dtype(np.float32)}

  def num_tokens(self, index: int) -> int:
    """Returns 2 T, for any example."""
    del index
    return 2 * self.length


class _Labelled:
  content = "labelled answer"
  columns = (_PROMPT, _COMPLETION, _LABEL)

  def convert(self, row: Any) -> bytes:
    """Returns the answer of a row."""
    return format_labelled(row)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LabelledLines(_Labelled, chats.MessageLines):
  """Answers with labels in JSON lines, as documents of JSON.

  Attributes:
    text_key: Unused.
  """

  text_key: str = _LABEL


class LabelledRows(_Labelled, chats.MessageRows):
  """Answers with labels in rows of tabular data, such as Parquet files."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LabelledAnswers(TokenizedPairs):
  """Answers with labels as examples, for `layers.models.desirability_lm`.

  The first half is the prompt with its answer, the second the prompt with the
  answer of another row, half of the data away: with these the divergence from
  the reference is estimated. An index means the same in any batch. An example
  that loses its answer has no weights.
  """

  def __post_init__(self) -> None:
    super().__post_init__()
    if len(self.source) < 2:
      raise ValueError(
        "Labelled answers must be at least two, because each is compared with"
        f" the answer to another prompt, got {len(self.source)}."
      )

  def __getitem__(self, index: int, /) -> example_source.Example:
    """Returns the arrays of `TokenizedPairs` and `is_desirable` int32 [2 T].

    Raises:
      ValueError: See `TokenizedPairs`.
    """
    count = len(self)
    own, other = (
      json.loads(self.source[i]) for i in (index, (index + count // 2) % count)
    )
    answers = {
      _COMPLETION: own[_COMPLETION],
      "completion of another row": other[_COMPLETION],
    }
    found = self.tokenize(index, own[_PROMPT], answers)
    if not found["weights"][: self.length].any():
      found["weights"] = np.zeros_like(found["weights"])
    label = np.full(2 * self.length, own[_LABEL], np.int32)
    return {**found, DESIRABLE: label}

  def token_dtypes(self) -> dict[str, np.dtype]:
    """Returns the dtypes of an example's arrays."""
    return {**super().token_dtypes(), DESIRABLE: np.dtype(np.int32)}


@dataclasses.dataclass(kw_only=True, eq=False)
class UnsetPairs(unset_input.UnsetInput):
  """A placeholder for answers whose files are not configured.

  Attributes:
    has_labels: Whether they are `LabelledAnswers`.
  """

  has_labels: bool = False

  def batch_shapes(self) -> base_input.Shapes:
    """Returns the shapes of pairs."""
    shapes = dict(super().batch_shapes())
    del shapes["target_bytes"]
    shape = shapes["inputs"]
    names = ("is_token", "cut_tokens", *[DESIRABLE] * self.has_labels)
    return {**shapes, **dict.fromkeys(names, shape)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ContinuationPairs(example_source.Tokenized):
  """Pairs from text, to try a preference loss without data.

  The prompt is the beginning of a document; its own continuation is preferred
  to that of the document before.

  Attributes:
    source: The documents.
    tokenizer: The tokenizer.
    length: The tokens of each half.
    has_labels: Whether to add the labels of `LabelledAnswers`: the second half
      of every other example is first.
  """

  source: example_source.DocumentSource
  tokenizer: Any
  length: int
  has_labels: bool = False

  def __getitem__(self, index: int, /) -> example_source.Example:
    """Returns the arrays of `TokenizedPairs`, [2 length]."""
    own, other = (
      np.resize(self._tokens(i), self.length + 1)
      for i in (index, (index or len(self)) - 1)
    )
    middle = self.length // 2
    weights = (np.arange(self.length) >= middle).astype(np.float32)
    halves = [own, np.concatenate([own[:middle], other[middle:]])]
    more = {}
    if self.has_labels:
      label = 1 - index % 2
      more = {DESIRABLE: np.full(2 * self.length, label, np.int32)}
      halves = halves[:: 2 * label - 1]
    return {
      **more,
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


def pair(row: Any) -> bytes:
  """Returns a row's prompt and answers, lists of messages, as JSON.

  Raises:
    ValueError: The row has no such pair, or its answers are equal.
  """
  prompt, answers = conversations.read_answers(
    row, keys=_ANSWERS, what="A pair"
  )
  if answers[0].messages == answers[1].messages:
    raise ValueError(
      "The chosen and the rejected answer are equal, so there is nothing to"
      " prefer; remove the pair from the data."
    )
  found = dict(zip(_ANSWERS, answers, strict=True), prompt=prompt)
  return json.dumps({key: x.to_dict() for key, x in found.items()}).encode()


def format_labelled(row: Any) -> bytes:
  """Returns a row's prompt, answer and label as JSON.

  Raises:
    ValueError: The row has no such answer.
  """
  what = "A labelled answer"
  for key in (_PROMPT, _COMPLETION, _LABEL):
    if isinstance(row, Mapping) and row.get(key) is None:
      raise ValueError(f"{what} must have {key!r}, got {sorted(row)}.")
  prompt, (answer,) = conversations.read_answers(
    row, keys=[_COMPLETION], what=what
  )
  label = row[_LABEL]
  if not isinstance(label, bool | np.bool_):
    raise ValueError(f"'label' must be true or false, got {label!r}.")
  found = {
    _PROMPT: prompt.to_dict(),
    _COMPLETION: answer.to_dict(),
    _LABEL: bool(label),
  }
  return json.dumps(found).encode()
