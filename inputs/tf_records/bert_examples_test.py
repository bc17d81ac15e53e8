"""Tests for BERT's examples in TFRecord files."""

import numpy as np
import pytest

from paxon.inputs import packed_input
from paxon.inputs import packing as packing_lib
from paxon.inputs.streams import example_stream
from paxon.inputs.tf_records import bert_examples, tf_example, tf_record_files


def _record(**changes):
  """Returns [CLS] 7 [MASK] 9 [SEP] 8 [SEP] padded to 9; 5 was masked."""
  features = {
    "input_ids": [101, 7, 103, 9, 102, 8, 102, 0, 0],
    "input_mask": [1] * 7 + [0] * 2,
    "segment_ids": [0] * 5 + [1] * 2 + [0] * 2,
    "masked_lm_positions": [2, 5, 0, 0],
    "masked_lm_ids": [5, 8, 0, 0],
    "masked_lm_weights": [1.0, 1.0, 0.0, 0.0],
    "next_sentence_labels": [0],
  } | changes
  return tf_example.serialize(
    {k: np.array(v) for k, v in features.items() if v is not None}
  )


def _source(folder, records, **given):
  tf_record_files.write(folder / "bert.tfrecord", records)
  files = tf_record_files.TfRecordFiles(files=str(folder / "bert.tfrecord"))
  rows = tf_example.TfExampleRecords(files=files)
  return bert_examples.BertExamples(rows=rows, vocab_size=200, **given)


def test_static_masks_are_those_of_the_record(tmp_path):
  example = _source(tmp_path, [_record()])[0]
  assert {key: value.tolist() for key, value in example.items()} == {
    "inputs": [101, 7, 103, 9, 102, 8, 102],
    "targets": [101, 7, 5, 9, 102, 8, 102],
    "type_ids": [0, 0, 0, 0, 0, 1, 1],
    "weights": [0, 0, 1, 0, 0, 1, 0],
  }


def test_remask_returns_the_original_text(tmp_path):
  example = _source(tmp_path, [_record()], remask=True)[0]
  assert example["inputs"].tolist() == [101, 7, 5, 9, 102, 8, 102]
  assert example["weights"].tolist() == [0, 1, 1, 1, 0, 1, 0]


def test_short_examples_are_packed(tmp_path):
  given = packed_input.PackedInput(
    examples=example_stream.Examples(
      source=_source(tmp_path, [_record()] * 3),
      shuffle_seed=None,
      num_epochs=1,
    ),
    packing=packing_lib.Packing.FIRST_FIT,
    global_batch_size=2,
    length=15,
  )
  (batch,) = given
  assert batch["segment_ids"][0].tolist() == [1] * 7 + [2] * 7 + [0]
  assert batch["positions"][0, 6:9].tolist() == [6, 0, 1]
  assert batch["type_ids"][0, 5:9].tolist() == [1, 1, 0, 0]
  assert batch["weights"].sum() == 6


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"masked_lm_ids": None}, "record 1 has no feature 'masked_lm_ids'"),
    ({"input_mask": [0] * 9}, "record 1: input_ids 9, segment_ids 9 and"),
    ({"masked_lm_positions": [2, 8, 0, 0]}, r"must be in \[0, 7\), got 2 to 8"),
    ({"masked_lm_ids": [5, 200, 0, 0]}, "to 200, and BertExamples.vocab_size"),
  ],
)
def test_rejects_invalid_records(tmp_path, changes, message):
  source = _source(tmp_path, [_record(), _record(**changes)])
  with pytest.raises(ValueError, match=message):
    _ = source[1]


def test_rejects_records_that_are_not_examples(tmp_path):
  source = _source(tmp_path, [_record(), b"\x0a\x09"])
  with pytest.raises(ValueError, match=r"record 1: not a tf\.train\.Example"):
    _ = source[1]
