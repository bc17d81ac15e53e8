"""Tests for packed batches of any stream."""

from typing import Any

import numpy as np
import pytest

from paxon.inputs import base_input, byte_tokenizer, packed_input
from paxon.inputs import packing as packing_lib
from paxon.inputs.sources import example_source
from paxon.inputs.streams import example_stream

_SPLIT = packing_lib.Packing.SPLIT
_FIRST_FIT = packing_lib.Packing.FIRST_FIT
_BEST_FIT = packing_lib.Packing.BEST_FIT
_NONE = packing_lib.Packing.NONE


def _runs(lengths, member=0) -> list[np.ndarray]:
  """Returns examples; each token occurs once in all members."""
  return [
    10_000 * member + 100 * i + np.arange(n + 1, dtype=np.int32)
    for i, n in enumerate(lengths)
  ]


def _text(documents, **kwargs):
  source = example_source.InMemoryDocuments(documents)
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


def test_first_fit_by_hand():
  # Examples of 3, 3, 2 and 1 targets in two sequences of four.
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
def test_the_rest_of_a_split_example_is_truncated(packing):
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


def test_best_fit_uses_the_fullest_sequence():
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


def test_encoders_have_separate_sequences():
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
  # The second example's targets would fit, but not its encoder inputs.
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
  with pytest.raises(ValueError, match=r"example 0: 'id' has no dimens"):
    packed_input.PackedInput(length=3, **shared).get_next()


def _with_key(key, *values):
  """Returns an input of examples with an additional array."""
  examples = [
    {**example_source.lm_features(np.arange(4)), key: np.asarray(value)}
    for value in values
  ]
  return packed_input.PackedInput(
    examples=example_stream.Examples(
      source=example_source.InMemoryExamples(examples), shuffle_seed=None
    ),
    global_batch_size=1,
    length=6,
  )


def test_weights_are_float32_whatever_the_first_example_has():
  made = _with_key("weights", [1, 0, 1], [0.5, 0.25, 1.0], [True, False, True])
  weights = made.get_next()["weights"]
  assert weights.dtype == np.float32
  assert weights.tolist() == [[1, 0, 1, 0.5, 0.25, 1]]
  assert made.get_next()["weights"].tolist() == [[1, 0, 1, 1, 0, 1]]


def _kinds(runs, **kwargs):
  made: dict[str, Any] = {
    "examples": example_stream.Examples(
      source=example_source.InMemoryExamples(runs), shuffle_seed=None
    ),
    "global_batch_size": 2,
    "length": 4,
  }
  return packed_input.PackedInput(**made | kwargs)


def test_long_examples_are_split_truncated_or_rejected():
  runs = _runs((6,))
  split = _kinds(runs, packing=_FIRST_FIT).get_next()
  np.testing.assert_array_equal(split["inputs"], [[0, 1, 2, 3], [4, 5, 0, 0]])
  cut = _kinds(runs, packing=_NONE, cut_long_examples=True).get_next()
  np.testing.assert_array_equal(cut["inputs"], [[0, 1, 2, 3]] * 2)
  with pytest.raises(
    ValueError, match=r"example 0 has 6 tokens, more than .*4"
  ):
    _kinds(runs, packing=_NONE).get_next()


@pytest.mark.parametrize(
  ("make", "message"),
  [
    (lambda: _kinds([]).get_next(), r"The source holds no examples"),
    (lambda: _kinds([]).check_readable(), r"The source holds no examples"),
    (
      lambda: _kinds([np.array([5], np.int32)]).get_next(),
      r"example 0 has no targets: .* set begin_id",
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
      r"differ in length: {'inputs': 2, 'targets': 3}",
    ),
    (
      lambda: _kinds(
        [
          {"inputs": np.zeros(2, int), "targets": np.zeros(2, int)},
          np.arange(3),
          {**example_source.lm_features(np.arange(3)), "x": np.zeros(2)},
        ]
      ).get_next(),
      r"example 2 has the arrays \['inputs', 'targets', 'x'\], but example 0",
    ),
    (
      lambda: _with_key("x", [1, 2, 3], [0.1, 0.2, 0.3]).get_next(),
      r"example 1: 'x' is float64 \[3\], but int64 \[3\] in another example",
    ),
    (
      lambda: _with_key("x", np.ones((3, 4)), np.ones((3, 1))).get_next(),
      r"example 1: 'x' is float64 \[3, 1\], but",
    ),
    (
      lambda: _with_key("x", [1, 2, 2**31]).get_next(),
      r"example 0: 'x' has values from 1 to 2147483648, which exceed int32",
    ),
    (lambda: _kinds([], max_waiting=0), r"max_waiting must be positive"),
    (lambda: _kinds([], num_workers=-1), r"num_workers must be at least 0"),
    (lambda: _kinds([], encoder_length=0), r"encoder_length must be positive"),
    (lambda: _kinds([], encoder_length=4), r"SPLIT would separate targets"),
    (lambda: _kinds([], cut_long_examples=True), r"no effect with .* SPLIT"),
    (
      lambda: example_stream.Examples(
        source=example_source.InMemoryExamples([]),
        shuffle_seed=None,
        num_epochs=0,
      ),
      r"Examples.num_epochs must be positive",
    ),
  ],
)
def test_invalid_inputs_and_examples_are_rejected(make, message):
  with pytest.raises(ValueError, match=message):
    make()


