"""Characters as labels: the ids of texts for a recognizer."""

from collections.abc import Sequence
import dataclasses

import numpy as np

ENGLISH = " 'abcdefghijklmnopqrstuvwxyz"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Alphabet:
  """The characters of texts; id 0 is the blank of CTC, then `symbols` follow.

  Attributes:
    symbols: The characters, each once.
  """

  symbols: str = ENGLISH

  def __post_init__(self) -> None:
    if not self.symbols or len(set(self.symbols)) != len(self.symbols):
      raise ValueError(
        f"Alphabet.symbols must be characters, each once, got {self.symbols!r}."
      )

  @property
  def vocab_size(self) -> int:
    """The number of ids, with the blank."""
    return len(self.symbols) + 1

  @property
  def space_id(self) -> int | None:
    """The id of the space between words; None if it is not in `symbols`."""
    return self.symbols.find(" ") + 1 or None

  def encode(self, text: str) -> np.ndarray:
    """Returns the ids of a text, int32 [N].

    Raises:
      ValueError: A character is not in `symbols`.
    """
    ids = np.asarray([self.symbols.find(c) + 1 for c in text], np.int32)
    if len(text) and ids.min() == 0:
      other = text[int(ids.argmin())]
      raise ValueError(
        f"The text {text!r} has {other!r}, which is not in the alphabet"
        f" {self.symbols!r}."
      )
    return ids

  def decode(self, ids: np.ndarray | Sequence[int]) -> str:
    """Returns the text of ids, without blanks."""
    return "".join(self.symbols[int(i) - 1] for i in ids if i)
