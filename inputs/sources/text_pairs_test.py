"""Tests for pairs of texts."""

import numpy as np
import pytest

from paxon.inputs import byte_tokenizer, packed_input, packing
from paxon.inputs.sources import example_source, text_pairs
from paxon.inputs.streams import example_stream


def _pairs(sources, targets):
  wrap = example_source.InMemoryDocuments
  return text_pairs.TokenizedPairs(
    sources=wrap(sources),
    targets=None if targets is None else wrap(targets),
    tokenizer=byte_tokenizer.ByteTokenizer(),
  )


def test_the_decoder_predicts_the_target():
  tokenizer = byte_tokenizer.ByteTokenizer()
  found = _pairs(["ab"], ["xyz"])[0]
  begin, end = tokenizer.begin_id, tokenizer.end_id
  ids = tokenizer.encode("xyz").tolist()
  assert found["encoder_inputs"].tolist() == [*tokenizer.encode("ab"), end]
  assert found["inputs"].tolist() == [begin, *ids]
  assert found["targets"].tolist() == [*ids, end]
  assert found["target_bytes"].tolist() == [1, 1, 1, 0]


def test_documents_are_split_in_the_middle():
  tokenizer = byte_tokenizer.ByteTokenizer()
  found = _pairs(["aäb€"], None)[0]
  assert tokenizer.decode(found["encoder_inputs"][:-1]) == "aä"
  assert tokenizer.decode(found["targets"][:-1]) == "b€"


def test_numbers_of_texts_must_agree():
  with pytest.raises(
    ValueError, match=r"2 texts and targets has 1; there must"
  ):
    len(_pairs(["a", "b"], ["x"]))


def test_packed_batches():
  found = packed_input.PackedInput(
    examples=example_stream.Examples(
      source=_pairs(["a", "bc"], ["x", "yz"]), shuffle_seed=None, num_epochs=1
    ),
    packing=packing.Packing.FIRST_FIT,
    tokenizer=byte_tokenizer.ByteTokenizer(),
    global_batch_size=1,
    length=6,
    encoder_length=8,
  ).get_next()
  np.testing.assert_array_equal(
    found["encoder_segment_ids"], [[1, 1, 2, 2, 2, 0, 0, 0]]
  )
  np.testing.assert_array_equal(found["segment_ids"], [[1, 1, 2, 2, 2, 0]])
