"""Texts of an encoder as examples: whole, with a label, or in pairs.

Each example is one sequence. Special tokens are those of the tokenizer's
vocabulary file, and a longer text is cut as transformers does.
"""

from collections.abc import Mapping
import dataclasses
import json
from typing import Any
import zlib

import numpy as np

from paxon.inputs import base_input, checks, tokenizer_protocol, unset_input
from paxon.inputs.sources import example_source, json_lines, record_columns

# Labels in an error.
_MAX_SHOWN = 8


class JsonRows(json_lines.JsonLines):
  """The objects in JSON lines, as rows."""

  # pyrefly: ignore[bad-override]
  def __getitem__(self, index: int, /) -> record_columns.Row:
    """Returns an object.

    Raises:
      ValueError: The line is not one; names the file and the line.
    """
    return json.loads(super().__getitem__(index))

  def document(self, line: bytes, path: str) -> bytes:
    """Returns the line.

    Raises:
      ValueError: It is not a JSON object.
    """
    try:
      row = json.loads(line)
    except (ValueError, RecursionError) as error:
      raise ValueError(f"{path}: a line is no JSON ({error}).") from error
    if not isinstance(row, dict):
      raise ValueError(f"{path}: a line is no JSON object.")
    return line


@dataclasses.dataclass(frozen=True, kw_only=True)
class DocumentRows:
  """Documents as rows.

  Attributes:
    source: The documents.
    key: Their column.
    pair_key: Column of the second half of each document; None for no halves.
    label_key: Column of a number that depends on the text, to try a classifier
      without data, or None.
    num_labels: Labels are below it.
  """

  source: example_source.DocumentSource
  key: str
  pair_key: str | None = None
  label_key: str | None = None
  num_labels: int = 2

  def __len__(self) -> int:
    return len(self.source)

  def name(self, index: int) -> str:
    """Returns the name of a document for messages."""
    found = example_source.call_optional(self.source, "name", index)
    return f"text {index}" if found is None else found

  def __getitem__(self, index: int, /) -> record_columns.Row:
    """Returns a document by its columns."""
    data = self.source[index]
    text = data.decode(errors="replace")
    row: dict[str, Any] = {self.key: text}
    if self.pair_key is not None:
      middle = len(text) // 2
      row |= {self.key: text[:middle], self.pair_key: text[middle:]}
    if self.label_key is not None:
      row[self.label_key] = zlib.crc32(data) % self.num_labels
    return row


