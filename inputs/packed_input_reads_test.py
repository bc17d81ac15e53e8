"""Tests for the number of reads of examples in packed batches."""

import collections
import dataclasses
import json
import multiprocessing
import pickle
import threading

import numpy as np
import pytest

from paxon.inputs import packed_input
from paxon.inputs import packing as packing_lib
from paxon.inputs.sources import example_source
from paxon.inputs.streams import (
  example_stream,
  filtered,
  mixture,
  read_ahead,
  sequential_stream,
)


@dataclasses.dataclass(kw_only=True)
class Counted:
  """A billion examples that count their reads."""

  reads: list[int] = dataclasses.field(default_factory=list)

  def __len__(self):
    return 10**9

  def __getitem__(self, index, /):
    self.reads.append(index)
    return example_source.lm_features(np.array([index % 997] * 9, np.int32))


@pytest.mark.parametrize(
  "packing", [packing_lib.Packing.SPLIT, packing_lib.Packing.FIRST_FIT]
)
def test_an_example_of_many_batches_is_read_once(packing):
  reads = []

  class Noted(example_source.InMemoryExamples):
    def __getitem__(self, index, /):
      reads.append(index)
      return super().__getitem__(index)

  made = packed_input.PackedInput(
    examples=example_stream.Examples(
      source=Noted([np.arange(n + 1) for n in (50, 3, 50)]),
      shuffle_seed=None,
      num_epochs=1,
    ),
    packing=packing,
    global_batch_size=2,
    length=4,
    max_waiting=1,
  )
  state = made.get_state()
  assert reads == [0, 1, 2]
  reads.clear()
  for number, _ in enumerate(made):
    state = made.get_state() if number == 3 else state
    # Only waiting examples are kept.
    assert len(made._kept) == len({r for r, _ in made.get_state()["waiting"]})
  assert reads == [0, 1, 2]
  made.set_state(state)
  made.get_next()
  assert reads == [0, 1, 2, 0]
  made.reset()
  made.get_next()
  assert reads == [0, 1, 2, 0, 0]


def test_restoring_at_ten_million_reads_no_earlier_example():
  source = Counted()
  made = packed_input.PackedInput(
    examples=example_stream.Examples(source=source, shuffle_seed=0),
    packing=packing_lib.Packing.BEST_FIT,
    global_batch_size=4,
    length=16,
  )
  state = made.get_state()
  state["position"], state["batches"] = 10**7, 12345
  state["waiting"] = [[17, 3]]
  # Those of which the state has a hash, the first and the last among them.
  assert (len(source.reads), max(source.reads)) == (16, 10**9 - 1)
  source.reads.clear()
  made.set_state(state)
  assert not source.reads
  batch = made.get_next()
  # Examples have eight tokens; the waiting one has five left.
  assert batch["weights"].sum() == 5 + 8 * 7
  assert source.reads[0] == 17
  assert len(source.reads) <= 1 + 8 + made.max_waiting
  assert made.get_state()["batches"] == 12346
  assert len(json.dumps(made.get_state())) < 1000


@dataclasses.dataclass(kw_only=True)
class ByThread(Counted):
  """Records the threads that read."""

  threads: list[str] = dataclasses.field(default_factory=list)

  def __getitem__(self, index, /):
    self.threads.append(threading.current_thread().name)
    return super().__getitem__(index)


class Known(ByThread):
  """Has `num_tokens`."""

  def num_tokens(self, index):
    return 8


