"""Tests for packed batches of any stream: exactly once, from any position."""

import collections
import dataclasses
import json
from typing import Any

import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest

from paxon.inputs import (
  base_input,
  byte_tokenizer,
  document_source,
  example_source,
  example_stream,
  filtered,
  mixture,
  packed_input,
  packed_lm_input,
  packing_plan,
  sequential_stream,
  token_file,
  token_file_writer,
)

_SPLIT = packing_plan.Packing.SPLIT
_FIRST_FIT = packing_plan.Packing.FIRST_FIT
_BEST_FIT = packing_plan.Packing.BEST_FIT
_NONE = packing_plan.Packing.NONE
_LONGEST = 12


@dataclasses.dataclass(kw_only=True)
class InOrder:
  """The same examples without an index."""

  examples: example_source.ExampleSource

  def iterate(self, start, /):
    for i in range(start, len(self.examples)):
      yield self.examples[i]


@dataclasses.dataclass(frozen=True)
class KeepSome:
  """Turns down every third example, and none that is the first of a source."""

  def __call__(self, example):
    return int(example["targets"][0]) % 10_000 // 100 % 3 != 1


def _runs(lengths, member=0) -> list[np.ndarray]:
  """Returns runs of tokens, each token once in all members."""
  return [
    10_000 * member + 100 * i + np.arange(n + 1, dtype=np.int32)
    for i, n in enumerate(lengths)
  ]