@dataclasses.dataclass(frozen=True, kw_only=True)
class WholeDocuments(example_source.TokenizedDocuments):
  """Documents for a masked language model: BEGIN, the tokens, END."""

  def __getitem__(self, index: int, /) -> example_source.Example:
    """Returns `inputs`, `targets` (the same) and `target_bytes`, int32 [n]."""
    tokens = self._tokens(index)
    counts = np.asarray(self.tokenizer.byte_counts(tokens), np.int32)
    return {"inputs": tokens, "targets": tokens, "target_bytes": counts}


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderTexts(example_source.Tokenized):
  """Rows with a text as examples, one in each sequence.

  Attributes:
    source: The rows, such as `JsonRows`.
    tokenizer: The tokenizer.
    length: The maximum number of tokens, special ones included.
    key: Column of the text.
    pair_key: Column of a second text, or None.
    is_separate: Whether the second text is a separate sequence, in arrays
      that begin with `encoder_`, instead of the end of the first.
    label_key: Column of the label, a name in `labels` or its number; None for
      rows without a label.
    labels: The names of the labels.
    prompt: Text before each text.
    lower_case: Whether to convert texts to lower case.
  """

  source: record_columns.Rows
  tokenizer: Any
  length: int
  key: str = "text"
  pair_key: str | None = None
  is_separate: bool = False
  label_key: str | None = None
  labels: tuple[str, ...] = ()
  prompt: str = ""
  lower_case: bool = False

  def __post_init__(self) -> None:
    checks.check_positive(self, "length")

  def signature(self) -> dict[str, Any]:
    """Returns the values on which the meaning of an index depends."""
    return {"num_texts": len(self)}

  def check(self) -> None:
    """Raises ValueError if a row has no label, or an unknown one."""
    if self.label_key is not None:
      for index in range(len(self.source)):
        self._find_label(index, self.source[index])

  def __getitem__(self, index: int, /) -> example_source.Example:
    """Returns arrays [n], int32, and numbers.

    These are `inputs`, `targets` (the same), `type_ids` and `cut_tokens`: the
    number of tokens that were cut, at the first token; `labels` (0 without),
    int32; and `example_weights` (0 without a label or pair) and `is_example`
    (1), float32. A separate second text has `encoder_inputs` [m].

    Raises:
      ValueError: A column is missing or empty, or the label is unknown.
    """
    row = self.source[index]
    first = self._find_text(index, row, self.key)
    second = None
    if self.pair_key is not None:
      second = self._find_text(index, row, self.pair_key)
    label = self._find_label(index, row)
    also = None if self.is_separate else second
    ids, types, cut = self._encode(first, also)
    cuts = np.zeros_like(ids)
    cuts[0] = cut
    has_target = self.label_key is not None or second is not None
    example = {
      "inputs": ids,
      "targets": ids,
      "type_ids": types,
      "cut_tokens": cuts,
      "labels": np.asarray(label, np.int32),
      "example_weights": np.asarray(has_target, np.float32),
      "is_example": np.asarray(1, np.float32),
    }
    if self.is_separate and second is not None:
      other, _, more = self._encode(second, None)
      example["encoder_inputs"] = other
      cuts[0] += more
    return example

  def _find_text(self, index: int, row: Mapping[str, Any], key: str) -> str:
    text = row.get(key)
    if isinstance(text, bytes):
      text = text.decode(errors="replace")
    if not isinstance(text, str):
      texts = [name for name, value in row.items() if isinstance(value, str)]
      what = "is missing" if key not in row else f"is {_show(text)}"
      raise ValueError(
        f"{self.name(index)}: {key!r} {what}; it must be a text. Columns with"
        f" texts: {texts[:_MAX_SHOWN]}."
      )
    if not text.strip():
      raise ValueError(f"{self.name(index)}: {key!r} is empty.")
    return text

  def _find_label(self, index: int, row: Mapping[str, Any]) -> int:
    if self.label_key is None:
      return 0
    value, count = row.get(self.label_key), len(self.labels)
    if isinstance(value, str) and value in self.labels:
      return self.labels.index(value)
    if type(value) is int and 0 <= value < count:
      return value
    what = f"is {_show(value)}" if self.label_key in row else "is missing"
    shown = ", ".join(map(repr, self.labels[:_MAX_SHOWN]))
    more = ", ..." if count > _MAX_SHOWN else ""
    raise ValueError(
      f"{self.name(index)}: {self.label_key!r} {what}; it must be one of"
      f" {shown}{more}, or a number from 0 to {count - 1}."
    )

  def _encode(
    self, text: str, pair: str | None
  ) -> tuple[np.ndarray, np.ndarray, int]:
    """Returns ids and types [T], and the number of tokens that were cut."""
    encode = self._encode_pair
    if isinstance(self.tokenizer, tokenizer_protocol.EncodesPairs):
      encode = self.tokenizer.encode_pair
    return encode(
      self.prompt + text, pair, length=self.length, lower_case=self.lower_case
    )

  def _encode_pair(
    self, text: str, pair: str | None, *, length: int, lower_case: bool
  ) -> tuple[np.ndarray, np.ndarray, int]:
    """Returns the input for a vocabulary without rules for texts.

    It is BEGIN, the text and END, then the second text and END.
    """
    tokenizer = self.tokenizer
    parts = [
      tokenizer.encode(x.lower() if lower_case else x).tolist()
      for x in (text, pair)
      if x is not None
    ]
    cut = max(0, sum(map(len, parts)) + 1 + len(parts) - length)
    if cut > sum(map(len, parts)):
      raise ValueError(f"{length} tokens are too few for a text.")
    for _ in range(cut):
      sizes = [len(part) for part in parts]
      parts[sizes.index(max(sizes))].pop()
    ids, types = [tokenizer.begin_id], [0]
    for number, part in enumerate(parts):
      ids += [*part, tokenizer.end_id]
      types += [number] * (len(part) + 1)
    return np.asarray(ids, np.int32), np.asarray(types, np.int32), cut


def find_labels(rows: record_columns.Rows, key: str) -> list[str | int]:
  """Returns the different labels of rows, sorted.

  Raises:
    ValueError: A row cannot be read, or has no label.
  """
  found = set()
  for index in range(len(rows)):
    value = rows[index].get(key)
    if not isinstance(value, str | int):
      raise ValueError(
        f"{record_columns.name(rows, index)}: {key!r} is {_show(value)}; it"
        " must be the name of a label, or its number."
      )
    found.add(value)
  return sorted(found, key=lambda value: (isinstance(value, str), value))


def _show(value: Any) -> str:
  text = repr(value)
  return text if len(text) <= 60 else f"{text[:60]}..."


@dataclasses.dataclass(kw_only=True, eq=False)
class UnsetTexts(unset_input.UnsetInput):
  """A placeholder for `EncoderTexts` whose files are not configured."""

  def batch_shapes(self) -> base_input.Shapes:
    """Returns the shapes of one example in each sequence."""
    shapes = dict(super().batch_shapes())
    del shapes["target_bytes"]
    tokens, count = shapes["inputs"], self.per_host_batch_size
    numbers = {"labels": np.int32}
    numbers |= dict.fromkeys(("example_weights", "is_example"), np.float32)
    return {
      **shapes,
      **dict.fromkeys(("type_ids", "cut_tokens"), tokens),
      **{key: ((count,), np.dtype(dtype)) for key, dtype in numbers.items()},
    }
