"""The interface of tokenizers that are read from a vocabulary file.

A backend defines how its library encodes and decodes; this module defines what
all of them share: begin and end ids by the model's own configuration, the bytes
of each token, checked ids, a content hash, and incremental decoding.
"""

import abc
import codecs
from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import functools
import json
import os
import re
from typing import Any

import numpy as np
import numpy.typing as npt

from paxon.inputs import tokenizer_protocol
from paxon.inputs.sources import record_files

# Beside the vocabulary, in a Hugging Face folder.
_CONFIG = "tokenizer_config.json"
_MAP = "special_tokens_map.json"
# Names of the begin and end token where no configuration names them.
_BEGINS = ("<s>", "<bos>", "<|begin_of_text|>", "<|startoftext|>", "[CLS]")
_ENDS = (
  *("</s>", "<eos>", "<|end_of_text|>", "<|endoftext|>", "<|im_end|>"),
  *("<end_of_turn>", "[SEP]"),
)
_PADS = ("<pad>", "[PAD]", "<|pad|>", "<|finetune_right_pad_id|>")
# Characters of a text in an error.
_EXCERPT = 60
_SURROGATES = re.compile("([\ud800-\udfff]+)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy:
  """The special tokens of a model, as its configuration names them.

  Attributes:
    begin: The token before a text, None if unknown.
    end: The token after a text, None if unknown.
    pad: The token of padding, None if unknown.
    add_begin: Whether a prompt begins with `begin`, unless the vocabulary file
      says so itself; None for the custom of the file's kind.
    add_end: Whether a prompt ends with `end`, likewise.
  """

  begin: str | None = None
  end: str | None = None
  pad: str | None = None
  add_begin: bool | None = None
  add_end: bool | None = None


def read_policy(folder: str) -> Policy:
  """Returns the policy in `tokenizer_config.json`, if the folder has one.

  Raises:
    ValueError: A file is not a JSON object, or a value is of another type.
  """
  found = {**read_json(folder, _MAP), **read_json(folder, _CONFIG)}
  where = os.path.join(folder, _CONFIG)

  def name(key: str) -> str | None:
    value = found.get(key)
    # A token is a string, or an object with its text in `content`.
    text = value.get("content") if isinstance(value, dict) else value
    # JSON can encode lone surrogates, which no text has.
    is_text = isinstance(text, str) and not _SURROGATES.search(text)
    if text is not None and not is_text:
      raise ValueError(f"{where}: {key} must be a text, got {text!r}.")
    return text

  def flag(key: str) -> bool | None:
    value = found.get(key)
    if value is not None and not isinstance(value, bool):
      raise ValueError(f"{where}: {key} must be a boolean, got {value!r}.")
    return value

  return Policy(
    begin=name("bos_token"),
    end=name("eos_token"),
    pad=name("pad_token"),
    add_begin=flag("add_bos_token"),
    add_end=flag("add_eos_token"),
  )


def read_json(folder: str, name: str) -> dict[str, Any]:
  """Returns the object in a JSON file, empty if there is no such file.

  Raises:
    ValueError: The file is not a JSON object.
  """
  path = os.path.join(folder, name)
  if not os.path.isfile(path):
    return {}
  with open(path, encoding="utf-8") as file:
    try:
      found = json.load(file)
    except (ValueError, RecursionError) as error:
      raise ValueError(f"{path} is not JSON ({error}).") from error
  if not isinstance(found, dict):
    raise ValueError(f"{path} must be a JSON object.")
  return found


def read_added_tokens(path: str) -> dict[str, int]:
  """Returns the tokens that a Hugging Face folder adds to a vocabulary file.

  Raises:
    ValueError: A file of the folder is not a JSON object.
  """
  folder = os.path.dirname(path)
  listed = read_json(folder, _CONFIG).get("added_tokens_decoder") or {}
  return {
    **read_json(folder, "added_tokens.json"),
    **{token["content"]: int(number) for number, token in listed.items()},
  }


def split_at(
  text: str, names: Mapping[str, int]
) -> Iterator[tuple[str, int | None]]:
  """Yields stretches of text, each with the id of the token that follows it.

  `names` are ids of special tokens; the last stretch has None.
  """
  longest_first = sorted(filter(None, names), key=len, reverse=True)
  pattern = "|".join(map(re.escape, longest_first)) or r"(?!)"
  start = 0
  for match in re.finditer(pattern, text):
    yield text[start : match.start()], names[match[0]]
    start = match.end()
  yield text[start:], None


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextTokenizer(record_files.PickledFields, abc.ABC):
  """A tokenizer that is read from a file when it is first used.

  It is pickled by its fields, so each worker process reads the file itself.

  Attributes:
    path: The vocabulary file. Files beside it name its special tokens.
    begin: The token before a text; None takes the one that the model's
      configuration names, or a customary one, or `end`.
    end: The token after a text; None takes the configuration's, or a customary
      one.
    padded_size: The number of ids that the model embeds; None for those of the
      vocabulary. Of a larger number, for sharding, the added ids decode to
      nothing. With a smaller one, a text with another token is an error.
  """

  path: str
  begin: str | None = None
  end: str | None = None
  padded_size: int | None = None

  @property
  def is_byte_level(self) -> bool:
    """Whether the decoded text is the concatenated bytes of the tokens."""
    return False

  @property
  @abc.abstractmethod
  def is_lossless(self) -> bool:
    """Whether `decode(encode(text))` is `text` for every text."""

  @property
  @abc.abstractmethod
  def special_ids(self) -> frozenset[int]:
    """Ids that stand for no text, such as begin, end and padding."""

  @property
  @abc.abstractmethod
  def content_hash(self) -> str:
    """A hash of the vocabulary that does not depend on the file's format."""

  @abc.abstractmethod
  def find_id(self, token: str) -> int | None:
    """Returns the id of a token, None if the vocabulary does not have it."""

  @abc.abstractmethod
  def find_token(self, number: int) -> str | None:
    """Returns the name of an id's token, None if it has none."""

  @property
  @abc.abstractmethod
  def _size(self) -> int:
    """The largest id plus one."""

  @property
  @abc.abstractmethod
  def _token_bytes(self) -> Sequence[bytes]:
    """The bytes of text of each id; special ids and unused ones have none."""

  @abc.abstractmethod
  def _encode(self, text: str, *, special: bool) -> list[int]:
    """Returns ids; with `special`, names of special tokens become their ids."""

  @abc.abstractmethod
  def _decode(self, ids: list[int]) -> str:
    """Returns the text of checked ids, special ones left out."""

  def count_unsettled(self, ids: Sequence[int]) -> int:
    """Returns how many last ids have text that later ids may change."""
    del ids
    return 0

  @property
  def vocab_size(self) -> int:
    """The number of ids; they are 0 to `vocab_size - 1`.

    Texts have those below `padded_size` only.
    """
    return self._size

  @property
  def pad_id(self) -> int:
    """The id of padding; `end_id` if the vocabulary or the model has none."""
    found = self._find(self._policy.pad, _PADS)
    # Many folders add a token of padding that their model does not embed.
    return self.end_id if found is None or self._is_beyond(found) else found

  @property
  def begin_id(self) -> int:
    """The id before the first token of a document.

    A model that has no such token, such as GPT-2, uses `end_id`.
    """
    if self.begin is not None:
      return self._find_known(self.begin, "begin")
    found = self._find(self._policy.begin, _BEGINS)
    return (
      self.end_id if found is None else self._check_embedded(found, "begins")
    )

  @property
  def end_id(self) -> int:
    """The id after the last token of a document.

    Raises:
      ValueError: Neither `end` nor a configuration names it.
    """
    if self.end is not None:
      return self._find_known(self.end, "end")
    found = self._find(self._policy.end, _ENDS)
    if found is None:
      raise ValueError(
        f"{self.path} names no token that ends a text; give its name as"
        f" {type(self).__name__}.end."
      )
    return self._check_embedded(found, "ends")

  def encode(self, text: str | bytes) -> npt.NDArray[np.int32]:
    """Returns the ids of `text`, int32 [T], without begin and end ids.

    Names of special tokens in the text are read as the vocabulary's own
    library reads them by default. Invalid UTF-8 becomes the ids of its bytes in
    a byte-level vocabulary, and U+FFFD in others.
    """
    if isinstance(text, bytes):
      return self._encode_bytes(text)
    return self._ids(text, special=False)

  def encode_special(self, text: str) -> npt.NDArray[np.int32]:
    """Returns the ids of text in which names of special tokens are such tokens.

    For chat templates, whose text contains them; adds no begin or end id.
    """
    return self._ids(text, special=True)

  def encode_prompt(self, text: str) -> npt.NDArray[np.int32]:
    """Returns the ids of a prompt, int32 [T], begun as the model expects it.

    Begin and end ids are added if the model's configuration adds them.
    """
    ids = self._ids(text, special=True)
    begin = [self.begin_id] if self._policy.add_begin else []
    end = [self.end_id] if self._policy.add_end else []
    return to_array([*begin, *ids, *end])

  def decode(self, ids: npt.ArrayLike) -> str:
    """Returns the text of ids [T]; special ids are left out.

    Raises:
      ValueError: An id is not in the vocabulary.
    """
    return self._decode(self.text_ids(ids))

  def text_ids(self, ids: npt.ArrayLike) -> list[int]:
    """Returns the ids that stand for text, checked.

    Raises:
      ValueError: An id is not in the vocabulary.
    """
    checked = self._check(ids)
    kept = checked[~self._is_special[checked]]
    return kept.tolist()

  def decode_bytes(self, ids: npt.ArrayLike) -> bytes:
    """Returns the concatenated bytes of ids [T], without the special ones."""
    table = self._token_bytes
    return b"".join(table[number] for number in self.text_ids(ids))

  def byte_counts(self, ids: npt.ArrayLike) -> npt.NDArray[np.int32]:
    """Returns the number of bytes of each id's text, int32, of ids' shape.

    Raises:
      ValueError: An id is not in the vocabulary.
    """
    return self._byte_counts[self._check(ids)]

  @functools.cached_property
  def _byte_counts(self) -> npt.NDArray[np.int32]:
    counts = [len(token) for token in self._token_bytes]
    return np.asarray(counts + [0] * (self._num_ids - len(counts)), np.int32)

  @functools.cached_property
  def _is_special(self) -> npt.NDArray[np.bool_]:
    found = np.arange(self._num_ids) >= self._size
    found[sorted(self.special_ids)] = True
    return found

  @functools.cached_property
  def _num_ids(self) -> int:
    return max(self._size, self.padded_size or 0)

  @functools.cached_property
  def _policy(self) -> Policy:
    return read_policy(os.path.dirname(self.path))

  @functools.cached_property
  def _ids_of_bytes(self) -> Mapping[int, int]:
    """The ids of single bytes, in a byte-level vocabulary."""
    table = enumerate(self._token_bytes)
    found = {token[0]: i for i, token in table if len(token) == 1}
    return found if self.is_byte_level else {}

  def _encode_bytes(self, data: bytes) -> npt.NDArray[np.int32]:
    try:
      return self._ids(data.decode(), special=False)
    except UnicodeDecodeError:
      pass
    ids_of = self._ids_of_bytes
    if len(ids_of) < 256:
      return self._ids(data.decode(errors="replace"), special=False)
    ids: list[int] = []
    # Each invalid byte is a surrogate in this text.
    for part in _SURROGATES.split(data.decode(errors="surrogateescape")):
      if _SURROGATES.match(part):
        ids += [ids_of[b] for b in part.encode(errors="surrogateescape")]
      elif part:
        ids += self._encode(part, special=False)
    return self._to_embedded(ids, data.decode(errors="replace"))

  def _ids(self, text: str, *, special: bool) -> npt.NDArray[np.int32]:
    valid = to_valid(text)
    return self._to_embedded(self._encode(valid, special=special), valid)

  def _to_embedded(
    self, ids: Sequence[int], text: str
  ) -> npt.NDArray[np.int32]:
    """Returns the ids of a text, [T]; raises ValueError if one is too large."""
    array = to_array(ids)
    if not self._is_beyond(self._size - 1) or not array.size:
      return array
    number = int(array.max())
    if self._is_beyond(number):
      name = self.find_token(number)
      at = max(0, text.find(name) - _EXCERPT // 2) if name else 0
      raise ValueError(
        f"The text {text[at : at + _EXCERPT]!r} has the token {name!r}, whose"
        f" id {number} the model does not embed: it has {self.padded_size} ids;"
        " leave that token out."
      )
    return array

  def _is_beyond(self, number: int) -> bool:
    """Whether the model does not embed an id."""
    return self.padded_size is not None and number >= self.padded_size

  def _check_embedded(self, number: int, does: str) -> int:
    """Returns an id; raises ValueError if the model does not embed it."""
    if self._is_beyond(number):
      raise ValueError(
        f"{self.path}: the token that {does} a text,"
        f" {self.find_token(number)!r}, has the id {number}, which the model"
        f" does not embed: it has {self.padded_size} ids; name another one in"
        f" {_CONFIG}."
      )
    return number

  def _find_known(self, token: str, field: str) -> int:
    found = self.find_id(token)
    if found is None:
      raise ValueError(
        f"{type(self).__name__}.{field} is {token!r}, which is not in the"
        f" vocabulary {self.path}."
      )
    return self._check_embedded(found, f"{field}s")

  def _find(self, name: str | None, customary: Sequence[str]) -> int | None:
    """Returns the id of the configuration's token, or of a customary one."""
    found = None if name is None else self.find_id(name)
    # An ordinary token of such a name, as in code, is not meant.
    others = (
      number
      for number in map(self.find_id, customary)
      if number is not None and number in self.special_ids
    )
    return next(others, None) if found is None else found

  def _check(self, ids: npt.ArrayLike) -> np.ndarray:
    array = np.asarray(ids)
    if not array.size:
      return array.astype(np.int32)
    if array.dtype.kind not in "iu":
      raise ValueError(f"Token ids must be integers, got {array.dtype}.")
    low, high = int(array.min()), int(array.max())
    if low < 0 or high >= self._num_ids:
      raise ValueError(
        f"Token ids of {self.path} must be at least 0 and less than"
        f" {self._num_ids}, got {low if low < 0 else high}."
      )
    return array


def to_array(ids: npt.ArrayLike) -> npt.NDArray[np.int32]:
  """Returns ids as an array, int32 [T]."""
  return np.asarray(ids, np.int32)


def to_valid(text: str) -> str:
  """Returns text without lone surrogates, which no UTF-8 can hold."""
  if _SURROGATES.search(text) is None:
    return text
  return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


class Decoder:
  """Decodes ids as they are generated, never within a character.

  The texts that `push` returns and that of `finish`, concatenated, are
  `tokenizer.decode` of all ids.
  """

  def __init__(self, tokenizer: tokenizer_protocol.Tokenizer):
    """Starts at the beginning of a text.

    Args:
      tokenizer: A `TextTokenizer`, or one with `decode_bytes` whose text is
        its bytes as UTF-8.
    """
    self._tokenizer = tokenizer
    self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
    # The ids since a token whose text has been returned, with that token.
    self._window: list[int] = []
    self._returned = ""

  def push(self, ids: npt.ArrayLike) -> str:
    """Returns the text that is certain after more ids, a number or [T]."""
    return self._push(np.atleast_1d(np.asarray(ids)), final=False)

  def finish(self) -> str:
    """Returns the rest, and begins a new text."""
    rest = self._push(np.zeros(0, np.int32), final=True)
    self._window, self._returned = [], ""
    return rest

  def _push(self, ids: np.ndarray, *, final: bool) -> str:
    tokenizer: Any = self._tokenizer
    if not isinstance(tokenizer, TextTokenizer) or tokenizer.is_byte_level:
      text = self._utf8.decode(tokenizer.decode_bytes(ids), final=final)
      if final:
        self._utf8.reset()
      return text
    self._window += tokenizer.text_ids(ids)
    unsettled = 0 if final else tokenizer.count_unsettled(self._window)
    ready = self._window[: len(self._window) - unsettled]
    text = tokenizer.decode(ready)
    new = text[len(self._returned) :]
    self._returned = text
    if new and not unsettled:
      last = tokenizer.decode(ready[-1:])
      # A later token is decoded after this one as after the whole text.
      if last and text.endswith(last):
        self._window, self._returned = ready[-1:], last
    return new
