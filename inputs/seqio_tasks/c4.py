"""C4 as the GPT-3 of MLPerf, and of Pax, reads it: tasks over TFRecord files.

The files are those of a TensorFlow data set: `c4/en/3.0.4` has the texts, with
a second half `train2` that training begins with after MLPerf's checkpoint, and
`c4/en/3.0.5` the validation texts as ids, in rows as they are scored.
"""

import dataclasses
import os
from typing import Any

from paxon.inputs.seqio_tasks import seqio_library

TRAIN = "c4_lm_v301_gpt"
EVAL = "c4_lm_v301_gpt_eval_tokenized"
TRAIN_SPLIT = "train2"
EVAL_SPLIT = "validation_tokenized_5662seqs"


@dataclasses.dataclass(frozen=True, kw_only=True)
class C4Tasks:
  """Adds both tasks to SeqIO's registry; nothing is read.

  Attributes:
    folder: That which has the folder `c4`.
    vocabulary_file: A SentencePiece model.
  """

  folder: str
  vocabulary_file: str

  def __post_init__(self) -> None:
    for name in ("folder", "vocabulary_file"):
      if not getattr(self, name):
        raise ValueError(f"C4Tasks.{name} must not be empty.")

  def __call__(self) -> None:
    """Adds what is not there yet."""
    seqio = seqio_library.seqio()
    io = seqio_library.tensorflow().io
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
    return seqio_library.seqio().TFExampleDataSource(
      {split: f"{folder}/c4-{split}.tfrecord-*" for split in splits},
      {key: feature},
    )


def _text_as_targets(dataset: Any) -> Any:
  return dataset.map(lambda example: {"targets": example["text"]})


def _ids_as_targets(dataset: Any) -> Any:
  cast = seqio_library.tensorflow().cast
  return dataset.map(lambda example: {"targets": cast(example["ids"], "int32")})
