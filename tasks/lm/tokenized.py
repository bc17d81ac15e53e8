"""Experiments on text: the knob `tokenizer`, by default bytes."""

import os
from typing import Any

import fiddle as fdl

from paxon.inputs import byte_tokenizer, tokenizer_protocol
from paxon.runner import experiment


class Tokenized(experiment.Experiment):
  """Text that is tokenized by bytes, or by a vocabulary file.

  Attributes:
    tokenizer: `bytes`; a `tokenizer.json`, a SentencePiece model or a rank file
      of tiktoken; or a Hugging Face folder with one of them. The run stores its
      hash, and resumes, evaluates and decodes with no other.
  """

  tokenizer: str = byte_tokenizer.NAME

  path_knobs = ("tokenizer",)

  def make_tokenizer(self) -> fdl.Config[Any]:
    """Returns the tokenizer, padded to `vocab_size` if there is one."""
    if self.tokenizer == byte_tokenizer.NAME:
      return fdl.Config(byte_tokenizer.ByteTokenizer)
    # Bytes need no vocabulary and no file system.
    from paxon.inputs.tokenizers import load
    from paxon.runner import run_dir

    path = os.fspath(run_dir.resolve(self.tokenizer, os.environ))
    size = getattr(self, "vocab_size", None)
    return fdl.Config(load.load, path=path, padded_size=size)

  def run_files(self) -> dict[str, str]:
    """Returns the tokenizer's files: a run is read without their folder."""
    found = super().run_files()
    if self.tokenizer in (None, byte_tokenizer.NAME):
      return found
    from paxon.inputs.tokenizers import load
    from paxon.runner import run_dir

    path = os.fspath(run_dir.resolve(self.tokenizer, os.environ))
    names = {each: os.path.basename(each) for each in load.find_files(path)}
    return {**found, **{f"tokenizer/{n}": each for each, n in names.items()}}

  def find_vocab_size(self) -> int:
    """Returns the vocabulary size of a model for this tokenizer alone.

    A multiple of 8, so that the embedding can be sharded.
    """
    tokenizer = fdl.build(self.make_tokenizer())
    return tokenizer_protocol.padded_vocab_size(tokenizer, multiple=8)

  def shrink(self) -> Any:
    """Returns a toy-sized version whose tokens are bytes."""
    return super().shrink().replace(tokenizer=byte_tokenizer.NAME)
