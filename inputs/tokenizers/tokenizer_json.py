"""Tokenizers in the `tokenizer.json` format of Hugging Face."""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
import hashlib
import json
import re
from typing import Any

from paxon.inputs import optional_library
from paxon.inputs.tokenizers import text_tokenizer

_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"  # SentencePiece's sign of a space.


def make_byte_alphabet() -> dict[str, int]:
  """Returns the byte that each character of a byte-level token stands for.

  GPT-2's alphabet: printable characters of Latin-1 stand for themselves, and
  the other bytes, in order, for the characters from U+0100 on.
  """
  printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
  others = [byte for byte in range(256) if byte not in printable]
  shifted = {chr(256 + i): byte for i, byte in enumerate(others)}
  return {chr(byte): byte for byte in printable} | shifted


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenizerJson(text_tokenizer.TextTokenizer):
  """A `tokenizer.json`, run by the library `tokenizers`."""

  @property
  def is_byte_level(self) -> bool:
    """Whether the decoded text is the concatenated bytes of the tokens."""
    kinds = {decoder.get("type") for decoder in self._decoders}
    return kinds == {"ByteLevel"}

  @functools.cached_property
  def is_lossless(self) -> bool:
    """Whether `decode(encode(text))` is `text` for every text.

    It is promised for byte-level vocabularies that change no text.
    """
    steps = _flatten(self._content.get("pre_tokenizer"))
    return (
      len(self._ids_of_bytes) == 256
      and not self._content.get("normalizer")
      and not any(step.get("add_prefix_space") for step in steps)
      and not any(t["lstrip"] or t["rstrip"] for t in self._added)
    )

  @functools.cached_property
  def special_ids(self) -> frozenset[int]:
    """Ids of the special tokens."""
    return frozenset(t["id"] for t in self._added if t["special"])

  @functools.cached_property
  def content_hash(self) -> str:
    """A hash of the file's content without truncation and padding."""
    ignored = ("padding", "truncation", "version")
    kept = {k: v for k, v in self._content.items() if k not in ignored}
    text = json.dumps(kept, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()

  def find_id(self, token: str) -> int | None:
    """Returns the id of a token, None if the vocabulary does not have it."""
    return self._library.token_to_id(token)

  def find_token(self, number: int) -> str | None:
    """Returns the name of an id's token, None if it has none."""
    return self._library.id_to_token(number)

  def encode_prompt(self, text: str) -> Any:
    """Returns the ids of a prompt, int32 [T], begun as the model expects it.

    The file's own post-processor adds special tokens. As in transformers 5,
    `add_bos_token` and `add_eos_token` of the configuration have no effect
    beside a `tokenizer.json`.
    """
    valid = text_tokenizer.to_valid(text)
    return self._to_embedded(self._library.encode(valid).ids, valid)

  def encode_pair(
    self,
    text: str,
    pair: str | None = None,
    *,
    length: int,
    lower_case: bool = False,
  ) -> tuple[Any, Any, int]:
    """Returns one or two texts as the input of an encoder.

    The file's own post-processor adds special tokens and the types of the
    texts. As in transformers, tokens are cut at the end of the longer text.

    Args:
      text: The text.
      pair: The second text, or None.
      length: The maximum number of tokens.
      lower_case: Whether to convert the texts to lower case.

    Returns:
      Ids and types, int32 [T], and the number of tokens that were cut.

    Raises:
      ValueError: The special tokens alone are longer than `length`.
    """
    texts = [text_tokenizer.to_valid(x) for x in (text, pair) if x is not None]
    whole = self._find_library(None, lower_case).encode(*texts)
    found, cut = whole, len(whole.ids) - length
    if cut > 0:
      found = self._find_library(length, lower_case).encode(*texts)
    if len(found.ids) > length:
      raise ValueError(
        f"{length} tokens are too few for a text and its special tokens in"
        f" {self.path}."
      )
    ids = self._to_embedded(found.ids, " ".join(texts))
    return ids, text_tokenizer.to_array(found.type_ids), max(cut, 0)

  def _find_library(self, length: int | None, lower_case: bool) -> Any:
    """Returns the library's tokenizer with these settings."""
    if length is None and not lower_case:
      return self._library
    found = self._libraries.get((length, lower_case))
    if found is not None:
      return found
    import tokenizers

    found = tokenizers.Tokenizer.from_str(self._library.to_str())
    if lower_case:
      steps = [tokenizers.normalizers.Lowercase()]
      if found.normalizer is not None:
        steps.append(found.normalizer)
      found.normalizer = tokenizers.normalizers.Sequence(steps)
    if length is not None:
      found.enable_truncation(length, strategy="longest_first")
    self._libraries[length, lower_case] = found
    return found

  @functools.cached_property
  def _libraries(self) -> dict[tuple[int | None, bool], Any]:
    return {}

  def count_unsettled(self, ids: Sequence[int]) -> int:
    """Returns the length of the last run of byte tokens.

    They become characters, or U+FFFD for each, when the run ends.
    """
    if not self._falls_back_to_bytes:
      return 0
    count = 0
    while count < len(ids) and ids[-1 - count] in self._byte_token_ids:
      count += 1
    return count

  @functools.cached_property
  def _content(self) -> Mapping[str, Any]:
    with open(self.path, encoding="utf-8") as file:
      try:
        found = json.load(file)
      except (ValueError, RecursionError) as error:
        raise ValueError(f"{self.path} is not JSON ({error}).") from error
    if not isinstance(found, dict) or "model" not in found:
      raise ValueError(
        f"{self.path} is not a tokenizer.json: it has no object `model`."
      )
    return found

  @functools.cached_property
  def _library(self) -> Any:
    with optional_library.explain("tokenizers", extra="text"):
      import tokenizers
    _ = self._content
    try:
      found = tokenizers.Tokenizer.from_file(self.path)
    except Exception as error:  # The library raises nothing narrower.
      raise ValueError(
        f"{self.path} cannot be read by tokenizers {tokenizers.__version__}:"
        f" {error}."
      ) from error
    found.no_truncation()
    found.no_padding()
    return found

  @functools.cached_property
  def _vocabulary(self) -> Mapping[str, int]:
    return self._library.get_vocab(with_added_tokens=True)

  @functools.cached_property
  def _added(self) -> Sequence[Mapping[str, Any]]:
    return self._content.get("added_tokens") or ()

  @functools.cached_property
  def _decoders(self) -> Sequence[Mapping[str, Any]]:
    return _flatten(self._content.get("decoder"))

  @functools.cached_property
  def _falls_back_to_bytes(self) -> bool:
    return any(d.get("type") == "ByteFallback" for d in self._decoders)

  @functools.cached_property
  def _byte_token_ids(self) -> frozenset[int]:
    names = self._vocabulary.items()
    return frozenset(i for name, i in names if _BYTE_TOKEN.fullmatch(name))

  @functools.cached_property
  def _size(self) -> int:
    return max(self._vocabulary.values(), default=-1) + 1

  @functools.cached_property
  def _token_bytes(self) -> Sequence[bytes]:
    to_bytes = self._find_conversion()
    table = [b""] * self._size
    for token, number in self._vocabulary.items():
      if number not in self.special_ids:
        table[number] = to_bytes(token)
    return table

  def _find_conversion(self) -> Callable[[str], bytes]:
    """Returns the function from a token's name to the bytes of its text."""
    if self.is_byte_level:
      alphabet = make_byte_alphabet()

      def convert_characters(token: str) -> bytes:
        try:
          return bytes([alphabet[character] for character in token])
        except KeyError:
          # An added token with other characters stands for itself.
          return token.encode()

      return convert_characters
    decoders = {decoder.get("type"): decoder for decoder in self._decoders}
    if "WordPiece" in decoders:
      prefix = decoders["WordPiece"].get("prefix", "##")
      return lambda token: (
        token.removeprefix(prefix).encode()
        if token.startswith(prefix)
        else b" " + token.encode()
      )
    if "BPEDecoder" in decoders:
      suffix = decoders["BPEDecoder"].get("suffix", "</w>")
      return lambda token: token.replace(suffix, " ").encode()
    if not decoders:
      return lambda token: b" " + token.encode()

    def convert_pieces(token: str) -> bytes:
      match = _BYTE_TOKEN.fullmatch(token)
      if match and self._falls_back_to_bytes:
        return bytes([int(match[1], 16)])
      return token.replace(_SPACE, " ").encode()

    return convert_pieces

  def _encode(self, text: str, *, special: bool) -> list[int]:
    # The library reads names of special tokens in any text.
    del special
    return self._library.encode(text, add_special_tokens=False).ids

  def _decode(self, ids: list[int]) -> str:
    if self.is_byte_level:
      table = self._token_bytes
      return b"".join(table[i] for i in ids).decode(errors="replace")
    return self._library.decode(ids, skip_special_tokens=True)


def _flatten(step: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
  """Returns a decoder or pre-tokenizer as a list of its steps."""
  if not step:
    return []
  parts = next(
    (step[key] for key in ("decoders", "pretokenizers") if key in step), None
  )
  if parts is None:
    return [step]
  return [inner for part in parts for inner in _flatten(part)]
