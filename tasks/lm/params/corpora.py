"""The quickstart's model on text from Debian packages.

`WordNetLm` reads definitions through SeqIO (`--config=tf`), `PythonManualLm`
reads pages through Grain (`--config=data`). Install the Debian package named in
each.
"""

import dataclasses
import functools
import pathlib
from typing import Any, ClassVar

import fiddle as fdl

from paxon.inputs import optional_library
from paxon.inputs import packing as packing_lib
from paxon.inputs.seqio_tasks import (
  feature_converters,
  task_source,
  vocabulary_tokenizer,
)
from paxon.inputs.sources import example_source, grain_sources
from paxon.inputs.tokenizers import load
from paxon.runner import user_error
from paxon.tasks.lm import held_out
from paxon.tasks.lm.params import quickstart

_WORDNET = "wordnet_definitions"
_PARTS = ("adj", "adv", "noun", "verb")


@dataclasses.dataclass(frozen=True, kw_only=True)
class WordNetTask:
  """Registers a SeqIO task: WordNet's definitions, as bytes.

  Attributes:
    folder: Folder with `data.noun` and the other data files.
  """

  folder: str

  def __call__(self) -> None:
    """Registers the task.

    Raises:
      FileNotFoundError: A data file is missing.
    """
    files = [pathlib.Path(self.folder, f"data.{part}") for part in _PARTS]
    for file in files:
      if not file.is_file():
        raise FileNotFoundError(
          f"{file} is missing: apt-get install wordnet-base, or set the knob"
          " `folder` to where its data files are."
        )
    seqio = optional_library.seqio()
    seqio.TaskRegistry.add(
      _WORDNET,
      source=seqio.TextLineDataSource({"train": [str(file) for file in files]}),
      preprocessors=[_definitions, seqio.preprocessors.tokenize],
      output_features={"targets": seqio.Feature(seqio.ByteVocabulary())},
    )


def _definitions(dataset: Any) -> Any:
  """Returns the word and the definition of each line."""
  strings = optional_library.tensorflow().strings
  # Lines of the license begin with two spaces.
  dataset = dataset.filter(lambda line: strings.substr(line, 0, 2) != "  ")

  def definition(line: Any) -> dict[str, Any]:
    word = strings.split(line, " ")[4]
    text = strings.strip(strings.split(line, "|")[1])
    return {"targets": strings.join([word, ": ", text])}

  return dataset.map(definition)


class WordNetLm(held_out.HeldOut, quickstart.PythonStdlibLm):
  """0.8 M parameters on 117,659 WordNet 3.0 definitions (8 MB), through SeqIO.

  apt-get install wordnet-base && bazel run --config=tf //runner:main --
  --exp=tasks.lm.params.corpora.WordNetLm --fdl.folder=/usr/share/wordnet

  Measured 2026-11-22 on a CPU after 1,000 steps: 2.22 bits per byte on held-out
  definitions; a byte trigram model reaches 3.08 and `xz -9e` 2.97.

  Attributes:
    folder: Folder with the data files of the package.
  """

  prompts = ("dog: ", "music: ", "quickly: ")

  folder: str | None = None

  run_requires: ClassVar[tuple[str, ...]] = ("folder", "seqio")

  def datasets(self) -> dict[str, fdl.Config]:
    """Returns shuffled definitions and one epoch of held-out ones."""
    if self.folder is None:
      return self.unset(
        knob="folder",
        example="/usr/share/wordnet",
        how="Install it: apt-get install wordnet-base.",
      )
    register = fdl.Config(WordNetTask, folder=self.folder)
    tokenizer = self._tokenizer()
    source = fdl.Config(
      task_source.TaskSource,
      task=_WORDNET,
      split="train",
      converter=fdl.Config(
        feature_converters.LanguageModel, end_id=1, tokenizer=tokenizer
      ),
      register=register,
    )
    return self.splits(
      source, tokenizer=tokenizer, packing=packing_lib.Packing.SPLIT
    )

  def task(self) -> fdl.Config[Any]:
    """Returns the quickstart's task with SeqIO's byte vocabulary."""
    task = super().task()
    if self.folder is not None:
      task.tokenizer = self._tokenizer()
    return task

  def _tokenizer(self) -> fdl.Config[Any]:
    if self.tokenizer != load.BYTES:
      raise user_error.UserError(
        f"WordNetLm.tokenizer is {self.tokenizer!r}, but the SeqIO task has its"
        " own vocabulary; leave it out."
      )
    return fdl.Config(
      vocabulary_tokenizer.VocabularyTokenizer,
      name_in_registry=_WORDNET,
      register=fdl.Config(WordNetTask, folder=self.folder),
    )


class PythonManualLm(held_out.HeldOut, quickstart.PythonStdlibLm):
  """0.8 M parameters on 497 pages of Python's manual (11 MB), through Grain.

  apt-get install python3.11-doc && bazel run --config=data //runner:main --
  --exp=tasks.lm.params.corpora.PythonManualLm
  --fdl.folder=/usr/share/doc/python3.11/html/_sources

  Measured 2026-11-21 on a CPU with Python 3.11's manual after 1,000 steps: 2.38
  bits per byte on held-out pages; a byte trigram model reaches 2.84 and
  `xz -9e` 2.00.

  Attributes:
    folder: Folder with the page sources of the package.
  """

  folder: str | None = None

  run_requires: ClassVar[tuple[str, ...]] = ("folder", "seqio")

  def datasets(self) -> dict[str, fdl.Config]:
    """Returns shuffled pages and one epoch of held-out ones."""
    if self.folder is None:
      return self.unset(
        knob="folder",
        example="/usr/share/doc/python3.11/html/_sources",
        how="Install it: apt-get install python3.11-doc.",
      )
    tokenizer = self.make_tokenizer()
    pages = fdl.Config(
      grain_sources.GrainRows, open=fdl.Partial(open_pages, folder=self.folder)
    )
    source = fdl.Config(
      example_source.TokenizedDocuments, source=pages, tokenizer=tokenizer
    )
    return self.splits(
      source, tokenizer=tokenizer, packing=packing_lib.Packing.SPLIT
    )


def open_pages(folder: str) -> Any:
  """Returns the pages under `folder` as a Grain data set of bytes.

  Raises:
    FileNotFoundError: The folder has no pages.
  """
  paths = sorted(pathlib.Path(folder).rglob("*.rst.txt"))
  if not paths:
    raise FileNotFoundError(
      f"{folder} has no pages (.rst.txt): apt-get install python3.11-doc, or"
      " set the knob `folder` to where they are."
    )
  source = optional_library.grain().MapDataset.source(paths)
  return source.map(functools.partial(pathlib.Path.read_bytes))