def _stream(kind, runs, path, *, seed, num_epochs) -> example_stream.Stream:
  memory = example_source.InMemoryExamples(runs)
  if kind == "sequential":
    return sequential_stream.SequentialExamples(
      source=InOrder(examples=memory),
      shuffle_seed=seed,
      shuffle_window=4,
      num_epochs=num_epochs,
    )
  source = memory
  if kind == "token_file":
    token_file_writer.write(path, runs, dtype=np.dtype(np.int32))
    source = token_file.TokenFile(path=path)
  return example_stream.Examples(
    source=source, shuffle_seed=seed, num_epochs=num_epochs
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
  """One way to read."""

  members: tuple[tuple[int, ...], ...]
  kind: str
  packing: packing_plan.Packing
  seed: int | None
  is_filtered: bool
  num_epochs: int
  batch_size: int
  max_waiting: int

  @property
  def length(self) -> int:
    return _LONGEST if self.packing is _NONE else 7

  def make(self, folder, *, host=0, num_hosts=1, num_workers=0):
    streams = {}
    for i, lengths in enumerate(self.members):
      stream = _stream(
        self.kind,
        _runs(lengths, i),
        str(folder / f"{i}"),
        seed=self.seed,
        num_epochs=self.num_epochs,
      )
      if self.is_filtered:
        stream = filtered.Filtered(stream=stream, keep=KeepSome())
      streams[f"m{i}"] = stream
    stream = streams["m0"]
    if len(streams) > 1:
      weights = {name: 1.0 + 2 * i for i, name in enumerate(streams)}
      stream = mixture.Mixture(
        members=streams,
        weights=weights,
        weight_changes={1: dict.fromkeys(streams, 1.0)},
      )
    made = packed_input.PackedInput(
      examples=stream,
      packing=self.packing,
      global_batch_size=self.batch_size,
      length=self.length,
      max_waiting=self.max_waiting,
      # Without an index there is nothing to read ahead by.
      num_workers=0 if self.kind == "sequential" else num_workers,
    )
    made.set_infeed_hosts(infeed_host_index=host, num_infeed_hosts=num_hosts)
    return made

  def expected(self) -> collections.Counter:
    """How often each target must be read."""
    targets = collections.Counter()
    for i, lengths in enumerate(self.members):
      for run in _runs(lengths, i):
        if not self.is_filtered or run[1] % 10_000 // 100 % 3 != 1:
          targets.update(dict.fromkeys(run[1:].tolist(), self.num_epochs))
    return targets


_setups = st.builds(
  Setup,
  members=st.lists(
    st.lists(st.integers(1, _LONGEST), min_size=1, max_size=9).map(tuple),
    min_size=1,
    max_size=3,
  ).map(tuple),
  kind=st.sampled_from(("memory", "token_file", "sequential")),
  packing=st.sampled_from(packing_plan.Packing),
  seed=st.none() | st.integers(0, 5),
  is_filtered=st.booleans(),
  num_epochs=st.integers(1, 2),
  batch_size=st.sampled_from((4, 8)),
  max_waiting=st.integers(1, 5),
)


def _batches(made) -> tuple[list[dict[str, bytes]], list[str]]:
  """Returns all batches from here, and the states between, as JSON."""
  states, batches = [json.dumps(made.get_state())], []
  for batch in made:
    batches.append(
      {k: (v.dtype, v.shape, v.tobytes()) for k, v in batch.items()}
    )
    states.append(json.dumps(made.get_state()))
  made.close()
  return batches, states


@hypothesis.settings(derandomize=True, max_examples=40, deadline=None)
@hypothesis.given(
  setup=_setups,
  num_hosts=st.sampled_from((1, 2, 4)),
  num_workers=st.sampled_from((0, 2)),
  data=st.data(),
)
def test_exactly_once_and_restored_anywhere(
  tmp_path_factory, setup, num_hosts, num_workers, data
):
  folder = tmp_path_factory.mktemp("data")
  whole = list(setup.make(folder))
  batches, states = _batches(setup.make(folder))

  # Every kept target as often as there are epochs.
  read = collections.Counter()
  for batch in whole:
    read.update(batch["targets"][batch["weights"] > 0].tolist())
  assert read == setup.expected()

  # All hosts together, with any workers, have the same bytes and state.
  hosts = [
    setup.make(folder, host=i, num_hosts=num_hosts, num_workers=num_workers)
    for i in range(num_hosts)
  ]
  for batch, state in zip(whole, states[1:], strict=True):
    rows = [host.get_next() for host in hosts]
    for key, value in batch.items():
      joined = np.concatenate([row[key] for row in rows])
      assert joined.dtype == value.dtype
      np.testing.assert_array_equal(joined, value, err_msg=key)
    assert {json.dumps(host.get_state()) for host in hosts} == {state}
  for host in hosts:
    with pytest.raises(StopIteration):
      host.get_next()
    host.close()

  # From the state between any two batches the rest is the same.
  step = data.draw(st.integers(0, len(batches)))
  restored = setup.make(folder, num_workers=num_workers)
  restored.set_state(json.loads(states[step]))
  assert _batches(restored) == (batches[step:], states[step:])


@hypothesis.settings(derandomize=True, max_examples=20, deadline=None)
@hypothesis.given(setup=_setups, other=_setups, data=st.data())
def test_a_run_goes_on_with_another_packing_and_batch(
  tmp_path_factory, setup, other, data
):
  # NONE needs rows for the longest; the rest of a split one is shorter.
  folder = tmp_path_factory.mktemp("data")
  before = setup.make(folder)
  step = data.draw(st.integers(0, len(_batches(setup.make(folder))[0])))
  read = collections.Counter()
  for _ in range(step):
    batch = before.get_next()
    read.update(batch["targets"][batch["weights"] > 0].tolist())
  changed = dataclasses.replace(
    setup, packing=other.packing, batch_size=other.batch_size
  )
  after, cut = changed.make(folder), changed.make(folder)
  after.set_state(before.get_state())
  cut.set_state(before.get_state())
  read_and_cut = read.copy()
  for batch in after:
    read.update(batch["targets"][batch["weights"] > 0].tolist())
  assert read == setup.expected()
  if changed.packing is not _SPLIT:
    # What is cut off of an example, one in the middle too, is left out.
    cut.cut_long_examples = True
    for batch in cut:
      read_and_cut.update(batch["targets"][batch["weights"] > 0].tolist())
    assert read_and_cut <= setup.expected()
    assert changed.packing is not _NONE or read_and_cut == setup.expected()


def _text(documents, **kwargs):
  source = document_source.InMemoryDocuments(documents)
  tokenizer = byte_tokenizer.ByteTokenizer()
  return packed_input.PackedInput(
    examples=example_stream.Examples(
      source=example_source.TokenizedDocuments(
        source=source, tokenizer=tokenizer
      ),
      **{"shuffle_seed": 1, "num_epochs": 2} | kwargs,
    ),
    global_batch_size=4,
    length=5,
    tokenizer=tokenizer,
  )


def test_split_packing_of_text_is_that_of_packed_lm_input():
  documents = tuple(bytes([i]) * (i * i % 11) for i in range(12))
  expected = packed_lm_input.PackedLmInput(
    source=document_source.InMemoryDocuments(documents),
    tokenizer=byte_tokenizer.ByteTokenizer(),
    global_batch_size=4,
    length=5,
    shuffle_seed=1,
    num_epochs=2,
  )
  for batch, other in zip(_text(documents), expected, strict=True):
    assert batch.keys() == other.keys()
    for key, value in other.items():
      np.testing.assert_array_equal(batch[key], value, err_msg=key)
      assert batch[key].dtype == value.dtype


def test_first_fit_by_hand():
  # Runs of 3, 3, 2 and 1 targets in two rows of four.
  made = packed_input.PackedInput(
    examples=example_stream.Examples(
      source=example_source.InMemoryExamples(_runs((3, 3, 2, 1))),
      shuffle_seed=None,
      num_epochs=1,
    ),
    packing=_FIRST_FIT,
    global_batch_size=2,
    length=4,
    max_waiting=2,
  )
  first, second = made
  np.testing.assert_array_equal(
    first["inputs"], [[0, 1, 2, 300], [100, 101, 102, 0]]
  )
  np.testing.assert_array_equal(
    first["targets"], [[1, 2, 3, 301], [101, 102, 103, 0]]
  )
  np.testing.assert_array_equal(
    first["segment_ids"], [[1, 1, 1, 2], [1, 1, 1, 0]]
  )
  np.testing.assert_array_equal(
    first["positions"], [[0, 1, 2, 0], [0, 1, 2, 0]]
  )
  np.testing.assert_array_equal(first["weights"], [[1, 1, 1, 1], [1, 1, 1, 0]])
  np.testing.assert_array_equal(
    second["inputs"], [[200, 201, 0, 0], [0, 0, 0, 0]]
  )


@pytest.mark.parametrize("packing", [_FIRST_FIT, _BEST_FIT, _NONE])
def test_what_is_left_of_a_split_example_is_cut(packing):
  runs, sizes = _runs((30,)), {"global_batch_size": 2, "length": 4}
  shared = {
    "examples": example_stream.Examples(
      source=example_source.InMemoryExamples(runs),
      shuffle_seed=None,
      num_epochs=1,
    ),
    **sizes,
  }
  split = packed_input.PackedInput(**shared)
  split.get_next()
  cut = packed_input.PackedInput(
    packing=packing, cut_long_examples=True, **shared
  )
  cut.set_state(split.get_state())
  (batch,) = cut
  np.testing.assert_array_equal(batch["inputs"], [[8, 9, 10, 11], [0, 0, 0, 0]])


def test_best_fit_takes_the_fullest_row():
  rows = {}
  for packing in (_FIRST_FIT, _BEST_FIT):
    made = packed_input.PackedInput(
      examples=example_stream.Examples(
        source=example_source.InMemoryExamples(_runs((3, 4, 1))),
        shuffle_seed=None,
        num_epochs=1,
      ),
      packing=packing,
      global_batch_size=2,
      length=5,
    )
    rows[packing] = made.get_next()["segment_ids"].max(axis=1).tolist()
  assert rows == {_FIRST_FIT: [2, 1], _BEST_FIT: [1, 2]}


def test_encoders_have_rows_of_their_own():
  examples = [
    {
      "encoder_inputs": np.full(n, 10 + n, np.int32),
      "inputs": np.full(m, 20 + m, np.int32),
      "targets": np.full(m, 30 + m, np.int32),
      "weights": np.full(m, 0.5, np.float32),
    }
    for n, m in ((3, 1), (3, 2), (1, 3))
  ]
  stream = example_stream.Examples(
    source=example_source.InMemoryExamples(examples),
    shuffle_seed=None,
    num_epochs=1,
  )
  made = packed_input.PackedInput(
    examples=stream,
    packing=_FIRST_FIT,
    global_batch_size=2,
    length=4,
    encoder_length=5,
  )
  (batch,) = made
  # The second has room with its targets only, and not with its encoder.
  np.testing.assert_array_equal(
    batch["encoder_segment_ids"], [[1, 1, 1, 2, 0], [1, 1, 1, 0, 0]]
  )
  np.testing.assert_array_equal(
    batch["segment_ids"], [[1, 2, 2, 2], [1, 1, 0, 0]]
  )
  np.testing.assert_array_equal(
    batch["encoder_positions"], [[0, 1, 2, 0, 0], [0, 1, 2, 0, 0]]
  )
  np.testing.assert_array_equal(
    batch["encoder_inputs"], [[13, 13, 13, 11, 0], [13, 13, 13, 0, 0]]
  )
  np.testing.assert_array_equal(batch["weights"], [[0.5] * 4, [0.5, 0.5, 0, 0]])
  with pytest.raises(ValueError, match=r"has encoder_ arrays; set .*encoder_l"):
    packed_input.PackedInput(
      examples=stream, packing=_NONE, global_batch_size=1, length=4
    ).get_next()


def test_without_packing_examples_keep_their_numbers_and_names():
  examples = [
    {
      **example_source.lm_features(run),
      "id": np.int64(i),
      "name": np.array(f"example {i}", object),
    }
    for i, run in enumerate(_runs((2, 1, 3)))
  ]
  stream = example_stream.Examples(
    source=example_source.InMemoryExamples(examples),
    shuffle_seed=None,
    num_epochs=1,
  )
  shared: dict[str, Any] = {"examples": stream, "global_batch_size": 2}
  batches = list(packed_input.PackedInput(packing=_NONE, length=3, **shared))
  assert [b["id"].tolist() for b in batches] == [[0, 1], [2, 0]]
  assert batches[0]["name"].tolist() == ["example 0", "example 1"]
  np.testing.assert_array_equal(batches[1]["weights"], [[1, 1, 1], [0, 0, 0]])
  with pytest.raises(ValueError, match=r"example 0 has 'id' without dimens"):
    packed_input.PackedInput(length=3, **shared).get_next()


def _kinds(runs, **kwargs):
  made: dict[str, Any] = {
    "examples": example_stream.Examples(
      source=example_source.InMemoryExamples(runs), shuffle_seed=None
    ),
    "global_batch_size": 2,
    "length": 4,
  }
  return packed_input.PackedInput(**made | kwargs)


def test_long_examples_are_split_cut_or_refused():
  runs = _runs((6,))
  split = _kinds(runs, packing=_FIRST_FIT).get_next()
  np.testing.assert_array_equal(split["inputs"], [[0, 1, 2, 3], [4, 5, 0, 0]])
  cut = _kinds(runs, packing=_NONE, cut_long_examples=True).get_next()
  np.testing.assert_array_equal(cut["inputs"], [[0, 1, 2, 3]] * 2)
  with pytest.raises(
    ValueError, match=r"example 0 has 6 places, more than .*4"
  ):
    _kinds(runs, packing=_NONE).get_next()


@pytest.mark.parametrize(
  ("make", "message"),
  [
    (lambda: _kinds([]).get_next(), r"The source holds no examples"),
    (lambda: _kinds([]).check_readable(), r"The source holds no examples"),
    (
      lambda: _kinds([np.array([5], np.int32)]).get_next(),
      r"example 0 has no targets: .* give begin_id",
    ),
    (
      lambda: _kinds([np.array([[5, 6]], np.int32)]).get_next(),
      r"example 0 must be integers \[n\], got int32 \[1, 2\]",
    ),
    (
      lambda: _kinds([{"inputs": np.zeros(2, np.int32)}]).get_next(),
      r"example 0 must have the array 'targets'",
    ),
    (
      lambda: _kinds(
        [{"inputs": np.zeros(2, int), "targets": np.zeros(3, int)}]
      ).get_next(),
      r"several lengths: {'inputs': 2, 'targets': 3}",
    ),
    (
      lambda: _kinds(
        [
          {"inputs": np.zeros(2, int), "targets": np.zeros(2, int)},
          np.arange(3),
          {**example_source.lm_features(np.arange(3)), "x": np.zeros(2)},
        ]
      ).get_next(),
      r"example 2 has the arrays \['inputs', 'targets', 'x'\], and example 0",
    ),
    (lambda: _kinds([], max_waiting=0), r"max_waiting must be at least 1"),
    (lambda: _kinds([], num_workers=-1), r"num_workers must be at least 0"),
    (lambda: _kinds([], encoder_length=0), r"encoder_length must be positive"),
    (lambda: _kinds([], encoder_length=4), r"SPLIT would part targets"),
    (lambda: _kinds([], cut_long_examples=True), r"no effect with .* SPLIT"),
    (
      lambda: example_stream.Examples(
        source=example_source.InMemoryExamples([]),
        shuffle_seed=None,
        num_epochs=0,
      ),
      r"Examples.num_epochs must be positive, or None",
    ),
  ],
)
def test_what_cannot_be_is_refused(make, message):
  with pytest.raises(ValueError, match=message):
    make()


def test_a_batch_smaller_than_the_hosts_is_refused():
  made = _kinds(_runs((3,)))
  with pytest.raises(ValueError, match=r"global_batch_size \(2\) .* hosts \(4"):
    made.set_infeed_hosts(infeed_host_index=0, num_infeed_hosts=4)


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"extra": 1}, r"must have the keys \['batches', 'data'"),
    ({"position": -1}, r"position must be an integer, got -1"),
    ({"position": True}, r"position must be an integer, got True"),
    ({"position": 99}, r"position is 99, and the stream ends after 6"),
    ({"batches": "1"}, r"batches must be an integer, got '1'"),
    ({"waiting": [[1]]}, r"waiting is damaged: \[1\]"),
    ({"waiting": [[1, "x"]]}, r"waiting must be an integer, got 'x'"),
    (
      {"data": {"num_examples": 4, "shuffle_seed": 1}},
      r"num_examples 4, and this input has num_examples 3",
    ),
    ({"data": {"m0": {}}}, r"saved with data of \['m0'\], and this input has"),
  ],
)
def test_a_state_of_other_data_is_refused(change, message):
  made = _text([b"ab", b"c", b""])
  made.get_next()
  before = made.get_state()
  with pytest.raises(ValueError, match=message):
    made.set_state({**before, **change})
  assert made.get_state() == before


