"""Data of language-modeling experiments: synthetic tokens and text.

Each class defines `datasets`; combine it with a model family:

  class MyModel(lm_data.Text, MyFamily):
    train_files = "/data/c4/en/c4-train.0000?-of-01024.json.gz"
"""

from typing import Any, ClassVar, Literal

import fiddle as fdl

from paxon.inputs import (
  json_lines,
  packed_input,
  python_stdlib,
  synthetic_lm_input,
  unset_input,
)
from paxon.learners import metrics
from paxon.runner import experiment
from paxon.tasks.lm import tokenized

_C4 = "c4/en/c4-train.0000?-of-01024.json.gz"


class Synthetic(experiment.Experiment):
  """Synthetic tokens, to measure speed.

  Attributes:
    length: Sequence length in tokens.
    vocab_size: Token ids are below it.
    random_seed: Seed of random tokens; None sets every token to 1.
  """

  length: int
  vocab_size: int
  random_seed: int | None = None

  def datasets(self) -> dict[str, fdl.Config]:
    """Returns endless training batches and one validation batch."""
    shared: dict[str, Any] = {
      "global_batch_size": self.global_batch_size,
      "length": self.length,
      "vocab_size": self.vocab_size,
      "random_seed": self.random_seed,
    }
    return {
      "train": fdl.Config(synthetic_lm_input.SyntheticLmInput, **shared),
      "validation": fdl.Config(
        synthetic_lm_input.SyntheticLmInput, num_batches=1, **shared
      ),
    }


class Text(tokenized.Tokenized, experiment.Experiment):
  """Documents in files of JSON lines, as C4 is distributed.

  A run requires `train_files`; plans, lints and comparisons work without them.
  Without `validation_files` there is no evaluation. By default tokens are bytes
  for any `vocab_size`, so losses are per byte; the step time does not depend on
  the tokenizer.

  Attributes:
    length: Sequence length in tokens.
    documents: `files`, or `python_stdlib`, the source code of Python's standard
      library, which needs no download.
    train_files: Path or pattern of the training files; see
      `inputs.json_lines`.
    validation_files: Path or pattern of the validation files.
    text_key: Key of the document in a JSON object.
  """

  length: int
  documents: Literal["files", "python_stdlib"] = "files"
  train_files: str | None = None
  validation_files: str | None = None
  text_key: str = "text"

  path_knobs = ("tokenizer", "train_files", "validation_files")
  run_requires: ClassVar[tuple[str, ...]] = ("train_files",)

  def of_data(self) -> dict[str, Any]:
    """Returns the tokenizer and the metric bits per byte."""
    return {
      "metrics": (metrics.bits_per_byte,),
      "tokenizer": self.make_tokenizer(),
    }

  def datasets(self) -> dict[str, fdl.Config]:
    """Returns endless shuffled training text and one validation epoch."""
    train = self._source("train", self.train_files)
    held_out = self._source("validation", self.validation_files)
    if train is None:
      return {
        "train": fdl.Config(
          unset_input.UnsetInput,
          global_batch_size=self.global_batch_size,
          length=self.length,
          knob="train_files",
          example=_C4,
        )
      }
    shared: dict[str, Any] = {
      "tokenizer": self.make_tokenizer(),
      "length": self.length,
    }
    splits = {
      "train": fdl.Config(
        packed_input.pack_documents,
        source=train,
        global_batch_size=self.global_batch_size,
        shuffle_seed=self.seed,
        **shared,
      )
    }
    if held_out is not None:
      splits["validation"] = fdl.Config(
        packed_input.pack_documents,
        source=held_out,
        global_batch_size=self._eval_batch_size(),
        shuffle_seed=None,
        num_epochs=1,
        **shared,
      )
    return splits

  def shrink(self) -> Any:
    """Returns a toy-sized version that reads Python's standard library."""
    return super().shrink().replace(documents="python_stdlib")

  def _source(self, split: str, files: str | None) -> fdl.Config | None:
    text_key = self.text_key
    if self.documents == "python_stdlib":
      return fdl.Config(python_stdlib.PythonStdlib, split=split)
    if files is None:
      return None
    return fdl.Config(json_lines.JsonLines, files=files, text_key=text_key)

  def _eval_batch_size(self) -> int:
    # Sequences of a toy are short, so a larger batch costs little.
    factor = 16 if self.documents == "python_stdlib" else 1
    return factor * self.global_batch_size