def test_a_batch_smaller_than_the_hosts_is_rejected():
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
      {
        "data": {
          "num_documents": 4,
          "shuffle_seed": 1,
          "chunk_length": None,
          "content": "0",
        }
      },
      r"num_documents 4, but this input has num_documents 3",
    ),
    ({"data": {"m0": {}}}, r"saved with data of \['m0'\], but this input has"),
  ],
)
def test_a_state_of_other_data_is_rejected(change, message):
  made = _text([b"ab", b"c", b""])
  made.get_next()
  before = made.get_state()
  with pytest.raises(ValueError, match=message):
    made.set_state({**before, **change})
  assert made.get_state() == before


def test_other_documents_of_the_same_number_are_noticed():
  state = _text([b"ab", b"c", b""]).get_state()
  _text([b"ab", b"c", b""]).set_state(state)
  for other in ([b"ab", b"d", b""], [b"a", b"bc", b""], [b"c", b"ab", b""]):
    with pytest.raises(ValueError, match=r"saved with content [0-9a-f]{16}, "):
      _text(other).set_state(state)
  # Of many documents a sample is read, with the first and the last.
  many = [b"%d" % i for i in range(100)]
  state = _text(many).get_state()
  for index in (0, 99):
    with pytest.raises(ValueError, match="with content"):
      _text([*many[:index], b"x", *many[index + 1 :]]).set_state(state)


def test_decodes_ids_and_lists_documents_of_a_batch():
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


def test_a_subclass_edits_batches():
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
  np.testing.assert_array_equal(made.get_next()["weights"], 2)


def _weighted(*weights, **fields):
  """Returns an input of examples of two targets with these weights."""
  examples = [
    example_source.lm_features(run) | {"weights": np.full(2, w, np.float32)}
    for run, w in zip(_runs([2] * len(weights)), weights, strict=True)
  ]
  return packed_input.PackedInput(
    examples=example_stream.Examples(
      source=example_source.InMemoryExamples(examples), shuffle_seed=None
    ),
    global_batch_size=2,
    **{"length": 2} | fields,
  )


def test_batches_may_lack_targets_if_examples_have_weights():
  assert _weighted(1, 0).may_lack_targets
  assert not _text([b"abc"]).may_lack_targets


def test_examples_without_targets_are_counted_and_the_first_is_named():
  made = _weighted(1, 0, 1, 0, 1, 0)
  assert made.find_problem_of_targets() is None
  assert made.describe_untrained() is None
  made.get_next()
  text = made.describe_untrained()
  assert text == (
    "1 example has no target to learn from within `length` (2), such as"
    " example 1"
  )
  # Each once, however often it is read.
  for _ in range(9):
    made.get_next()
  text = made.describe_untrained() or ""
  assert text.startswith("3 examples have")
  assert text.endswith(", such as example 1")


@pytest.mark.parametrize("packing", [_SPLIT, _BEST_FIT, _NONE])
def test_data_without_any_target_is_a_problem(packing):
  made = _weighted(0, 0, 0, packing=packing)
  assert (made.find_problem_of_targets() or "").startswith(
    "none of the 3 examples has a target, so there is nothing to train on, such"
    " as example 0."
  )


def test_a_target_behind_the_cut_is_none():
  example = example_source.lm_features(np.arange(4, dtype=np.int32))
  example["weights"] = np.asarray([0, 0, 1], np.float32)
  made = packed_input.PackedInput(
    examples=example_stream.Examples(
      source=example_source.InMemoryExamples([example]), shuffle_seed=None
    ),
    packing=_BEST_FIT,
    global_batch_size=2,
    length=2,
  )
  # Its rest is in another sequence.
  assert made.find_problem_of_targets() is None
  made.cut_long_examples = True
  assert made.find_problem_of_targets() is not None


def test_a_batch_that_was_looked_at_is_read_once():
  made, plain = _text(["one", "two", "three"]), _text(["one", "two", "three"])
  reads = []
  source = made.examples.source
  made.examples.read = lambda reference: (
    reads.append(reference) or source[reference]
  )
  batch = made.peek()
  assert made.get_state() == plain.get_state()
  expected = plain.get_next()
  for found in (batch, made.get_next()):
    for key, value in expected.items():
      np.testing.assert_array_equal(found[key], value)
  assert made.get_state() == plain.get_state()
  assert len(reads) == len(set(reads))
  # Of another size it is another batch.
  made.peek()
  made.set_global_batch_size(2)
  assert len(made.get_next()["inputs"]) == 2


@pytest.mark.parametrize("num_epochs", [1, 3])
@pytest.mark.parametrize("packing", [_SPLIT, _FIRST_FIT, _BEST_FIT, _NONE])
def test_counted_batches_are_those_of_the_epochs(packing, num_epochs):
  random = np.random.default_rng(num_epochs)
  lengths = random.integers(1, 7, size=23).tolist()

  def make(epochs):
    return packed_input.PackedInput(
      examples=example_stream.Examples(
        source=example_source.InMemoryExamples(_runs(lengths)),
        shuffle_seed=3,
        num_epochs=epochs,
      ),
      packing=packing,
      global_batch_size=4,
      length=8,
    )

  assert make(None).count_batches(num_epochs) == len(list(make(num_epochs)))
