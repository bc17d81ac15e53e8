"""Random-access sources of documents: the interface and one in memory.

A source returns the number of its documents, and any document as bytes. Order,
tokens, hosts and epochs are handled elsewhere.
"""

from collections.abc import Sequence
import dataclasses
from typing import Protocol, runtime_checkable


@runtime_checkable
class DocumentSource(Protocol):
  """A random-access sequence of documents, in a fixed order."""

  def __len__(self) -> int:
    """Returns the number of documents."""
    ...

  def __getitem__(self, index: int, /) -> bytes:
    """Returns one document; 0 <= index < len."""
    ...


@dataclasses.dataclass(frozen=True)
class InMemoryDocuments:
  """Documents given as a sequence of strings or bytes.

  Attributes:
    documents: The documents; strings are encoded as UTF-8.
  """

  documents: Sequence[str | bytes]

  def __post_init__(self) -> None:
    if isinstance(self.documents, str | bytes):
      raise ValueError(
        "InMemoryDocuments.documents must be a sequence of documents, got one"
        f" {type(self.documents).__name__}; write [text] for one document."
      )

  def __len__(self) -> int:
    return len(self.documents)

  def __getitem__(self, index: int, /) -> bytes:
    document = self.documents[index]
    return document.encode() if isinstance(document, str) else document
