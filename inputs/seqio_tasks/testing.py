"""SeqIO tasks over generated texts, for tests."""

import dataclasses
import importlib
import json
import pathlib
from typing import Any

import numpy as np

from paxon.inputs import optional_library
from paxon.inputs.tf_records import tf_example, tf_record_files

_TEXT = (
  "the cat sat on a mat and the dog ran after it until both were tired of"
  " running about so they lay down in the sun to sleep for an hour or two"
)
SENTENCEPIECE_SIZE = 48


def texts(number: int, *, seed: int) -> list[str]:
  """Returns random texts of 3 to 12 words."""
  random, words = np.random.default_rng(seed), _TEXT.split()
  return [
    " ".join(random.choice(words, size=random.integers(3, 13)))
    for _ in range(number)
  ]


def train_sentencepiece(folder: pathlib.Path) -> str:
  """Trains a 48-piece SentencePiece model; pad is 0, EOS 1, unknown 2."""
  # Imported here: tests that only write texts do not need it.
  sentencepiece = importlib.import_module("sentencepiece")
  sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(texts(300, seed=9)),
    model_prefix=str(folder / "pieces"),
    vocab_size=SENTENCEPIECE_SIZE,
    pad_id=0,
    eos_id=1,
    unk_id=2,
    bos_id=-1,
    minloglevel=2,
    num_threads=1,
  )
  return str(folder / "pieces.model")


def write_texts(
  path: pathlib.Path, given: list[str], key: str = "text"
) -> None:
  """Writes a TFRecord file of Examples with one string each."""
  records = (
    tf_example.serialize({key: np.array([text], object)}) for text in given
  )
  tf_record_files.write(path, records)


@dataclasses.dataclass(frozen=True)
class Tasks:
  """Adds tasks and mixtures to SeqIO's registry.

  Attributes:
    folder: The folder of the TFRecord files `<name>-<split>-*`.
    vocabulary_file: A SentencePiece model.
    prefix: The prefix of the tasks `<prefix>_text` and `<prefix>_other`, and
      of the mixture `<prefix>_both`.
  """

  folder: str
  vocabulary_file: str
  prefix: str

  def __call__(self) -> None:
    """Adds the tasks and the mixture."""
    seqio = optional_library.seqio()
    for name in ("text", "other"):
      seqio.TaskRegistry.add(
        f"{self.prefix}_{name}",
        source=self.source(name),
        preprocessors=[
          rename_feature,
          seqio.preprocessors.tokenize,
          seqio.CacheDatasetPlaceholder(),
          seqio.preprocessors.append_eos_after_trim,
        ],
        output_features={"targets": self.feature()},
        metric_fns=[mean_score, exact_match],
      )
    seqio.MixtureRegistry.add(
      f"{self.prefix}_both",
      [(f"{self.prefix}_text", 3), (f"{self.prefix}_other", 1)],
    )

  def source(self, name: str) -> Any:
    """Returns the source of TFRecord files whose names begin with `name`."""
    tensorflow = optional_library.tensorflow()
    return optional_library.seqio().TFExampleDataSource(
      {s: f"{self.folder}/{name}-{s}-*" for s in ("train", "validation")},
      {"text": tensorflow.io.FixedLenFeature([], tensorflow.string)},
    )

  def feature(self) -> Any:
    """Returns the feature of token ids."""
    seqio = optional_library.seqio()
    return seqio.Feature(seqio.SentencePieceVocabulary(self.vocabulary_file))


def rename_feature(dataset: Any) -> Any:
  """Renames the feature `text` to `targets`."""
  return optional_library.seqio().preprocessors.rekey(
    dataset, {"targets": "text"}
  )


def mean_score(targets: list[str], scores: np.ndarray) -> dict[str, float]:
  """Returns the mean log likelihood and the mean length of targets."""
  return {
    "mean_score": float(np.mean(scores)),
    "target_length": float(np.mean([len(target) for target in targets])),
  }


def exact_match(targets: list[str], predictions: list[str]) -> dict[str, float]:
  """Returns the fraction of predictions that equal the target, and lengths."""
  pairs = zip(targets, predictions, strict=True)
  return {
    "exact_match": float(np.mean([t == p for t, p in pairs])),
    "predicted_length": float(np.mean([len(p) for p in predictions])),
  }


def write_cache(
  folder: pathlib.Path, task: str, split: str, examples: list[list[int]]
) -> None:
  """Writes tokenized examples in the format of SeqIO's caching tool."""
  cache = folder / task
  cache.mkdir(parents=True, exist_ok=True)
  half = len(examples) // 2
  for number, part in enumerate((examples[:half], examples[half:])):
    tf_record_files.write(
      cache / f"{split}.tfrecord-{number:05}-of-00002",
      (tf_example.serialize({"targets": np.array(ids)}) for ids in part),
    )
  feature = {"shape": [None], "dtype": "int32"}
  info = {
    "num_shards": 2,
    "features": {"targets": feature},
    "seqio_version": "0.0.20",
  }
  (cache / f"info.{split}.json").write_text(json.dumps(info))
  (cache / f"stats.{split}.json").write_text(
    json.dumps({"examples": len(examples)})
  )
  (cache / "COMPLETED").touch()
