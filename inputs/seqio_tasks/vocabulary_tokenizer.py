"""A tokenizer from the vocabulary of a SeqIO task."""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any

import numpy as np
import numpy.typing as npt

from paxon.inputs import optional_library
from paxon.inputs.sources import record_files


@dataclasses.dataclass(frozen=True, kw_only=True)
class VocabularyTokenizer(record_files.PickledFields):
  """The vocabulary of a feature of a task or mixture, loaded lazily.

  Attributes:
    name_in_registry: The name of the task or mixture.
    register: See `TaskSource`.
    feature: The feature.
    begin_id: The id before the first token of a document.
  """

  name_in_registry: str
  register: Callable[[], object] | None = None
  feature: str = "targets"
  begin_id: int = 0

  @property
  def vocab_size(self) -> int:
    """The number of ids."""
    return self._vocabulary.vocab_size

  @property
  def pad_id(self) -> int:
    """The padding id."""
    return self._vocabulary.pad_id

  @property
  def end_id(self) -> int:
    """The id after the last token of a document.

    Raises:
      ValueError: The vocabulary has none.
    """
    found = self._vocabulary.eos_id
    if found is None:
      raise ValueError(
        f"The vocabulary of {self.name_in_registry!r} has no id for the end of"
        " a text."
      )
    return found

  def encode(self, text: str | bytes) -> npt.NDArray[np.int32]:
    """Returns the ids of `text`, int32 [T], without begin and end ids."""
    text = text.decode(errors="replace") if isinstance(text, bytes) else text
    return np.asarray(self._vocabulary.encode(text), np.int32)

  def decode(self, ids: npt.ArrayLike) -> str:
    """Returns the text of ids [T], up to the first end id."""
    return self._vocabulary.decode(np.asarray(ids).tolist())

  def byte_counts(self, ids: npt.ArrayLike) -> npt.NDArray[np.int32]:
    """Returns the number of bytes of each id's text, int32, of ids' shape.

    The space that begins a word counts, except before the first word, where the
    vocabulary adds it.
    """
    return self._byte_counts[np.asarray(ids)]

  @functools.cached_property
  def _byte_counts(self) -> npt.NDArray[np.int32]:
    if isinstance(self._vocabulary, optional_library.seqio().ByteVocabulary):
      # A single byte is often not valid UTF-8.
      numbers = np.arange(self.vocab_size)
      return ((numbers >= 3) & (numbers < 259)).astype(np.int32)
    before = self._vocabulary.encode("a")
    start = len(self.decode(before).encode())
    return np.array(
      [
        max(len(self.decode([*before, number]).encode()) - start, 0)
        for number in range(self.vocab_size)
      ],
      np.int32,
    )

  @functools.cached_property
  def _vocabulary(self) -> Any:
    seqio, name = optional_library.seqio(), self.name_in_registry
    known = {*seqio.TaskRegistry.names(), *seqio.MixtureRegistry.names()}
    if self.register is not None and name not in known:
      self.register()
    try:
      found = seqio.get_mixture_or_task(name)
    except ValueError as error:
      raise ValueError(
        f"SeqIO knows neither a task nor a mixture {name!r}."
      ) from error
    if self.feature not in found.output_features:
      raise ValueError(
        f"{name!r} has no output feature {self.feature!r}; it has"
        f" {sorted(found.output_features)}."
      )
    return found.output_features[self.feature].vocabulary
