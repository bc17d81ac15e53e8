"""Random-access reading of Grain data sources and `MapDataset`s."""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class GrainRows:
  """The elements of a Grain data source or `MapDataset`.

  Any shuffle within it is kept. Epochs, shuffling, packing and sharding by host
  are done by `inputs`, so omit Grain's `repeat` and `batch`.

  Attributes:
    open: Returns the source, such as a `functools.partial` of
      `grain.sources.ArrayRecordDataSource`. Called once, on the first access.
  """

  open: Callable[[], Any]

  def __getstate__(self) -> dict[str, Any]:
    return {"open": self.open}

  def __setstate__(self, state: dict[str, Any]) -> None:
    self.__dict__.update(state)

  def __len__(self) -> int:
    return len(self._elements)

  def __getitem__(self, index: int, /) -> Any:
    """Returns one element.

    Raises:
      ValueError: A Grain filter removed the element.
    """
    if not 0 <= index < len(self):
      raise IndexError(f"There is no element {index} of {len(self)}.")
    element = self._elements[index]
    if element is None:
      raise ValueError(
        f"{self.name(index)} was filtered out within Grain, so its number has"
        " no element; filter with `inputs.filtered` instead."
      )
    return element

  def name(self, index: int) -> str:
    """Returns the name of an element for messages."""
    return f"element {index} of Grain's source"

  @functools.cached_property
  def _elements(self) -> Any:
    elements = self.open()
    for member in ("__len__", "__getitem__"):
      if not hasattr(elements, member):
        raise ValueError(
          f"GrainRows.open must return a source of random access, got"
          f" {type(elements).__name__}, which has no {member}; read a data set"
          " without numbers as a sequential source."
        )
    if len(elements) >= 2**62:
      raise ValueError(
        "GrainRows.open returned a data set that repeats without end; leave out"
        " its repeat, epochs are counted here."
      )
    return elements