@pytest.mark.parametrize("kind", [ByThread, Known])
@pytest.mark.parametrize("is_filtered", [False, True])
@pytest.mark.parametrize(
  "packing", [packing_lib.Packing.SPLIT, packing_lib.Packing.BEST_FIT]
)
def test_workers_do_all_the_reading(kind, is_filtered, packing):
  source = kind()
  stream = example_stream.Examples(source=source, shuffle_seed=0)
  if is_filtered:
    stream = filtered.Filtered(stream=stream, keep=filtered.MinTokens(tokens=1))
  members = {
    "a": stream,
    "b": example_stream.Examples(source=source, shuffle_seed=1),
  }
  made = packed_input.PackedInput(
    examples=mixture.Mixture(members=members),
    packing=packing,
    global_batch_size=4,
    length=16,
    num_workers=2,
  )
  for _ in range(3):
    made.get_next()
  made.close()
  assert len(source.threads) >= 3 * 8
  assert {t.rpartition("_")[0] for t in source.threads} == {"read_ahead"}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_hosts_read_only_their_sequences_if_lengths_are_known(num_workers):
  source = Known()
  made = packed_input.PackedInput(
    examples=example_stream.Examples(source=source, shuffle_seed=None),
    packing=packing_lib.Packing.NONE,
    global_batch_size=8,
    length=8,
    num_workers=num_workers,
  )
  made.set_infeed_hosts(infeed_host_index=3, num_infeed_hosts=4)
  batch = made.get_next()
  made.close()
  np.testing.assert_array_equal(batch["inputs"][:, 0], [6, 7])
  # The first example determines the arrays.
  assert sorted(source.reads) == [0, 6, 7]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_filtered_example_is_read_once(num_workers):
  source = Known()
  made = packed_input.PackedInput(
    examples=filtered.Filtered(
      stream=example_stream.Examples(
        source=source, shuffle_seed=None, num_epochs=1
      ),
      keep=filtered.MinTokens(tokens=1),
    ),
    packing=packing_lib.Packing.SPLIT,
    global_batch_size=4,
    length=16,
    num_workers=num_workers,
  )
  for _ in range(3):
    made.get_next()
  made.close()
  # Two fill a sequence; workers may read more.
  assert len(source.reads) == len(set(source.reads))
  assert sorted(source.reads)[:24] == list(range(24))


class Damaged(Counted):
  """Has an example that cannot be read."""

  def __getitem__(self, index, /):
    if index == 5:
      raise ValueError("file a, record 5, is damaged")
    return super().__getitem__(index)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_unreadable_example_raises_in_its_batch(num_workers):
  made = packed_input.PackedInput(
    examples=example_stream.Examples(source=Damaged(), shuffle_seed=None),
    packing=packing_lib.Packing.NONE,
    global_batch_size=1,
    length=8,
    num_workers=num_workers,
  )
  for number in range(5):
    assert made.get_next()["inputs"][0, 0] == number
  state = made.get_state()
  for _ in range(2):
    with pytest.raises(ValueError, match="file a, record 5, is damaged"):
      made.get_next()
  assert made.get_state() == state
  made.close()


class StoreError(Exception):
  """An error whose constructor takes more than a message."""

  def __init__(self, code, place):
    super().__init__(f"{code} at {place}")


class Remote(Counted):
  """Has an example that raises `StoreError`."""

  def __getitem__(self, index, /):
    if index == 5:
      raise StoreError(503, "bucket")
    return super().__getitem__(index)


def test_worker_processes_propagate_any_error(monkeypatch):
  monkeypatch.setattr(read_ahead, "_sources", [Remote()])
  sent = pickle.dumps(read_ahead._read_chunk(0, [4, 5, 6]))
  before, error, after = pickle.loads(sent)
  assert [x["inputs"][0] for x in (before, after)] == [4, 6]
  assert str(error) == "StoreError: 503 at bucket"
  assert 'raise StoreError(503, "bucket")' in error.__notes__[0]


def test_reading_resumes_after_a_killed_worker_process():
  tokens = [np.full(9, i, np.int32) for i in range(40)]
  made = packed_input.PackedInput(
    examples=example_stream.Examples(
      source=example_source.InMemoryExamples(tokens), shuffle_seed=None
    ),
    packing=packing_lib.Packing.NONE,
    global_batch_size=1,
    length=8,
    num_workers=1,
    worker_processes=True,
  )
  made.get_next()
  (worker,) = multiprocessing.active_children()
  worker.kill()
  worker.join()
  with pytest.raises(
    RuntimeError, match=r"process that .* has ended: .*num_wo"
  ):
    collections.deque(made, maxlen=0)
  # Resuming neither loses nor repeats examples.
  made.close()
  assert made.get_next()["inputs"][0, 0] == made.get_state()["position"] - 1
  made.close()
  assert not multiprocessing.active_children()


def test_rejects_workers_for_sequential_sources():
  class InOrder:
    def iterate(self, start, /):
      raise AssertionError("nothing is read")

  made = packed_input.PackedInput(
    examples=sequential_stream.SequentialExamples(
      source=InOrder(), shuffle_seed=None
    ),
    global_batch_size=2,
    length=4,
    num_workers=2,
  )
  for call in (made.check_readable, made.get_next):
    with pytest.raises(
      ValueError, match=r"num_workers is 2, but .*\(SequentialExamples\) has no"
    ):
      call()
