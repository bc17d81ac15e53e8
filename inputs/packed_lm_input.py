"""Packed rows of documents, for training and evaluating language models.

This joins the parts: a source's documents, in the order of a seed
(`document_order`), as one stream of targets (`document_stream`), packed into
rows (`packing`). What remains here is the batch, the position and the end.
"""

import dataclasses
import functools

import numpy as np

from paxon.inputs import (
  base_input,
  document_source,
  document_stream,
  packing,
  tokenizer_protocol,
)

_POSITION_KEYS = ("epoch", "index", "offset")
_DATA_KEYS = ("num_documents", "piece_length", "shuffle_seed")
_INTEGERS = ("inputs", "targets", "positions", "segment_ids", "target_bytes")


def shapes_of(rows: int, length: int) -> base_input.Shapes:
  """Returns shape and dtype of the arrays of a batch of packed rows."""
  shape = rows, length
  integers = {key: (shape, np.dtype(np.int32)) for key in _INTEGERS}
  return {**integers, "weights": (shape, np.dtype(np.float32))}


@dataclasses.dataclass(kw_only=True, eq=False)
class PackedLmInput(base_input.BaseInput):
  """Batches of packed rows, endless or for a number of epochs.

  A batch holds `inputs`, `targets`, `positions`, `segment_ids` and
  `target_bytes` (how many bytes of text the target stands for; 0 for the end
  of a document and for empty places) as int32 and `weights` as float32, all
  [per_host_batch_size, length]. Every byte of every document is a target once
  in each epoch.

  With `num_epochs` the last batch is filled up with places of weight 0, and
  `StopIteration` follows. `num_epochs=1, shuffle_seed=None` is one pass of an
  evaluation; call `reset` before the next one.

  The state does not depend on `length`, `global_batch_size` or the number of
  hosts: a run that goes on with other ones still reads each document once.

  Attributes:
    source: The documents. They are listed and read only when batches, or
      states, are asked for.
    tokenizer: Makes their tokens.
    shuffle_seed: The seed of each epoch's order of documents. `None` is the
      order of the source.
    num_epochs: After how many epochs the input ends. `None` is never.
    piece_length: Cuts documents into pieces of at most this many targets and
      shuffles the pieces, so that the rows of a batch do not all come from one
      long document. Every document is then read once when the first batch is
      asked for. `None` shuffles whole documents.
  """

  source: document_source.DocumentSource
  tokenizer: tokenizer_protocol.Tokenizer
  shuffle_seed: int | None
  num_epochs: int | None = None
  piece_length: int | None = None
  _position: document_stream.Position = dataclasses.field(
    default_factory=document_stream.Position, init=False, repr=False
  )

  def __post_init__(self) -> None:
    super().__post_init__()
    for field, none in (
      ("num_epochs", "no end"),
      ("piece_length", "whole documents"),
    ):
      value = getattr(self, field)
      if value is not None and value <= 0:
        raise ValueError(
          f"PackedLmInput.{field} must be positive, or None for {none}, got"
          f" {value}."
        )

  def get_next(self) -> base_input.Batch:
    """Returns this host's rows of the next batch; see the class.

    Raises:
      StopIteration: `num_epochs` epochs have been returned.
    """
    if self._stream.has_ended(self._position):
      raise StopIteration
    # Each host packs the whole batch: where its rows begin depends on the
    # lengths of all documents before them.
    runs, position = self._stream.take(
      self._position, self.global_batch_size * self.length
    )
    batch = packing.pack_rows(
      runs,
      num_rows=self.global_batch_size,
      length=self.length,
      pad_id=self.tokenizer.pad_id,
    )
    # A tokenizer's padding id may be the id of some text elsewhere.
    batch["target_bytes"] = np.where(
      batch["segment_ids"] > 0, self.tokenizer.byte_counts(batch["targets"]), 0
    ).astype(np.int32)
    self._position = position
    return self.host_rows(batch)

  @property
  def is_endless(self) -> bool:
    """Whether no number of epochs is given."""
    return self.num_epochs is None

  def batch_shapes(self) -> base_input.Shapes | None:
    """Returns what `get_next` will return, where that needs no document."""
    if type(self).get_next is not PackedLmInput.get_next:
      return None  # A subclass may add arrays of its own.
    if self.num_epochs is not None:
      return None  # There may be no batch left.
    return shapes_of(self.per_host_batch_size, self.length)

  def required_vocab_size(self) -> int:
    """Returns the tokenizer's."""
    return self.tokenizer.vocab_size

  def reset(self) -> None:
    """Goes back to the first batch."""
    self._position = document_stream.Position()

  def get_state(self) -> base_input.State:
    """Returns the position after the last batch, and what it is true of."""
    return {
      **dataclasses.asdict(self._position),
      "num_documents": len(self.source),
      "piece_length": self.piece_length,
      "shuffle_seed": self.shuffle_seed,
    }

  def set_state(self, state: base_input.State) -> None:
    """Goes to a position that `get_state` returned; reads one document.

    Raises:
      ValueError: The state is damaged, or was saved with another number of
        documents or another seed, where its position means something else.
    """
    expected = self.get_state()
    if set(state) != set(expected):
      raise ValueError(
        f"The state of a PackedLmInput must have the keys {sorted(expected)},"
        f" got {sorted(state)}."
      )
    for key in _DATA_KEYS:
      if state[key] != expected[key]:
        raise ValueError(
          f"The state was saved with {key} {state[key]}, and this input has"
          f" {key} {expected[key]}: it would read other documents than those"
          " that were left. Restore with the same data, or start a new run."
        )
    numbers = {}
    for key in _POSITION_KEYS:
      value = state[key]
      if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(
          f"The state's {key} must be an integer, got {value!r}."
        )
      numbers[key] = value
    position = document_stream.Position(**numbers)
    self._stream.check(position)
    self._position = position

  def documents_between(
    self, before: base_input.State, after: base_input.State
  ) -> list[int] | None:
    """Returns the numbers in `source`, in the order of reading."""
    first, last = (
      document_stream.Position(**{key: state[key] for key in _POSITION_KEYS})
      for state in (before, after)
    )
    return self._stream.documents_between(first, last)

  @functools.cached_property
  def _stream(self) -> document_stream.DocumentStream:
    return document_stream.DocumentStream(
      source=self.source,
      tokenizer=self.tokenizer,
      shuffle_seed=self.shuffle_seed,
      num_epochs=self.num_epochs,
      piece_length=self.piece_length,
    )
