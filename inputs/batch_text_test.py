"""Tests for descriptions of batches."""

import numpy as np

from paxon.inputs import batch_text, byte_tokenizer, packed_input
from paxon.inputs import packing as packing_lib
from paxon.inputs.sources import example_source
from paxon.inputs.streams import example_stream


def _made(texts, **kwargs):
  tokenizer = byte_tokenizer.ByteTokenizer()
  runs = [
    np.concatenate(([1], tokenizer.encode(text), [2])).astype(np.int32)
    for text in texts
  ]
  return packed_input.PackedInput(
    examples=example_stream.Examples(
      source=example_source.InMemoryExamples(runs),
      shuffle_seed=None,
      num_epochs=1,
    ),
    packing=packing_lib.Packing.FIRST_FIT,
    **{"global_batch_size": 2, "length": 8, "tokenizer": tokenizer} | kwargs,
  )


def test_segments_lengths_and_efficiency():
  made = _made(["ab\n", "c", "defgh"])
  text = batch_text.describe(made, made.get_next(), number=7)
  assert text.splitlines() == [
    "batch 7",
    "  inputs: int32 [2, 8] from 0 to 107",
    "  positions: int32 [2, 8] from 0 to 5",
    "  segment_ids: int32 [2, 8] from 0 to 2",
    "  targets: int32 [2, 8] from 0 to 107",
    "  weights: float32 [2, 8] from 0 to 1",
    "  sequences: 2 x 8 tokens; 4 of 16 are padding, packing efficiency 75.0%;"
    " 3 segments of 2 to 6 tokens, 4.0 on average",
    "  targets with a positive weight: 12",
    "  sequence 0: 2 segments",
    "    [0:4] 'ab\\n'",
    "    [4:6] 'c'",
    "  sequence 1: 1 segment",
    "    [0:6] 'defgh'",
  ]


def test_long_batches_are_truncated_and_ids_are_printed():
  made = _made(
    ["x" * 100, *["a"] * 8], global_batch_size=6, length=120, tokenizer=None
  )
  text = batch_text.describe(made, made.get_next(), number=0)
  assert "    [0:101] 1 123 123" in text
  assert text.count(" ...") == 1
  assert "    and 3 more" in text
  assert "  and 2 more sequences" in text