def test_text_of_ids_and_documents_of_a_batch():
  made = _text([b"ab", b"c", b"defghijklmnop", b"q", b"rst"], shuffle_seed=None)
  before = made.get_state()
  batch = made.get_next()
  assert made.ids_to_strings(batch["targets"], [2, 5, 5, 5]) == [
    "ab",
    "defgh",
    "ijklm",
    "nopq",
  ]
  assert made.documents_between(before, made.get_state()) == [0, 1, 2, 3]
  assert made.required_vocab_size() == 259
  assert not made.is_endless


def test_a_subclass_edits_batches_and_peeks():
  class Edited(packed_input.PackedInput):
    def get_next(self) -> base_input.Batch:
      batch = super().get_next()
      return {**batch, "weights": 2 * batch["weights"]}

  made = Edited(
    examples=example_stream.Examples(
      source=example_source.InMemoryExamples(_runs((3, 3))), shuffle_seed=None
    ),
    global_batch_size=1,
    length=4,
  )
  peeked = made.peek()
  batch = made.get_next()
  np.testing.assert_array_equal(batch["weights"], 2)
  np.testing.assert_array_equal(peeked["inputs"], batch["inputs"])


def test_processes_read_the_same():
  documents = [bytes([i % 250]) * (i % 13) for i in range(60)]
  expected, _ = _batches(_text(documents))
  other = _text(documents)
  other.num_workers, other.worker_processes = 2, True
  assert _batches(other)[0] == expected
