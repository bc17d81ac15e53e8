"""Tests for the stream of targets."""

import itertools

import numpy as np
import pytest

from paxon.inputs import byte_tokenizer, document_source, document_stream

_DOCUMENTS = [b"\x02\x03", b"", b"\x04\x05\x06"]  # Ids 5 6, none, 7 8 9.
_SOURCE = document_source.InMemoryDocuments(_DOCUMENTS)


class CountedDocuments(document_source.InMemoryDocuments):
  """Documents that count how often one is read."""

  reads = 0

  def __getitem__(self, index: int, /) -> bytes:
    type(self).reads += 1
    return super().__getitem__(index)


def _stream(
  source=_SOURCE,
  *,
  shuffle_seed=None,
  num_epochs=None,
  piece_length=None,
):
  return document_stream.DocumentStream(
    source=source,
    tokenizer=byte_tokenizer.ByteTokenizer(),
    shuffle_seed=shuffle_seed,
    num_epochs=num_epochs,
    piece_length=piece_length,
  )


def _position(epoch=0, index=0, offset=0):
  return document_stream.Position(epoch=epoch, index=index, offset=offset)


@pytest.mark.parametrize(
  ("start", "num_targets", "runs", "end"),
  [
    ((0, 0, 0), 0, [], (0, 0, 0)),
    ((0, 0, 0), 2, [[1, 5, 6]], (0, 0, 2)),
    ((0, 0, 2), 1, [[6, 2]], (0, 1, 0)),
    ((0, 0, 1), 3, [[5, 6, 2], [1, 2]], (0, 2, 0)),
    ((0, 2, 1), 4, [[7, 8, 9, 2], [1, 5]], (1, 0, 1)),
    ((4, 2, 3), 1, [[9, 2]], (5, 0, 0)),
  ],
)
def test_takes_targets_across_documents_and_epochs(
  start, num_targets, runs, end
):
  actual, position = _stream().take(_position(*start), num_targets)
  assert [run.tolist() for run in actual] == runs
  assert all(run.dtype == np.int32 for run in actual)
  assert position == _position(*end)


def test_ends_after_the_last_epoch():
  stream = _stream(num_epochs=2)
  runs, end = stream.take(_position(1, 2, 2), 100)
  assert [run.tolist() for run in runs] == [[8, 9, 2]]
  assert end == _position(2)
  assert stream.has_ended(end)
  assert stream.take(end, 5) == ([], end)
  assert not stream.has_ended(_position(1, 2, 3))


def test_shuffled_epochs_hold_the_same_documents_in_other_orders():
  source = document_source.InMemoryDocuments([bytes([i]) for i in range(20)])
  stream = _stream(source, shuffle_seed=7)
  orders = []
  for epoch in range(3):
    runs, _ = stream.take(_position(epoch), 40)
    orders.append([int(run[1]) - 3 for run in runs])
    assert sorted(orders[-1]) == list(range(20))
  assert len({tuple(order) for order in orders}) == 3


def test_a_document_is_read_once_for_many_takes():
  CountedDocuments.reads = 0
  stream = _stream(CountedDocuments([bytes(1000)] * 3))
  position = _position()
  for _ in range(50):
    _, position = stream.take(position, 10)
  assert CountedDocuments.reads == 1


def test_reading_far_away_reads_one_document():
  CountedDocuments.reads = 0
  stream = _stream(CountedDocuments([bytes(10)] * 1000), shuffle_seed=0)
  stream.check(_position(7, 777, 5))
  stream.take(_position(7, 777, 5), 3)
  assert CountedDocuments.reads == 1


@pytest.mark.parametrize(
  ("position", "message"),
  [
    ((0, 3, 0), r"index=3.* in a source of 3 documents"),
    ((-1, 0, 0), r"epoch=-1.* in a source of 3 documents"),
    ((0, -1, 0), r"index=-1.* in a source of 3 documents"),
    ((0, 0, 3), r"offset=3.*that one has 3 targets"),
    ((0, 1, -1), r"offset=-1.*that one has 1 targets"),
    ((2, 0, 1), r"offset=1.* lies after the last epoch"),
    ((2, 1, 0), r"index=1.* lies after the last epoch"),
    ((3, 0, 0), r"epoch=3.* lies after the last epoch"),
  ],
)
def test_check_rejects_positions_that_do_not_exist(position, message):
  with pytest.raises(ValueError, match=message):
    _stream(num_epochs=2).check(_position(*position))


