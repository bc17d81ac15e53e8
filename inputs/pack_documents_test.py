"""Tests for packed documents: by hand, on several hosts, and resumed."""

import collections
import dataclasses
import itertools
import json
from typing import Any

import fiddle as fdl
import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest

from paxon.inputs import byte_tokenizer, packed_input
from paxon.inputs.sources import example_source
from paxon.inputs.streams import example_stream

_KEYS = {
  "inputs",
  "targets",
  "weights",
  "positions",
  "segment_ids",
  "target_bytes",
}
_DOCUMENTS = tuple(bytes([i]) * (i * i % 11) for i in range(12))
_settings = hypothesis.settings(max_examples=25)
_documents = st.lists(st.binary(max_size=12), min_size=1, max_size=8)
_lengths = st.integers(1, 9)


@dataclasses.dataclass(frozen=True)
class CountedDocuments(example_source.InMemoryDocuments):
  """Documents that record which are read."""

  reads: list[int] = dataclasses.field(default_factory=list)

  def __getitem__(self, index: int, /) -> bytes:
    self.reads.append(index)
    return super().__getitem__(index)


def _make(documents=_DOCUMENTS, *, source=None, **kwargs):
  defaults: dict[str, Any] = {
    "source": source or example_source.InMemoryDocuments(documents),
    "tokenizer": byte_tokenizer.ByteTokenizer(),
    "global_batch_size": 4,
    "length": 5,
    "shuffle_seed": 1,
  }
  return packed_input.pack_documents(**defaults | kwargs)


def _bytes(batch) -> dict[str, tuple]:
  return {k: (v.dtype, v.shape, v.tobytes()) for k, v in batch.items()}


def _take(packed, count) -> list[dict[str, tuple]]:
  return [_bytes(packed.get_next()) for _ in range(count)]


def _documents_read(batches) -> list[bytes]:
  """Returns the documents of the targets, in order of their ends."""
  targets = np.concatenate([b["targets"][b["weights"] > 0] for b in batches])
  documents, current = [], bytearray()
  for target in targets.tolist():
    if target == 2:
      documents.append(bytes(current))
      current.clear()
    else:
      current.append(target - 3)
  assert not current
  return documents


def test_batches_of_two_documents_by_hand():
  packed = _make(
    [b"\x02\x03\x04", b"\x05"],  # Ids 5 6 7 and 8.
    global_batch_size=2,
    length=2,
    shuffle_seed=None,
    num_epochs=1,
  )
  first, second = packed.get_next(), packed.get_next()
  for batch, expected in (
    (
      first,
      {
        "inputs": [[1, 5], [6, 7]],
        "targets": [[5, 6], [7, 2]],
        "weights": [[1, 1], [1, 1]],
        "positions": [[0, 1], [0, 1]],
        "segment_ids": [[1, 1], [1, 1]],
        "target_bytes": [[1, 1], [1, 0]],
      },
    ),
    (
      second,
      {
        "inputs": [[1, 8], [0, 0]],
        "targets": [[8, 2], [0, 0]],
        "weights": [[1, 1], [0, 0]],
        "positions": [[0, 1], [0, 0]],
        "segment_ids": [[1, 1], [0, 0]],
        "target_bytes": [[1, 0], [0, 0]],
      },
    ),
  ):
    assert batch.keys() == expected.keys() == _KEYS
    for key, rows in expected.items():
      np.testing.assert_array_equal(batch[key], rows, err_msg=key)
      assert batch[key].dtype == (np.float32 if key == "weights" else np.int32)
  with pytest.raises(StopIteration):
    packed.get_next()


