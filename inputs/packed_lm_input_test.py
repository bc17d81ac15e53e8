"""Tests for packed batches: by hand, over hosts, resumed, and at the end."""

import collections
import json
from typing import Any

import fiddle as fdl
import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest

from paxon.inputs import (
  base_input,
  byte_tokenizer,
  document_source,
  packed_lm_input,
)

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


def _make(documents=_DOCUMENTS, *, cls=packed_lm_input.PackedLmInput, **kwargs):
  defaults: dict[str, Any] = {
    "source": document_source.InMemoryDocuments(documents),
    "tokenizer": byte_tokenizer.ByteTokenizer(),
    "global_batch_size": 4,
    "length": 5,
    "shuffle_seed": 1,
  }
  return cls(**defaults | kwargs)


def _bytes(batch) -> dict[str, tuple]:
  return {k: (v.dtype, v.shape, v.tobytes()) for k, v in batch.items()}


def _take(packed, count) -> list[dict[str, tuple]]:
  return [_bytes(packed.get_next()) for _ in range(count)]


def _documents_read(batches) -> list[bytes]:
  """Returns the documents that the targets spell, in order of their ends."""
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
  # Only the last batch has empty places, and none is only those.
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
  # 3 batches of 4 x 5 targets; the epoch has 12 documents of 46 bytes or so.
  num_targets = sum(len(d) + 1 for d in _DOCUMENTS)
  assert states[0]["epoch"] == 60 // num_targets
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


def test_seeds_differ_and_one_seed_is_one_order():
  batches = [_take(_make(shuffle_seed=seed), 4) for seed in (0, 1, None)]
  assert batches[0] != batches[1] != batches[2] != batches[0]
  assert _take(_make(shuffle_seed=1), 4) == batches[1]


def test_epochs_have_different_orders():
  first, second = np.split(
    np.array(_documents_read(list(_make(num_epochs=2))), object), 2
  )
  assert sorted(first) == sorted(second) == sorted(_DOCUMENTS)
  assert list(first) != list(second)


def test_training_never_ends_and_has_no_empty_places():
  packed = _make([b"ab"])
  for _ in range(50):
    batch = next(packed)
    assert batch["weights"].all()
    assert (batch["segment_ids"] > 0).all()


def test_the_end_stays_until_reset():
  packed = _make(num_epochs=1)
  expected = [_bytes(batch) for batch in packed]
  for _ in range(2):
    with pytest.raises(StopIteration):
      packed.get_next()
  assert packed.get_state()["epoch"] == 1
  packed.reset()
  assert [_bytes(batch) for batch in packed] == expected


def test_a_subclass_may_edit_the_batch():
  class Halved(packed_lm_input.PackedLmInput):
    def get_next(self) -> base_input.Batch:
      batch = super().get_next()
      batch["weights"] = batch["weights"] / 2
      return batch

  edited = _make(cls=Halved)
  expected = _make()
  np.testing.assert_array_equal(
    edited.get_next()["weights"], expected.get_next()["weights"] / 2
  )
  restored = _make(cls=Halved)
  restored.set_state(expected.get_state())
  assert _take(restored, 2) == _take(edited, 2)


def test_padding_stands_for_no_bytes_whatever_its_id():
  class PadIsText(byte_tokenizer.ByteTokenizer):
    @property
    def pad_id(self) -> int:
      return 68

  batch = _make([b"A"], tokenizer=PadIsText(), num_epochs=1).get_next()
  assert batch["targets"].ravel().tolist() == [68, 2] + [68] * 18
  assert batch["target_bytes"].ravel().tolist() == [1] + [0] * 19


def test_fiddle_configures_it():
  config = fdl.Config(
    packed_lm_input.PackedLmInput,
    source=fdl.Config(document_source.InMemoryDocuments, _DOCUMENTS),
    tokenizer=fdl.Config(byte_tokenizer.ByteTokenizer),
    length=5,
    global_batch_size=4,
    shuffle_seed=1,
  )
  assert _take(fdl.build(config), 2) == _take(_make(), 2)
  config.length = 0
  with pytest.raises(ValueError, match=r"length must be positive, got 0"):
    fdl.build(config)
  with pytest.raises(AttributeError, match=r"infeed_host_index"):
    config.infeed_host_index = 1


def test_documents_are_not_asked_for_when_it_is_made():
  packed = _make([])
  with pytest.raises(ValueError, match=r"The source holds no documents"):
    packed.get_next()


def test_rejects_no_epochs():
  with pytest.raises(ValueError, match=r"num_epochs must be positive.* got 0"):
    _make(num_epochs=0)


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"num_documents": 11}, r"saved with num_documents 11, .* has .* 12"),
    ({"shuffle_seed": 9}, r"saved with shuffle_seed 9, .* has shuffle_seed 1"),
    ({"shuffle_seed": None}, r"saved with shuffle_seed None"),
    ({"bins": 3}, r"must have the keys \['epoch', .* got \['bins', 'epoch'"),
    ({"offset": 1.0}, r"state's offset must be an integer, got 1\.0"),
    ({"epoch": "1"}, r"state's epoch must be an integer, got '1'"),
    ({"index": None}, r"state's index must be an integer, got None"),
    ({"index": True}, r"state's index must be an integer, got True"),
    ({"index": 12}, r"index=12.* in a source of 12 documents"),
    ({"offset": 99}, r"offset=99.*that one has \d+ targets"),
  ],
)
def test_rejects_a_state_that_is_damaged_or_of_other_data(change, message):
  packed = _make()
  packed.get_next()
  before = packed.get_state()
  with pytest.raises(ValueError, match=message):
    packed.set_state({**before, **change})
  assert packed.get_state() == before


@pytest.mark.parametrize("piece_length", [1, 3, 100])
def test_pieces_resume_exactly(piece_length):
  packed = _make(piece_length=piece_length)
  states, batches = [packed.get_state()], []
  for _ in range(7):
    batches.append(_bytes(packed.get_next()))
    states.append(packed.get_state())
  for i, state in enumerate(states[:-1]):
    resumed = _make(piece_length=piece_length)
    resumed.set_state(state)
    assert _take(resumed, len(batches) - i) == batches[i:]


def test_a_position_among_other_pieces_is_refused():
  state = _make(piece_length=3).get_state()
  with pytest.raises(
    ValueError, match=r"saved with piece_length 3, .* has .* 4"
  ):
    _make(piece_length=4).set_state(state)


def test_rejects_an_empty_piece():
  with pytest.raises(
    ValueError, match=r"piece_length must be positive, or None"
  ):
    _make(piece_length=0)
