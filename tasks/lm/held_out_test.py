"""Tests for the baselines of held-out examples."""

import fiddle as fdl
import pytest

from paxon.inputs import byte_tokenizer, packed_input, text_baselines
from paxon.inputs.sources import example_source
from paxon.inputs.streams import example_stream
from paxon.tasks.lm import held_out

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
  config = held_out.make_baselines(
    {"train": _split(_TRAIN), "validation": _split(_OTHER)}
  )
  assert config is not None
  expected = text_baselines.TextBaselines(
    train=example_source.InMemoryDocuments(_TRAIN),
    held_out=example_source.InMemoryDocuments(_OTHER),
  )
  assert fdl.build(config)() == pytest.approx(expected())


def test_none_without_held_out_split():
  assert held_out.make_baselines({"train": _split(_TRAIN)}) is None
