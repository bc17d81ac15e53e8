"""C4 tasks of MLPerf's and Pax's GPT-3, over TFRecord files.

The files are those of a TensorFlow data set. `c4/en/3.0.4` has the training
texts; training from MLPerf's checkpoint uses the second half, `train2`.
`c4/en/3.0.5` has the validation texts as token ids, one evaluated sequence per
record.
"""

import dataclasses
import os
from typing import Any

from paxon.inputs import checks, optional_library

TRAIN = "c4_lm_v301_gpt"
EVAL = "c4_lm_v301_gpt_eval_tokenized"
TRAIN_SPLIT = "train2"
EVAL_SPLIT = "validation_tokenized_5662seqs"


@dataclasses.dataclass(frozen=True, kw_only=True)
class C4Tasks:
  """Adds both tasks to SeqIO's registry; reads no data.

  Attributes:
    folder: The parent folder of `c4`.
    vocabulary_file: A SentencePiece model.
  """

  folder: str
  vocabulary_file: str

  def __post_init__(self) -> None:
    checks.check_not_empty(self, "folder", "vocabulary_file")

  def __call__(self) -> None:
    """Adds the tasks that are not registered yet."""
    seqio = optional_library.seqio()
    io = optional_library.tensorflow().io
    vocabulary = seqio.SentencePieceVocabulary(self.vocabulary_file)
    if TRAIN not in seqio.TaskRegistry.names():
      seqio.TaskRegistry.add(
        TRAIN,
        source=self._source(
          "3.0.4", ("train", TRAIN_SPLIT), io.FixedLenFeature([], "string")
        ),
        preprocessors=[_text_as_targets, seqio.preprocessors.tokenize],
        output_features={"targets": seqio.Feature(vocabulary)},
      )
    if EVAL not in seqio.TaskRegistry.names():
      ids = io.FixedLenSequenceFeature([], "int64", allow_missing=True)
      seqio.TaskRegistry.add(
        EVAL,
        source=self._source("3.0.5", (EVAL_SPLIT,), ids, key="ids"),
        preprocessors=[_ids_as_targets],
        output_features={"targets": seqio.Feature(vocabulary)},
      )

  def _source(
    self, version: str, splits: tuple[str, ...], feature: Any, key: str = "text"
  ) -> Any:
    folder = os.path.join(self.folder, "c4", "en", version)
    return optional_library.seqio().TFExampleDataSource(
      {split: f"{folder}/c4-{split}.tfrecord-*" for split in splits},
      {key: feature},
    )


def _text_as_targets(dataset: Any) -> Any:
  return dataset.map(lambda example: {"targets": example["text"]})


def _ids_as_targets(dataset: Any) -> Any:
  cast = optional_library.tensorflow().cast
  return dataset.map(lambda example: {"targets": cast(example["ids"], "int32")})
