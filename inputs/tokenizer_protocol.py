"""What an input needs of a tokenizer, as a structural type.

Any class with these members will do; nothing is inherited or registered.
"""

from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt


@runtime_checkable
class Tokenizer(Protocol):
  """Turns text into ids and says how much text each id stands for."""

  @property
  def vocab_size(self) -> int:
    """The number of ids; they are 0 to `vocab_size - 1`."""
    ...

  @property
  def pad_id(self) -> int:
    """The id in places that hold nothing."""
    ...

  @property
  def begin_id(self) -> int:
    """The id before the first token of a document."""
    ...

  @property
  def end_id(self) -> int:
    """The id after the last token of a document."""
    ...

  def encode(self, text: str | bytes) -> npt.NDArray[np.int32]:
    """Returns the ids of `text`, int32 [T], without begin and end."""
    ...

  def decode(self, ids: npt.ArrayLike) -> str:
    """Returns the text that ids of shape [T] stand for."""
    ...

  def byte_counts(self, ids: npt.ArrayLike) -> npt.NDArray[np.int32]:
    """Returns how many bytes each id stands for, int32, of the ids' shape."""
    ...