@_settings
@hypothesis.given(
  documents=_documents,
  length=_lengths,
  batch_size=st.integers(1, 4),
  seed=st.none() | st.integers(0, 5),
  num_epochs=st.integers(1, 3),
)
def test_every_byte_is_a_target_once_an_epoch(
  documents, length, batch_size, seed, num_epochs
):
  packed = _make(
    documents,
    length=length,
    global_batch_size=batch_size,
    shuffle_seed=seed,
    num_epochs=num_epochs,
  )
  batches = list(packed)
  read = _documents_read(batches)
  for epoch in range(num_epochs):
    one = read[epoch * len(documents) : (epoch + 1) * len(documents)]
    assert collections.Counter(one) == collections.Counter(documents)
  assert len(read) == num_epochs * len(documents)

  num_targets = num_epochs * sum(len(d) + 1 for d in documents)
  assert sum(b["weights"].sum() for b in batches) == num_targets
  num_bytes = num_epochs * sum(len(d) for d in documents)
  assert sum(b["target_bytes"].sum() for b in batches) == num_bytes
  # Only the last batch has padding, and no batch is only padding.
  assert len(batches) == -(-num_targets // (length * batch_size))


@_settings
@hypothesis.given(documents=_documents, length=_lengths, seed=st.integers(0, 9))
def test_nothing_is_predicted_across_documents(documents, length, seed):
  packed = _make(documents, length=length, shuffle_seed=seed, num_epochs=2)
  for batch in packed:
    for row in range(batch["inputs"].shape[0]):
      inputs, targets = batch["inputs"][row], batch["targets"][row]
      segments = batch["segment_ids"][row]
      for place in range(1, length):
        if segments[place] and segments[place] == segments[place - 1]:
          assert inputs[place] == targets[place - 1] != 2
        elif segments[place]:
          assert (targets[place - 1], inputs[place]) == (2, 1)


@_settings
@hypothesis.given(
  documents=_documents,
  length=_lengths,
  num_before=st.integers(0, 12),
  num_epochs=st.none() | st.integers(1, 2),
)
def test_resumes_with_the_same_bytes(documents, length, num_before, num_epochs):
  def make():
    return _make(documents, length=length, num_epochs=num_epochs)

  undisturbed = make()
  for _ in range(num_before):
    if next(undisturbed, None) is None:
      break
  state = json.loads(json.dumps(undisturbed.get_state()))
  restored = make()
  next(restored)  # Restoring works at any time, not only at first.
  restored.set_state(state)
  assert restored.get_state() == state
  for _ in range(6):
    expected, actual = next(undisturbed, None), next(restored, None)
    assert (expected is None) == (actual is None)
    if expected is not None:
      assert _bytes(actual) == _bytes(expected)
    assert restored.get_state() == undisturbed.get_state()


def test_state_is_small_and_the_same_on_every_host():
  hosts = [_make() for _ in range(4)]
  for index, host in enumerate(hosts):
    host.set_infeed_hosts(infeed_host_index=index, num_infeed_hosts=4)
    _take(host, 3)
  states = [host.get_state() for host in hosts]
  assert states == [states[0]] * 4
  # 3 batches of 4 x 5 targets; an epoch has 12 documents of about 46 bytes.
  num_targets = sum(len(d) + 1 for d in _DOCUMENTS)
  assert states[0]["position"] // len(_DOCUMENTS) == 60 // num_targets
  assert len(json.dumps(states[0])) < 200


@pytest.mark.parametrize("num_epochs", [None, 1, 2])
@pytest.mark.parametrize("num_hosts", [2, 4])
def test_hosts_together_have_the_global_batch(num_hosts, num_epochs):
  alone = _make(num_epochs=num_epochs)
  hosts = [_make(num_epochs=num_epochs) for _ in range(num_hosts)]
  for index, host in enumerate(hosts):
    host.set_infeed_hosts(infeed_host_index=index, num_infeed_hosts=num_hosts)
  for _ in range(9):
    expected = next(alone, None)
    rows = [next(host, None) for host in hosts]
    if expected is None:
      assert rows == [None] * num_hosts
      continue
    joined = {
      key: np.concatenate([row[key] for row in rows if row is not None])
      for key in expected
    }
    assert _bytes(joined) == _bytes(expected)


def test_restores_on_another_number_of_hosts_and_another_batch_size():
  first = _make()
  expected = np.concatenate([first.get_next()["targets"] for _ in range(6)])
  again = _make()
  _take(again, 2)
  halves = [_make(global_batch_size=8) for _ in range(2)]
  for index, half in enumerate(halves):
    half.set_infeed_hosts(infeed_host_index=index, num_infeed_hosts=2)
    half.set_state(again.get_state())
  actual = [half.get_next()["targets"] for _ in range(2) for half in halves]
  np.testing.assert_array_equal(np.concatenate(actual), expected[8:])


def test_order_depends_on_the_seed():
  batches = [_take(_make(shuffle_seed=seed), 4) for seed in (0, 1, None)]
  assert batches[0] != batches[1] != batches[2] != batches[0]
  assert _take(_make(shuffle_seed=1), 4) == batches[1]


def test_epochs_have_different_orders():
  first, second = np.split(
    np.array(_documents_read(list(_make(num_epochs=2))), object), 2
  )
  assert sorted(first) == sorted(second) == sorted(_DOCUMENTS)
  assert list(first) != list(second)


def test_training_never_ends_and_has_no_padding():
  packed = _make([b"ab"])
  for _ in range(50):
    batch = next(packed)
    assert batch["weights"].all()
    assert (batch["segment_ids"] > 0).all()


def test_stays_ended_until_reset():
  packed = _make(num_epochs=1)
  expected = [_bytes(batch) for batch in packed]
  for _ in range(2):
    with pytest.raises(StopIteration):
      packed.get_next()
  assert packed.get_state()["position"] == len(_DOCUMENTS)
  packed.reset()
  assert [_bytes(batch) for batch in packed] == expected


def test_padding_has_no_bytes_for_any_pad_id():
  class PadIsText(byte_tokenizer.ByteTokenizer):
    @property
    def pad_id(self) -> int:
      return 68

  batch = _make([b"A"], tokenizer=PadIsText(), num_epochs=1).get_next()
  assert batch["targets"].ravel().tolist() == [68, 2] + [68] * 18
  assert batch["target_bytes"].ravel().tolist() == [1] + [0] * 19


def test_can_be_configured_by_fiddle():
  config = fdl.Config(
    packed_input.pack_documents,
    source=fdl.Config(example_source.InMemoryDocuments, _DOCUMENTS),
    tokenizer=fdl.Config(byte_tokenizer.ByteTokenizer),
    length=5,
    global_batch_size=4,
    shuffle_seed=1,
  )
  assert _take(fdl.build(config), 2) == _take(_make(), 2)
  config.length = 0
  with pytest.raises(ValueError, match=r"length must be positive, got 0"):
    fdl.build(config)


def test_construction_reads_no_documents():
  packed = _make([])
  with pytest.raises(ValueError, match=r"The source holds no examples"):
    packed.get_next()


def test_rejects_no_epochs():
  with pytest.raises(ValueError, match=r"num_epochs must be positive.* got 0"):
    _make(num_epochs=0)


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"shuffle_seed": 9}, r"saved with shuffle_seed 9, .* has shuffle_seed 1"),
    ({"shuffle_seed": None}, r"saved with shuffle_seed None"),
    ({"num_documents": 11}, r"saved with num_documents 11, .* has .* 12"),
    ({"chunk_length": 3}, r"saved with chunk_length 3, .* has .* None"),
  ],
)
def test_rejects_a_state_of_other_data(change, message):
  packed = _make()
  packed.get_next()
  before = packed.get_state()
  with pytest.raises(ValueError, match=message):
    packed.set_state({**before, "data": before["data"] | change})
  assert packed.get_state() == before


