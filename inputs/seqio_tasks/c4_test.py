"""Tests for the C4 tasks, with the files of a TensorFlow data set."""

import numpy as np
import pytest

from paxon.inputs.seqio_tasks import (
  c4,
  feature_converters,
  task_source,
  testing,
)
from paxon.inputs.tf_records import tf_example, tf_record_files


def test_reads_texts_and_ids(tmp_path):
  texts, ids = testing.texts(3, seed=1), [[5, 6, 7], [8, 9]]
  for version in ("3.0.4", "3.0.5"):
    (tmp_path / "c4" / "en" / version).mkdir(parents=True)
  folder = tmp_path / "c4" / "en"
  testing.write_texts(
    folder / "3.0.4" / f"c4-{c4.TRAIN_SPLIT}.tfrecord-00000-of-00001", texts
  )
  tf_record_files.write(
    folder / "3.0.5" / f"c4-{c4.EVAL_SPLIT}.tfrecord-00000-of-00001",
    (tf_example.serialize({"ids": np.array(row)}) for row in ids),
  )
  register = c4.C4Tasks(
    folder=str(tmp_path),
    vocabulary_file=testing.train_sentencepiece(tmp_path),
  )
  train = task_source.TaskSource(
    task=c4.TRAIN,
    split=c4.TRAIN_SPLIT,
    converter=feature_converters.LanguageModel(begin_id=0, end_id=1),
    register=register,
  )
  vocabulary = train.seqio_task.output_features["targets"].vocabulary
  assert [train[i]["targets"].tolist() for i in range(len(train))] == [
    [*vocabulary.encode(text), 1] for text in texts
  ]
  held_out = task_source.TaskSource(
    task=c4.EVAL,
    split=c4.EVAL_SPLIT,
    converter=feature_converters.LanguageModel(),
    register=register,
  )
  assert held_out[1]["inputs"].tolist() == [0, 8]
  assert held_out[1]["targets"].tolist() == [8, 9]
  register()  # A second time adds nothing.


@pytest.mark.parametrize("name", ["folder", "vocabulary_file"])
def test_rejects_empty_names(name):
  given = {"folder": "data", "vocabulary_file": "c4.model", name: ""}
  with pytest.raises(ValueError, match=rf"C4Tasks\.{name} must not be empty"):
    c4.C4Tasks(**given)
