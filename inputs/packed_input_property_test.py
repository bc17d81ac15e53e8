"""Properties of packed batches: each target once, and exact resuming."""

import collections
import dataclasses
import functools
import json
import pathlib

import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest

from paxon.inputs import byte_tokenizer, packed_input
from paxon.inputs import packing as packing_lib
from paxon.inputs.sources import (
  example_source,
  json_lines,
  token_file,
  token_file_writer,
)
from paxon.inputs.streams import (
  example_stream,
  filtered,
  mixture,
  sequential_stream,
  windowed_stream,
)
from paxon.inputs.tf_records import tf_record_files

_SPLIT = packing_lib.Packing.SPLIT
_FIRST_FIT = packing_lib.Packing.FIRST_FIT
_NONE = packing_lib.Packing.NONE
_LONGEST = 12
# Of sources of text, whose examples end with this.
_WINDOWED = "windowed"
_TEXTS = ("json_lines", "tf_records", _WINDOWED)
_END = 99_999


@dataclasses.dataclass(kw_only=True)
class InOrder:
  """The same examples without random access."""

  examples: example_source.ExampleSource

  def iterate(self, start, /):
    for i in range(start, len(self.examples)):
      yield self.examples[i]


@dataclasses.dataclass(frozen=True)
class KeepSome:
  """Rejects every third example, except the first of a source."""

  def __call__(self, example):
    return int(example["targets"][0]) % 10_000 // 100 % 3 != 1


def _runs(lengths, member=0) -> list[np.ndarray]:
  """Returns examples; each token occurs once in all members."""
  return [
    10_000 * member + 100 * i + np.arange(n + 1, dtype=np.int32)
    for i, n in enumerate(lengths)
  ]


@dataclasses.dataclass(frozen=True)
class Numbers:
  """A tokenizer of numbers separated by spaces."""

  vocab_size: int = 100_000
  pad_id: int = 0
  begin_id: int = 1
  end_id: int = _END

  def encode(self, text):
    return np.array(text.split(), np.int32)

  def decode(self, ids):
    return " ".join(str(i) for i in ids)

  def byte_counts(self, ids):
    return np.zeros_like(ids)


def _source(kind, runs, path) -> example_source.ExampleSource:
  if kind == "memory":
    return example_source.InMemoryExamples(runs)
  if kind == "token_file":
    token_file_writer.write(path, runs, dtype=np.dtype(np.int32))
    return token_file.TokenFile(path=path)
  texts = [Numbers().decode(run[1:]) for run in runs]
  if kind == "json_lines":
    pathlib.Path(path).write_text(
      "\n".join(json.dumps({"text": text}) for text in texts)
    )
    documents = json_lines.JsonLines(files=path)
  else:
    tf_record_files.write(path, [text.encode() for text in texts])
    documents = tf_record_files.TfRecordFiles(files=path)
  return example_source.TokenizedDocuments(
    source=documents, tokenizer=Numbers()
  )


def _windowed(runs, path, **order) -> example_stream.Stream:
  """Returns windows over two files; the second may be empty."""
  texts = [Numbers().decode(run[1:]) for run in runs]
  half = (len(texts) + 1) // 2
  for name, part in (("a", texts[:half]), ("b", texts[half:])):
    lines = "\n".join(json.dumps({"text": text}) for text in part)
    pathlib.Path(f"{path}{name}").write_text(lines)
  return windowed_stream.WindowedDocuments(
    source=json_lines.JsonLines(files=[f"{path}a", f"{path}b"]),
    tokenizer=Numbers(),
    shuffle_window=3,
    **order,
  )


def _stream(kind, runs, path, *, seed, num_epochs) -> example_stream.Stream:
  if kind == _WINDOWED:
    return _windowed(runs, path, shuffle_seed=seed, num_epochs=num_epochs)
  if kind == "sequential":
    return sequential_stream.SequentialExamples(
      source=InOrder(examples=example_source.InMemoryExamples(runs)),
      shuffle_seed=seed,
      shuffle_window=4,
      num_epochs=num_epochs,
    )
  return example_stream.Examples(
    source=_source(kind, runs, path), shuffle_seed=seed, num_epochs=num_epochs
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
  """One configuration of an input."""

  members: tuple[tuple[int, ...], ...]
  kind: str
  packing: packing_lib.Packing
  seed: int | None
  is_filtered: bool
  num_epochs: int
  batch_size: int
  max_waiting: int

  @property
  def length(self) -> int:
    # Includes the end id of the text.
    return _LONGEST + 1 if self.packing is _NONE else 7

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
      num_workers=num_workers,
    )
    made.set_infeed_hosts(infeed_host_index=host, num_infeed_hosts=num_hosts)
    return made

  def expected(self) -> collections.Counter:
    """The expected count of each target."""
    targets = collections.Counter()
    for i, lengths in enumerate(self.members):
      for run in _runs(lengths, i):
        if not self.is_filtered or run[1] % 10_000 // 100 % 3 != 1:
          targets.update(dict.fromkeys(run[1:].tolist(), self.num_epochs))
          if self.kind in _TEXTS:
            targets[_END] += self.num_epochs
    return targets