def test_rejects_a_state_beyond_the_end_of_a_document():
  packed = _make(shuffle_seed=None)
  packed.set_state(packed.get_state() | {"waiting": [[3, 10]]})
  with pytest.raises(ValueError, match=r"example 3 has 10 targets, and 10 of"):
    packed.get_next()


@pytest.mark.parametrize("chunk_length", [1, 3, 100])
def test_chunks_resume_exactly(chunk_length):
  packed = _make(chunk_length=chunk_length)
  states, batches = [packed.get_state()], []
  for _ in range(7):
    batches.append(_bytes(packed.get_next()))
    states.append(packed.get_state())
  for i, state in enumerate(states[:-1]):
    resumed = _make(chunk_length=chunk_length)
    resumed.set_state(state)
    assert _take(resumed, len(batches) - i) == batches[i:]


def test_rejects_an_empty_chunk():
  with pytest.raises(ValueError, match=r"chunk_length must be positive"):
    _make(chunk_length=0)


def test_a_document_of_many_batches_is_read_once():
  source = CountedDocuments([bytes(1000)] * 3)
  packed = _make(source=source)
  _take(packed, 50)
  assert len(source.reads) == 1


def test_restoring_far_away_reads_one_document():
  source = CountedDocuments([bytes(60)] * 1000)
  packed = _make(source=source, shuffle_seed=0)
  state = packed.get_state() | {"position": 7778, "waiting": [[5, 20]]}
  # Those of which the state has a hash.
  assert len(source.reads) == 16
  source.reads.clear()
  packed.set_state(state)
  assert not source.reads
  packed.get_next()
  assert source.reads == [5]