@pytest.mark.parametrize("position", [(0, 0, 2), (1, 2, 3), (2, 0, 0)])
def test_check_accepts_positions_that_exist(position):
  _stream(num_epochs=2).check(_position(*position))


def test_rejects_a_source_without_documents():
  with pytest.raises(
    ValueError, match=r"The source holds no documents: Counted"
  ):
    _stream(CountedDocuments([]))


def _pieces_of(documents, piece_length):
  stream = _stream(
    document_source.InMemoryDocuments(documents),
    shuffle_seed=3,
    num_epochs=1,
    piece_length=piece_length,
  )
  runs, end = stream.take(document_stream.Position(), 10**6)
  assert stream.has_ended(end)
  return stream, [tuple(run.tolist()) for run in runs]


def test_pieces_are_the_documents_cut_by_hand():
  # BEGIN is 1, END is 2, and a byte is its value plus 3.
  a, b, c, d = (ord(letter) + 3 for letter in "abcd")
  _, runs = _pieces_of([b"abcd", b"a"], 2)
  assert sorted(runs) == sorted(
    [(1, a, b), (b, c, d), (d, 2), (1, a, 2)],
  )


@pytest.mark.parametrize("piece_length", [1, 2, 3, 5, 100])
def test_pieces_keep_every_target_once(piece_length):
  documents = [bytes(range(n)) for n in (1, 2, 3, 7, 20)]
  stream, runs = _pieces_of(documents, piece_length)
  targets = sorted(token for run in runs for token in run[1:])
  expected = sorted(
    token for text in documents for token in (*(x + 3 for x in text), 2)
  )
  assert targets == expected
  assert max(len(run) - 1 for run in runs) <= piece_length
  assert stream.num_pieces == sum(
    -(-(len(text) + 1) // piece_length) for text in documents
  )


def test_pieces_of_one_document_are_shuffled_apart():
  _, runs = _pieces_of([bytes(range(100)), bytes(range(100, 200))], 4)
  first = [int(run[-1]) >= 103 for run in runs]
  changes = sum(x != y for x, y in itertools.pairwise(first))
  assert changes > 10


@pytest.mark.parametrize("piece_length", [None, 2])
@pytest.mark.parametrize("num_targets", [0, 1, 2, 3, 5, 9, 20])
def test_documents_between_two_positions_are_those_that_were_read(
  num_targets, piece_length
):
  source = CountedDocuments([bytes([2 + i]) * (i % 4 + 1) for i in range(10)])
  stream = _stream(source, shuffle_seed=3, piece_length=piece_length)
  position = _position()
  for _ in range(6):
    runs, after = stream.take(position, num_targets)
    reads = CountedDocuments.reads
    found = stream.documents_between(position, after)
    assert CountedDocuments.reads == reads
    # A run that holds nothing but an end is of no document's bytes.
    seen = [int(max(run)) for run in runs if max(run) > 2]
    # The tokenizer adds 3 to bytes, and document i is of bytes 2 + i.
    seen = list(dict.fromkeys(token - 5 for token in seen))
    assert [number for number in found if number in seen] == seen
    assert len(found) <= len(runs)
    position = after


def test_documents_between_are_in_the_order_of_reading():
  stream = _stream()
  between = stream.documents_between
  assert between(_position(0, 1, 0), _position(0, 1, 0)) == []
  assert between(_position(0, 0, 1), _position(0, 0, 2)) == [0]
  assert between(_position(0, 1, 0), _position(0, 2, 0)) == [1]
  assert between(_position(0, 1, 0), _position(1, 1, 1)) == [1, 2, 0]