_setups = functools.partial(
  st.builds,
  Setup,
  members=st.lists(
    st.lists(st.integers(1, _LONGEST), min_size=1, max_size=9).map(tuple),
    min_size=1,
    max_size=3,
  ).map(tuple),
  kind=st.sampled_from(("memory", "token_file", "sequential")),
  packing=st.sampled_from(packing_lib.Packing),
  seed=st.none() | st.integers(0, 5),
  is_filtered=st.booleans(),
  num_epochs=st.integers(1, 2),
  batch_size=st.sampled_from((4, 8)),
  max_waiting=st.integers(1, 5),
)


def _batches(made) -> tuple[list[dict[str, bytes]], list[str]]:
  """Returns the remaining batches, and the states between them as JSON."""
  states, batches = [json.dumps(made.get_state())], []
  for batch in made:
    batches.append(
      {k: (v.dtype, v.shape, v.tobytes()) for k, v in batch.items()}
    )
    states.append(json.dumps(made.get_state()))
  made.close()
  return batches, states


@pytest.mark.nightly(keep=4)
@pytest.mark.parametrize("packing", packing_lib.Packing)
@pytest.mark.parametrize(
  "kind", ["memory", "token_file", "json_lines", "tf_records"]
)
def test_exactly_once_and_restored_anywhere(tmp_path_factory, kind, packing):
  _check_once_and_restored(tmp_path_factory, kind, packing, num_workers=(0, 2))


@pytest.mark.parametrize("packing", packing_lib.Packing)
@pytest.mark.parametrize("kind", ["sequential", _WINDOWED])
def test_sequential_sources_have_the_same_properties(
  tmp_path_factory, kind, packing
):
  # Workers do not read sequential sources.
  _check_once_and_restored(tmp_path_factory, kind, packing, num_workers=(0,))


def _check_once_and_restored(tmp_path_factory, kind, packing, num_workers):
  @hypothesis.settings(max_examples=5)
  @hypothesis.given(
    setup=_setups(kind=st.just(kind), packing=st.just(packing)),
    num_hosts=st.sampled_from((1, 2, 4)),
    data=st.data(),
  )
  def check(setup, num_hosts, data):
    folder = tmp_path_factory.mktemp("data")
    for number in num_workers:
      _check_setup(setup, folder, data, num_hosts, number)

  check()


def _check_setup(setup, folder, data, num_hosts, num_workers):
  whole = list(setup.make(folder))
  batches, states = _batches(setup.make(folder))

  # Each kept target occurs once per epoch.
  read = collections.Counter()
  for batch in whole:
    read.update(batch["targets"][batch["weights"] > 0].tolist())
  assert read == setup.expected()

  # Any numbers of hosts and workers have the same bytes and state.
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

  # Resuming between any two batches returns the same rest.
  step = data.draw(st.integers(0, len(batches)))
  restored = setup.make(folder, num_workers=num_workers)
  restored.set_state(json.loads(states[step]))
  assert _batches(restored) == (batches[step:], states[step:])


@hypothesis.settings(max_examples=20)
@hypothesis.given(setup=_setups(), other=_setups(), data=st.data())
def test_resumes_with_another_packing_and_batch(
  tmp_path_factory, setup, other, data
):
  # NONE needs sequences as long as the longest example.
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
    # Truncated tokens are missing, also those of a partly read example.
    cut.cut_long_examples = True
    for batch in cut:
      read_and_cut.update(batch["targets"][batch["weights"] > 0].tolist())
    assert read_and_cut <= setup.expected()
    assert changed.packing is not _NONE or read_and_cut == setup.expected()


def _token_files(folder):
  """Returns a stream with `num_tokens`: reads follow the batch's plan."""
  streams = {
    name: _stream("token_file", runs, str(folder / name), seed=2, num_epochs=2)
    for name, runs in (("a", _runs((5, 12, 1, 7))), ("b", _runs((3, 3, 9), 1)))
  }
  return mixture.Mixture(members=streams)


def _filtered_text(folder):
  """Returns a stream without `num_tokens`: reads precede the plan."""
  del folder
  documents = [bytes([i % 250]) * (i % 13) for i in range(60)]
  source = example_source.TokenizedDocuments(
    source=example_source.InMemoryDocuments(documents),
    tokenizer=byte_tokenizer.ByteTokenizer(),
  )
  return filtered.Filtered(
    stream=example_stream.Examples(source=source, shuffle_seed=2, num_epochs=1),
    keep=filtered.MinTokens(tokens=4),
  )


@pytest.mark.parametrize("kind", [_token_files, _filtered_text])
def test_processes_read_the_same(tmp_path, kind):
  given = []
  for num_workers in (0, 2):
    made = packed_input.PackedInput(
      examples=kind(tmp_path),
      packing=_FIRST_FIT,
      global_batch_size=4,
      length=13,
      num_workers=num_workers,
      worker_processes=bool(num_workers),
    )
    given.append(_batches(made))
  assert given[0] == given[1]