def _chunks(documents, chunk_length):
  return example_source.TokenizedDocuments(
    source=example_source.InMemoryDocuments(documents),
    tokenizer=byte_tokenizer.ByteTokenizer(),
    chunk_length=chunk_length,
  )


def test_chunks_by_hand():
  # BEGIN is 1, END is 2, and a byte is its value plus 3.
  a, b, c, d = (ord(letter) + 3 for letter in "abcd")
  chunks = _chunks([b"abcd", b"a"], 2)
  assert [(x["inputs"].tolist(), x["targets"].tolist()) for x in chunks] == [
    ([1, a], [a, b]),
    ([b, c], [c, d]),
    ([d], [2]),
    ([1, a], [a, 2]),
  ]
  assert [chunks.document_number(i) for i in range(4)] == [0, 0, 0, 1]


@pytest.mark.parametrize("chunk_length", [1, 2, 3, 5, 100])
def test_chunks_have_every_target_once(chunk_length):
  documents = [bytes(range(n)) for n in (1, 2, 3, 7, 20)]
  chunks = list(_chunks(documents, chunk_length))
  targets = [t for chunk in chunks for t in chunk["targets"].tolist()]
  assert targets == [
    token for text in documents for token in (*(x + 3 for x in text), 2)
  ]
  assert max(len(chunk["inputs"]) for chunk in chunks) <= chunk_length
  assert len(chunks) == sum(
    -(-(len(text) + 1) // chunk_length) for text in documents
  )


def test_chunks_of_a_document_are_not_neighbours():
  stream = example_stream.Examples(
    source=_chunks([bytes(range(100)), bytes(range(100, 200))], 4),
    shuffle_seed=3,
  )
  first = [number >= 26 for number in stream.numbers(0, 52)]
  assert sum(x != y for x, y in itertools.pairwise(first)) > 10


@pytest.mark.parametrize("chunk_length", [None, 2])
@pytest.mark.parametrize("length", [1, 2, 3, 5, 9, 20])
def test_documents_between_two_positions_are_those_read(length, chunk_length):
  source = CountedDocuments([bytes([2 + i]) * (i % 4 + 1) for i in range(10)])
  packed = _make(
    source=source,
    length=length,
    global_batch_size=1,
    shuffle_seed=3,
    chunk_length=chunk_length,
  )
  packed.get_next()
  for _ in range(6):
    before, batch = packed.get_state(), packed.get_next()
    reads = len(source.reads)
    found = packed.documents_between(before, packed.get_state())
    assert len(source.reads) == reads
    assert found is not None
    # The tokenizer adds 3 to bytes, and document i consists of bytes 2 + i.
    tokens = np.stack([batch["inputs"], batch["targets"]], axis=-1)
    seen = [int(t) - 5 for t in tokens.max(axis=-1).ravel() if t > 2]
    seen = list(dict.fromkeys(seen))
    assert [number for number in found if number in seen] == seen
    assert len(found) <= length


@hypothesis.settings(max_examples=60)
@hypothesis.given(
  counts=st.lists(st.integers(1, 9), min_size=1, max_size=12),
  length=st.integers(1, 7),
  num_sequences=st.integers(1, 4),
)
def test_split_packing_keeps_every_pair_in_order(counts, length, num_sequences):
  # All tokens differ, so that a pair identifies its position.
  starts = np.cumsum([0, *[count + 1 for count in counts]]) + 10
  runs = [
    np.arange(start, start + count + 1, dtype=np.int32)
    for start, count in zip(starts, counts, strict=False)
  ]
  batches = list(
    packed_input.PackedInput(
      examples=example_stream.Examples(
        source=example_source.InMemoryExamples(runs),
        shuffle_seed=None,
        num_epochs=1,
      ),
      global_batch_size=num_sequences,
      length=length,
    )
  )
  batch = {k: np.concatenate([b[k] for b in batches]) for k in batches[0]}
  filled = batch["weights"] > 0
  pairs = zip(batch["inputs"][filled], batch["targets"][filled], strict=True)
  assert list(pairs) == [(t, t + 1) for run in runs for t in run[:-1]]
  np.testing.assert_array_equal(filled, batch["segment_ids"] > 0)
  # Padding comes last.
  assert filled.ravel()[: sum(counts)].all()
  for row in range(len(filled)):
    segments, positions = batch["segment_ids"][row], batch["positions"][row]
    previous = 0
    for i in range(length):
      if segments[i] == 0:
        assert not filled[row, i:].any()
        assert not batch["inputs"][row, i:].any()
        assert not positions[i:].any()
        break
      assert segments[i] - previous in (0, 1)
      if segments[i] != previous:
        assert positions[i] == 0
      else:
        assert positions[i] == positions[i - 1] + 1
        # Within a segment, the input is the previous target.
        assert batch["inputs"][row, i] == batch["targets"][row, i - 1]
      previous = segments[i]


@pytest.mark.parametrize(
  ("documents", "length", "inputs", "targets", "positions", "segments"),
  [
    pytest.param(
      # Bytes 2, 3, 4 are the ids 5, 6, 7.
      [b"\x02\x03", b"\x04"],
      4,
      [[1, 5, 6, 1], [7, 0, 0, 0]],
      [[5, 6, 2, 7], [2, 0, 0, 0]],
      [[0, 1, 2, 0], [0, 0, 0, 0]],
      [[1, 1, 1, 2], [1, 0, 0, 0]],
      id="the module's example",
    ),
    pytest.param(
      [b"\x02\x03\x04\x05\x06", b""],
      3,
      [[1, 5, 6], [7, 8, 9], [1, 0, 0], [0, 0, 0]],
      [[5, 6, 7], [8, 9, 2], [2, 0, 0], [0, 0, 0]],
      [[0, 1, 2], [0, 1, 2], [0, 0, 0], [0, 0, 0]],
      [[1, 1, 1], [1, 1, 1], [1, 0, 0], [0, 0, 0]],
      id="three sequences and an empty document",
    ),
    pytest.param(
      [b"", b"", b"\x02"],
      4,
      [[1, 1, 1, 5]],
      [[2, 2, 5, 2]],
      [[0, 0, 0, 1]],
      [[1, 2, 3, 3]],
      id="equal documents are separate segments",
    ),
  ],
)
def test_batches_by_hand(
  documents, length, inputs, targets, positions, segments
):
  packed = _make(
    documents,
    length=length,
    global_batch_size=len(inputs),
    shuffle_seed=None,
    num_epochs=1,
  )
  (batch,) = packed
  for key, expected in (
    ("inputs", inputs),
    ("targets", targets),
    ("positions", positions),
    ("segment_ids", segments),
    ("weights", np.asarray(segments) > 0),
  ):
    np.testing.assert_array_equal(batch[key], expected, err_msg=key)


def test_shapes_are_known_without_reading_if_the_input_is_endless():
  source = CountedDocuments([b"text"])
  packed = _make(source=source)
  packed.set_infeed_hosts(infeed_host_index=1, num_infeed_hosts=2)
  shapes = packed.batch_shapes()
  assert not source.reads
  batch = packed.get_next()
  assert shapes == {k: (v.shape, v.dtype) for k, v in batch.items()}
  assert _make(num_epochs=1).batch_shapes() is None
