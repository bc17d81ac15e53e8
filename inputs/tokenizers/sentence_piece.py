"""SentencePiece models (`*.model`), unigram and BPE."""

from collections.abc import Mapping, Sequence
import dataclasses
import functools
import hashlib
from typing import Any

from paxon.inputs import optional_library
from paxon.inputs.tokenizers import text_tokenizer

_SPACE = "\u2581"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SentencePiece(text_tokenizer.TextTokenizer):
  """A SentencePiece model, run by the library `sentencepiece`.

  The model's own control pieces are begin, end and padding, unless a
  configuration beside the file names others. Tokens that a Hugging Face folder
  adds (`added_tokens.json`, `added_tokens_decoder`) are read as well.
  """

  @functools.cached_property
  def is_lossless(self) -> bool:
    """Whether `decode(encode(text))` is `text` for every text; never promised.

    Models normalize text or drop spaces, and their files do not state it in a
    form that the library shows.
    """
    return False

  @functools.cached_property
  def special_ids(self) -> frozenset[int]:
    """Ids of control and unused pieces, and of the tokens added to them."""
    library = self._library
    own = (
      number
      for number in range(library.get_piece_size())
      if library.is_control(number) or library.is_unused(number)
    )
    return frozenset((*own, *self._added.values()))

  @functools.cached_property
  def content_hash(self) -> str:
    """A hash of the model file and of added tokens."""
    content = hashlib.sha256(self._content)
    for token, number in sorted(self._added.items()):
      content.update(f"{number} {token}\n".encode())
    return content.hexdigest()

  def find_id(self, token: str) -> int | None:
    """Returns the id of a token, None if the vocabulary does not have it."""
    if token in self._added:
      return self._added[token]
    library = self._library
    found = library.piece_to_id(token)
    return found if library.id_to_piece(found) == token else None

  def find_token(self, number: int) -> str | None:
    """Returns the name of an id's token, None if it has none."""
    if 0 <= number < self._library.get_piece_size():
      return self._library.id_to_piece(number)
    return {i: token for token, i in self._added.items()}.get(number)

  def count_unsettled(self, ids: Sequence[int]) -> int:
    """Returns the length of the last run of byte pieces."""
    is_byte, count = self._library.is_byte, 0
    while count < len(ids) and is_byte(ids[-1 - count]):
      count += 1
    return count

  @functools.cached_property
  def _content(self) -> bytes:
    with open(self.path, "rb") as file:
      return file.read()

  @functools.cached_property
  def _library(self) -> Any:
    with optional_library.explain("sentencepiece", extra="text"):
      import sentencepiece
    try:
      return sentencepiece.SentencePieceProcessor(model_proto=self._content)
    except RuntimeError as error:
      raise ValueError(
        f"{self.path} is not a SentencePiece model: {error}."
      ) from error

  @functools.cached_property
  def _added(self) -> Mapping[str, int]:
    return text_tokenizer.read_added_tokens(self.path)

  @functools.cached_property
  def _policy(self) -> text_tokenizer.Policy:
    library, policy = self._library, super()._policy
    own = [
      library.id_to_piece(number) if number >= 0 else None
      for number in (library.bos_id(), library.eos_id(), library.pad_id())
    ]
    return dataclasses.replace(
      policy,
      begin=policy.begin or own[0],
      end=policy.end or own[1],
      pad=policy.pad or own[2],
      # As Llama's and Gemma's; T5 has no such piece.
      add_begin=bool(own[0]) if policy.add_begin is None else policy.add_begin,
    )

  @functools.cached_property
  def _size(self) -> int:
    added = (number + 1 for number in self._added.values())
    return max(self._library.get_piece_size(), *added, 0)

  @functools.cached_property
  def _token_bytes(self) -> Sequence[bytes]:
    library, table = self._library, [b""] * self._size
    unknown = library.unk_id()
    for number in range(library.get_piece_size()):
      piece = library.id_to_piece(number)
      if library.is_byte(number):
        table[number] = bytes([int(piece[3:5], 16)])
      elif number == unknown:
        # One character of the text or more; the id does not state which.
        table[number] = b"?"
      elif number not in self.special_ids:
        table[number] = piece.replace(_SPACE, " ").encode()
    return table

  def _encode(self, text: str, *, special: bool) -> list[int]:
    if not special:
      return self._library.encode(text)
    names = {
      **{self._library.id_to_piece(i): i for i in self._control_ids},
      **self._added,
    }
    ids: list[int] = []
    for part, number in text_tokenizer.split_at(text, names):
      ids += self._library.encode(part) if part else []
      ids += [] if number is None else [number]
    return ids

  @functools.cached_property
  def _control_ids(self) -> Sequence[int]:
    library = self._library
    return [
      number
      for number in range(library.get_piece_size())
      if library.is_control(number)
    ]

  def _decode(self, ids: list[int]) -> str:
    return self._library.decode(ids)
