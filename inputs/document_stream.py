"""All targets of a corpus as one stream, read from any position.

A document of bytes b1..bn is the tokens BEGIN b1 .. bn END and gives n + 1
targets: b1 after BEGIN, ..., END after bn. The stream is the targets of one
document after another, epoch after epoch. A position in it is three integers,
whatever the length of rows, the size of batches and the number of hosts.

Long documents can be cut into pieces that are shuffled apart, so that the rows
of a batch do not all come from one document. A piece begins with the token
before its first target, so cutting neither loses nor adds a target, and only a
document's first piece has BEGIN and only its last one END.
"""

import dataclasses

import numpy as np
import numpy.typing as npt

from paxon.inputs import document_order, document_source, tokenizer_protocol


@dataclasses.dataclass(frozen=True, kw_only=True, order=True)
class Position:
  """A place between two targets.

  Attributes:
    epoch: How many times all documents have been read.
    index: How many pieces (documents, where they are not cut) of this epoch
      have been read.
    offset: How many targets of the next piece have been read; less than it has,
      so that every place has one name.
  """

  epoch: int = 0
  index: int = 0
  offset: int = 0


class DocumentStream:
  """The stream; it keeps one piece's tokens and no position."""

  def __init__(
    self,
    *,
    source: document_source.DocumentSource,
    tokenizer: tokenizer_protocol.Tokenizer,
    shuffle_seed: int | None,
    num_epochs: int | None,
    piece_length: int | None = None,
  ) -> None:
    """Makes the stream of a source.

    Without `piece_length` no document is read; with it each one is read once,
    because the number of its pieces must be known.

    Args:
      source: The documents; at least one.
      tokenizer: Makes their tokens.
      shuffle_seed: The seed of the order; `None` is the source's order.
      num_epochs: After how many epochs the stream ends; `None` is never.
      piece_length: The most targets in a piece; `None` cuts no document.
    """
    if not len(source):
      raise ValueError(f"The source holds no documents: {source!r}.")
    self._source = source
    self._tokenizer = tokenizer
    self._piece_length = piece_length
    # Entry i is the number of the first piece of document i.
    self._first_pieces = (
      None if piece_length is None else self._cut(piece_length)
    )
    num_pieces = (
      len(source) if self._first_pieces is None else int(self._first_pieces[-1])
    )
    self._order = document_order.DocumentOrder(
      num_documents=num_pieces, seed=shuffle_seed
    )
    self._end = None if num_epochs is None else Position(epoch=num_epochs)
    self._tokens: tuple[int, npt.NDArray[np.int32]] | None = None

  @property
  def num_pieces(self) -> int:
    """The pieces (documents, where they are not cut) of one epoch."""
    return self._order.num_documents

  def has_ended(self, position: Position) -> bool:
    """Returns whether nothing comes after `position`."""
    return self._end is not None and position >= self._end

  def take(
    self, position: Position, num_targets: int
  ) -> tuple[list[npt.NDArray[np.int32]], Position]:
    """Reads targets from a position on.

    Args:
      position: Where to begin.
      num_targets: How many to read; fewer come only at the stream's end.

    Returns:
      Runs of tokens, each of one document and one longer than its targets (the
      first token is only an input), and the position after them.
    """
    runs = []
    while num_targets and not self.has_ended(position):
      tokens = self._piece(position)
      run = tokens[position.offset : position.offset + num_targets + 1]
      runs.append(run)
      num_targets -= len(run) - 1
      position = self._advanced(position, len(run) - 1, len(tokens) - 1)
    return runs, position

  def documents_between(self, before: Position, after: Position) -> list[int]:
    """Returns the numbers of the documents read between two positions.

    Reads none of them.

    Args:
      before: The first position.
      after: Not before it.

    Returns:
      In the order of the stream; one that is read again, in several pieces or
      epochs, is there once.
    """
    numbers = []
    epoch, index = before.epoch, before.index
    while (epoch, index, 0) < (after.epoch, after.index, after.offset):
      numbers.append(self._document_of(self._order.document(epoch, index)))
      index += 1
      if index == self.num_pieces:
        epoch, index = epoch + 1, 0
    return list(dict.fromkeys(numbers))

  def check(self, position: Position) -> None:
    """Checks that a position exists; reads at most one document.

    Raises:
      ValueError: It does not.
    """
    if position.epoch < 0 or not 0 <= position.index < self.num_pieces:
      raise ValueError(
        f"There is no {position} in a source of {self.num_pieces} documents or"
        " pieces."
      )
    end = self._end
    if end is not None and position >= end:
      if position != end:
        raise ValueError(f"{position} lies after the last epoch.")
      return
    num_targets = len(self._piece(position)) - 1
    if not 0 <= position.offset < num_targets:
      raise ValueError(
        f"There is no {position}: that one has {num_targets} targets."
      )

  def _piece(self, position: Position) -> npt.NDArray[np.int32]:
    """Returns the piece at `position`, one token longer than its targets."""
    number = self._order.document(position.epoch, position.index)
    # A long piece is read by many batches in a row.
    if self._tokens is None or self._tokens[0] != number:
      self._tokens = (number, self._read_piece(number))
    return self._tokens[1]

  def _read_piece(self, number: int) -> npt.NDArray[np.int32]:
    if self._first_pieces is None or self._piece_length is None:
      return self._document(number)
    document = self._document_of(number)
    begin = (number - int(self._first_pieces[document])) * self._piece_length
    return self._document(document)[begin : begin + self._piece_length + 1]

  def _document_of(self, piece: int) -> int:
    """Returns the number of the document that a piece is of."""
    if self._first_pieces is None:
      return piece
    return int(np.searchsorted(self._first_pieces, piece, side="right") - 1)

  def _document(self, number: int) -> npt.NDArray[np.int32]:
    """Returns BEGIN, the tokens and END of a document."""
    ids = self._tokenizer.encode(self._source[number])
    begin, end = self._tokenizer.begin_id, self._tokenizer.end_id
    return np.concatenate(([begin], ids, [end])).astype(np.int32)

  def _cut(self, piece_length: int) -> npt.NDArray[np.int64]:
    targets = [len(self._document(i)) - 1 for i in range(len(self._source))]
    pieces = -(-np.asarray(targets, np.int64) // piece_length)
    return np.concatenate(([0], np.cumsum(pieces)))

  def _advanced(
    self, position: Position, num_read: int, num_targets: int
  ) -> Position:
    offset = position.offset + num_read
    if offset < num_targets:
      return dataclasses.replace(position, offset=offset)
    if position.index + 1 < self.num_pieces:
      return Position(epoch=position.epoch, index=position.index + 1)
    return Position(epoch=position.epoch + 1)
