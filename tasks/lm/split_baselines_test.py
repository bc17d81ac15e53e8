"""Tests for the baselines of splits."""

import fiddle as fdl
import pytest

from paxon.inputs import (
  byte_tokenizer,
  example_source,
  example_stream,
  packed_input,
  text_baselines,
)
from paxon.tasks.lm import split_baselines

_TRAIN = ["in the beginning", "was the word", "and the word was"]
_OTHER = ["and the beginning was the word"]


def _split(texts):
  tokenizer = fdl.Config(byte_tokenizer.ByteTokenizer)
  source = fdl.Config(
    example_source.TokenizedDocuments,
    source=fdl.Config(example_source.InMemoryDocuments, texts),
    tokenizer=tokenizer,
  )
  return fdl.Config(
    packed_input.PackedInput,
    examples=fdl.Config(
      example_stream.Examples, source=source, shuffle_seed=None
    ),
    tokenizer=tokenizer,
    global_batch_size=1,
    length=8,
  )


def test_reads_text_of_the_examples():
  config = split_baselines.of_splits(
    {"train": _split(_TRAIN), "validation": _split(_OTHER)}
  )
  assert config is not None
  expected = text_baselines.TextBaselines(
    train=example_source.InMemoryDocuments(_TRAIN),
    held_out=example_source.InMemoryDocuments(_OTHER),
  )
  assert fdl.build(config)() == pytest.approx(expected())


def test_none_without_held_out_split():
  assert split_baselines.of_splits({"train": _split(_TRAIN)}) is None
