"""Rank files of tiktoken: a token in base64 and its rank on each line.

The file has neither the pattern that splits a text nor the special tokens, so
both are fields; those of published vocabularies are known by their size.
"""

import base64
import binascii
from collections.abc import Mapping, Sequence
import dataclasses
import functools
import hashlib
import json
from typing import Any, Literal
import unicodedata

from paxon.inputs import optional_library
from paxon.inputs.tokenizers import text_tokenizer

_MAX_RANK = 2**31
_CONTRACTIONS = "'(?:[sdmt]|ll|ve|re)"
_GPT2 = "|".join(
  (
    _CONTRACTIONS,
    r" ?\p{L}+",
    r" ?\p{N}+",
    r" ?[^\s\p{L}\p{N}]+",
    r"\s+(?!\S)",
    r"\s+",
  )
)
_REST = (r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+")


def _words(digits: str) -> str:
  """Returns the pattern of cl100k, for numbers of up to `digits` digits."""
  return "|".join(
    (
      f"(?i:{_CONTRACTIONS})",
      r"[^\r\n\p{L}\p{N}]?\p{L}+",
      digits,
      r" ?[^\s\p{L}\p{N}]+[\r\n]*",
      *_REST,
    )
  )


def _cased_words() -> str:
  """Returns the pattern of o200k, which splits words at capitals."""
  upper, lower = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
  before, after = r"[^\r\n\p{L}\p{N}]?", f"(?i:{_CONTRACTIONS})?"
  return "|".join(
    (
      f"{before}[{upper}]*[{lower}]+{after}",
      f"{before}[{upper}]+[{lower}]*{after}",
      r"\p{N}{1,3}",
      r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
      *_REST,
    )
  )


@dataclasses.dataclass(frozen=True)
class _Known:
  """Properties of a published vocabulary that its rank file lacks.

  Attributes:
    pattern: Splits a text.
    special: Ids of special tokens.
    end: The token after a text.
    begin: The token before a text, None if the model has none.
    normal_form: Unicode's normal form of a text before it is split, such as
      NFC; None leaves texts as they are.
  """

  pattern: str
  special: Mapping[str, int]
  end: str
  begin: str | None = None
  normal_form: Literal["NFC"] | None = None


def _number_tokens(first: int, *names: str) -> dict[str, int]:
  return {name: first + i for i, name in enumerate(names)}


_END = "<|endoftext|>"
_FILL = ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>")
_LLAMA3 = (
  *("<|begin_of_text|>", "<|end_of_text|>"),
  *("<|reserved_special_token_0|>", "<|reserved_special_token_1|>"),
  *("<|finetune_right_pad_id|>", "<|step_id|>"),
  *("<|start_header_id|>", "<|end_header_id|>"),
  *("<|eom_id|>", "<|eot_id|>", "<|python_tag|>", "<|image|>"),
  *(f"<|reserved_special_token_{i}|>" for i in range(2, 246)),
)
_LLAMA4 = (
  *("<|begin_of_text|>", "<|end_of_text|>", *_FILL),
  *("<|header_start|>", "<|header_end|>", "<|eom|>", "<|eot|>", "<|step|>"),
)
_QWEN = (
  *(_END, "<|im_start|>", "<|im_end|>"),
  *(f"<|extra_{i}|>" for i in range(205)),
)
# By the number of ranks.
_KNOWN: Mapping[int, _Known] = {
  50256: _Known(_GPT2, {_END: 50256}, _END),
  50280: _Known(_GPT2, {_END: 50256}, _END),
  100256: _Known(
    _words(r"\p{N}{1,3}"),
    _number_tokens(100257, _END, *_FILL) | {"<|endofprompt|>": 100276},
    _END,
  ),
  199998: _Known(
    _cased_words(), {_END: 199999, "<|endofprompt|>": 200018}, _END
  ),
  128000: _Known(
    _words(r"\p{N}{1,3}"),
    _number_tokens(128000, *_LLAMA3),
    "<|end_of_text|>",
    "<|begin_of_text|>",
  ),
  200000: _Known(
    _cased_words(),
    _number_tokens(200000, *_LLAMA4) | {"<|finetune_right_pad|>": 200018},
    "<|end_of_text|>",
    "<|begin_of_text|>",
  ),
  151643: _Known(
    _words(r"\p{N}"), _number_tokens(151643, *_QWEN), _END, normal_form="NFC"
  ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankFile(text_tokenizer.TextTokenizer):
  """A rank file, run by the library `tiktoken`.

  Attributes:
    pattern: The regular expression that splits a text before the merges; None
      takes that of the published vocabulary with as many ranks.
    special_tokens: Ids of special tokens; None takes those of the published
      vocabulary and of `added_tokens.json` beside the file.
  """

  pattern: str | None = None
  special_tokens: Mapping[str, int] | None = None

  @property
  def is_byte_level(self) -> bool:
    """True: text is the concatenated bytes of the tokens."""
    return True

  @functools.cached_property
  def is_lossless(self) -> bool:
    """True if every byte is a token, and texts are not normalized."""
    return len(self._ids_of_bytes) == 256 and self._normal_form is None

  @functools.cached_property
  def special_ids(self) -> frozenset[int]:
    """Ids of the special tokens."""
    return frozenset(self._special.values())

  @functools.cached_property
  def content_hash(self) -> str:
    """A hash of the ranks, the pattern and the special tokens."""
    content = hashlib.sha256()
    for token, number in sorted(self._ranks.items(), key=lambda item: item[1]):
      content.update(f"{number} {token.hex()}\n".encode())
    more: list[Any] = [self.split_pattern, dict(sorted(self._special.items()))]
    more += filter(None, [self._normal_form])
    content.update(json.dumps(more, sort_keys=True).encode())
    return content.hexdigest()

  def find_id(self, token: str) -> int | None:
    """Returns the id of a token, None if the vocabulary does not have it."""
    if token in self._special:
      return self._special[token]
    return self._ranks.get(token.encode())

  def find_token(self, number: int) -> str | None:
    """Returns the name of an id's token, None if it has none."""
    names = {i: token for token, i in self._special.items()}
    if number in names:
      return names[number]
    found = self._token_bytes[number] if 0 <= number < self._size else b""
    return found.decode(errors="replace") or None

  @functools.cached_property
  def _ranks(self) -> Mapping[bytes, int]:
    # The library's own reader copies files to a cache, and then returns the
    # copy when a file has changed.
    ranks: dict[bytes, int] = {}
    with open(self.path, "rb") as file:
      for number, line in enumerate(file, start=1):
        if not line.strip():
          continue
        try:
          token, rank = line.split()
          ranks[base64.b64decode(token, validate=True)] = int(rank)
          if not 0 <= int(rank) < _MAX_RANK:
            raise ValueError("not a rank")
        except (ValueError, binascii.Error) as error:
          raise ValueError(
            f"{self.path}:{number} must be a token in base64 and its rank."
          ) from error
    if len(set(ranks.values())) != len(ranks):
      raise ValueError(f"{self.path}: two tokens have the same rank.")
    return ranks

  @functools.cached_property
  def _known_vocabulary(self) -> _Known | None:
    return _KNOWN.get(len(self._ranks))

  @functools.cached_property
  def split_pattern(self) -> str:
    """The pattern that splits a text before the merges.

    Raises:
      ValueError: It is not given, and the vocabulary is not known.
    """
    if self.pattern is not None:
      return self.pattern
    if self._known_vocabulary is None:
      raise ValueError(
        f"{self.path} has {len(self._ranks)} ranks, as no vocabulary that is"
        " known here; give RankFile.pattern, which splits a text."
      )
    return self._known_vocabulary.pattern

  @property
  def _normal_form(self) -> Literal["NFC"] | None:
    known = self._known_vocabulary
    return None if known is None else known.normal_form

  @functools.cached_property
  def _special(self) -> Mapping[str, int]:
    if self.special_tokens is not None:
      return self.special_tokens
    known = self._known_vocabulary
    own = {} if known is None else known.special
    return {**own, **text_tokenizer.read_added_tokens(self.path)}

  @functools.cached_property
  def _policy(self) -> text_tokenizer.Policy:
    policy, known = super()._policy, self._known_vocabulary
    if known is None:
      return policy
    has_begin = known.begin is not None
    return dataclasses.replace(
      policy,
      begin=policy.begin or known.begin,
      end=policy.end or known.end,
      add_begin=has_begin if policy.add_begin is None else policy.add_begin,
    )

  @functools.cached_property
  def _library(self) -> Any:
    with optional_library.explain("tiktoken", "regex", extra="text"):
      import tiktoken
    pattern = self.split_pattern
    absent = [i for i in range(256) if bytes([i]) not in self._ranks]
    if absent:
      # The library fails at a text with such a byte, by no Python exception.
      raise ValueError(
        f"{self.path}: the byte {absent[0]} is no token; all 256 must be."
      )
    return tiktoken.Encoding(
      self.path,
      pat_str=pattern,
      mergeable_ranks=dict(self._ranks),
      special_tokens=dict(self._special),
    )

  @functools.cached_property
  def _size(self) -> int:
    numbers = (*self._ranks.values(), *self._special.values())
    return max(numbers, default=-1) + 1

  @functools.cached_property
  def _token_bytes(self) -> Sequence[bytes]:
    table = [b""] * self._size
    for token, number in self._ranks.items():
      table[number] = token
    return table

  def _encode(self, text: str, *, special: bool) -> list[int]:
    if self._normal_form is not None:
      text = unicodedata.normalize(self._normal_form, text)
    if special:
      return self._library.encode(text, allowed_special="all")
    return self._library.encode_ordinary(text)

  def _decode(self, ids: list[int]) -> str:
    table = self._token_bytes
    return b"".join(table[i] for i in ids).decode(errors="replace")
