"""Data of language-modeling experiments: synthetic tokens and text.

Each class defines `datasets`; combine it with a model family:

  class MyModel(lm_data.Text, MyFamily):
    train_files = "/data/c4/en/c4-train.0000?-of-01024.json.gz"
"""

from typing import Any, ClassVar, Literal

import fiddle as fdl

from paxon.inputs import packed_input, synthetic_lm_input, unset_input
from paxon.inputs.sources import (
  grain_sources,
  json_lines,
  python_stdlib,
  record_columns,
  record_files,
  text_files,
)
from paxon.learners import metrics
from paxon.runner import experiment, user_error
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


PARQUET = ".parquet"
TEXT = ".txt"
_KINDS = {PARQUET: "Parquet", TEXT: "plain text"}


class Text(tokenized.Tokenized, experiment.Experiment):
  """Documents in files of JSON lines, as C4 is distributed, or of Parquet.

  A run requires `train_files`; plans, lints and comparisons work without them.
  Without `validation_files` there is no evaluation. By default tokens are bytes
  for any `vocab_size`, so losses are per byte; the step time does not depend on
  the tokenizer.

  Attributes:
    length: Sequence length in tokens.
    documents: `files`, or `python_stdlib`, the source code of Python's standard
      library, which needs no download.
    train_files: Path or pattern of the training files, or several of them; see
      `inputs.sources.record_files`. Files ending in `.parquet` are Parquet
      (extra `data`), in `.txt` plain text, all others JSON lines.
    validation_files: Files of the validation split.
    text_key: Key of the document in a JSON object, or the column of a table.
    shuffle_window: Documents in memory that are shuffled together; the files
      are read in order, from the first batch on. None shuffles all documents,
      and indexes the files before the first batch.
  """

  length: int
  documents: Literal["files", "python_stdlib"] = "files"
  train_files: str | tuple[str, ...] | None = None
  validation_files: str | tuple[str, ...] | None = None
  text_key: str = "text"
  shuffle_window: int | None = None

  path_knobs = ("tokenizer", "train_files", "validation_files")
  run_requires: ClassVar[tuple[str, ...]] = ("train_files",)
  # The unit of text that is a document of a file of plain text.
  _documents: ClassVar[text_files.Documents] = text_files.Documents.FILE

  def get_data_fields(self) -> dict[str, Any]:
    """Returns the tokenizer and the metric bits per byte."""
    return {
      "metrics": (metrics.bits_per_byte,),
      "tokenizer": self.make_tokenizer(),
    }

  def datasets(self) -> dict[str, fdl.Config]:
    """Returns endless shuffled training text and one validation epoch."""
    train = self._source("train")
    held_out = self._source("validation")
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
    if self.shuffle_window is not None:
      shared["shuffle_window"] = self.shuffle_window
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

  def _source(self, split: str, key: str | None = None) -> fdl.Config | None:
    """Returns the documents of a split with their key; None without files."""
    key = key or self.text_key
    files = self._files(split)
    if self.documents == "python_stdlib":
      return fdl.Config(python_stdlib.PythonStdlib, split=split)
    if files is None:
      return None
    if (texts := self._text_files(files)) is not None:
      return texts
    if (rows := self._table(files, columns=(key,))) is not None:
      return fdl.Config(record_columns.TextColumn, rows=rows, column=key)
    return fdl.Config(json_lines.JsonLines, files=files, text_key=key)

  def _files(self, split: str) -> str | tuple[str, ...] | None:
    return self.train_files if split == "train" else self.validation_files

  def _table(
    self, files: str | tuple[str, ...], *, columns: tuple[str, ...] | None
  ) -> fdl.Config | None:
    """Returns the rows of Parquet files; None for files of other formats."""
    if not self._have_ending(files, PARQUET):
      return None
    fields = {} if columns is None else {"columns": columns}
    return fdl.Config(grain_sources.ParquetRows, files=files, **fields)

  def _text_files(
    self, files: str | tuple[str, ...]
  ) -> fdl.Config[text_files.TextFiles] | None:
    """Returns the documents of plain text; None for other formats."""
    if not self._have_ending(files, TEXT):
      return None
    return fdl.Config(
      text_files.TextFiles, files=files, documents=self._documents
    )

  def _have_ending(self, files: str | tuple[str, ...], ending: str) -> bool:
    """Whether all files have an ending; it is an error if only some have."""
    patterns = record_files.split_patterns(files)
    found = [each for each in patterns if each.endswith(ending)]
    others = [each for each in patterns if each not in found]
    if found and others:
      raise user_error.UserError(
        f"{type(self).__name__} reads JSON lines or {_KINDS[ending]}, not both:"
        f" one of the files is {others[0]!r}, another {found[0]!r}."
      )
    return bool(found)

  def _eval_batch_size(self) -> int:
    # Sequences of a toy are short, so a larger batch costs little.
    factor = 16 if self.documents == "python_stdlib" else 1
    return factor * self.global_batch_size
